"""Disks and a remote store in memory, with the mishaps of real ones.

A disk belongs to a node and outlives its rank's processes, as a file system does. Each write takes two steps, so that
a process may die, stop or lose its chunk between them. What is read is proven by a checksum, as the real formats do.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import numpy as np
from typing_extensions import Buffer

from lmcache_ray.errors import StorageError, StorageUnavailableError
from lmcache_ray.storage.base import StoredObject
from lmcache_ray.storage.disk import DiskFinding, DiskInventory, StoredChunk
from lmcache_ray.storage.faults import ChunkFault, ReadResult
from tests.simulation.faults import Fault, Faults
from tests.simulation.scheduler import Scheduler


@dataclass(slots=True)
class _File:
    data: bytes
    num_tokens: int
    checksum: int


@dataclass(slots=True)
class Directory:
    """What lies on one rank's disk on one node, whoever has it open. `temporary` files are half written."""

    files: dict[StoredChunk, _File] = field(default_factory=dict)
    temporary: set[int] = field(default_factory=set)
    num_begun: int = 0

    def damage(self, position: int) -> bool:
        """Flip a bit of some file; False if there is none."""
        if not self.files:
            return False
        file = list(self.files.values())[position % len(self.files)]
        file.data = bytes((file.data[0] ^ 1,)) + file.data[1:]
        return True

    def tear(self, position: int) -> bool:
        """Cut some file short, as a power failure does."""
        if not self.files:
            return False
        file = list(self.files.values())[position % len(self.files)]
        file.data = file.data[: len(file.data) // 2]
        return True


class MemoryDisk:
    """A `RankDisk` over a `Directory`, opened by one process; `max_files` are its limit."""

    def __init__(self, directory: Directory, scheduler: Scheduler, faults: Faults, max_files: int) -> None:
        self.directory = Path("/disk")
        self._files = directory
        self._scheduler = scheduler
        self._faults = faults
        self._max_files = max_files

    @property
    def nbytes_used(self) -> int:
        """Bytes of all files."""
        return sum(len(file.data) for file in self._files.files.values())

    @property
    def num_files(self) -> int:
        """Complete files."""
        return len(self._files.files)

    def inventory(self) -> DiskInventory:
        """Sweep what is half written or cut short, and say what is there."""
        self._pass_time()
        num_temporary = len(self._files.temporary)
        self._files.temporary.clear()
        short = [chunk for chunk, file in self._files.files.items() if len(file.data) < 64]
        for chunk in short:
            del self._files.files[chunk]
        return DiskInventory(list(self._files.files), num_temporary, len(short), 0, 0)

    def write(self, chunk: StoredChunk, num_tokens: int, data: np.ndarray, is_intact: Callable[[], bool]) -> bool:
        """Copy, wait, look whether what was copied is still there, publish."""
        if len(self._files.files) + len(self._files.temporary) >= self._max_files:
            return False
        self._files.num_begun += 1
        number = self._files.num_begun
        self._files.temporary.add(number)
        try:
            half = len(data) // 2
            copy = data[:half].tobytes()
            self._pass_time()
            copy += data[half:].tobytes()
            if not is_intact():
                return False
            self._files.files[chunk] = _File(copy, num_tokens, crc32(copy))
            return True
        finally:
            self._files.temporary.discard(number)

    def read_into(self, chunk: StoredChunk, data: np.ndarray) -> ReadResult:
        """Read and prove."""
        self._pass_time()
        file = self._files.files.get(chunk)
        if file is None:
            return ReadResult(0, ChunkFault.MISSING)
        content = file.data
        data[: len(content) // 2] = np.frombuffer(content[: len(content) // 2], dtype=np.uint8)
        self._pass_time()
        if len(content) != len(data) or crc32(content) != file.checksum:
            return ReadResult(0, ChunkFault.DAMAGED)
        data[:] = np.frombuffer(content, dtype=np.uint8)
        return ReadResult(file.num_tokens)

    def delete(self, chunks: Iterable[StoredChunk]) -> None:
        """Delete those that are there."""
        for chunk in chunks:
            self._pass_time()
            self._files.files.pop(chunk, None)

    def touch(self, chunks: Iterable[StoredChunk]) -> None:
        """They are the latest."""
        for chunk in chunks:
            if chunk in self._files.files:
                self._files.files[chunk] = self._files.files.pop(chunk)

    def probe(self) -> None:
        """Whether it can be written."""
        self._pass_time()

    def check(self, expected: Iterable[StoredChunk], *, repair: bool = False) -> list[DiskFinding]:
        """Not a part of this world."""
        raise StorageError("the simulated disk is not checked")

    def close(self) -> None:
        """The directory stays."""

    def _pass_time(self) -> None:
        """What a call takes; one that is to fail does so here."""
        if self._faults.strikes(Fault.DISK_FAILS):
            raise StorageError("the simulated disk fails")
        delay_s = self._faults.slowness(Fault.DISK_SLOW)
        if delay_s:
            self._scheduler.sleep(delay_s)


class MemoryRemote:
    """A `StorageBackend` in memory. Down, it refuses; slow, it answers when its caller has given up, perhaps."""

    evicts_itself = False

    def __init__(self, scheduler: Scheduler, faults: Faults) -> None:
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._scheduler = scheduler
        self._faults = faults
        self.is_down = False

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """See `StorageBackend`."""
        self._meet()
        self._objects[name] = (b"".join(parts), self._scheduler.now)
        self._pass_time()

    def get(self, name: str) -> Buffer | None:
        """See `StorageBackend`."""
        return self.get_many([name])[0]

    def get_many(self, names: Sequence[str]) -> list[Buffer | None]:
        """See `StorageBackend`."""
        self._meet()
        self._pass_time()
        return [self._objects[name][0] if name in self._objects else None for name in names]

    def exist(self, names: Sequence[str]) -> list[bool]:
        """See `StorageBackend`."""
        self._meet()
        self._pass_time()
        return [name in self._objects for name in names]

    def delete(self, names: Sequence[str]) -> None:
        """See `StorageBackend`."""
        self._meet()
        for name in names:
            self._objects.pop(name, None)
        self._pass_time()

    def list(self, folder: str) -> Iterator[StoredObject]:
        """See `StorageBackend`."""
        self._meet()
        stored = [
            StoredObject(name, len(data), written)
            for name, (data, written) in self._objects.items()
            if name.startswith(f"{folder}/")
        ]
        self._pass_time()
        return iter(stored)

    def close(self) -> None:
        """Nothing to give up."""

    def _meet(self) -> None:
        if self.is_down:
            self._faults.count(Fault.REMOTE_DOWN)
            raise StorageUnavailableError("the simulated remote store is down")

    def _pass_time(self) -> None:
        delay_s = self._faults.slowness(Fault.REMOTE_SLOW)
        if delay_s:
            self._scheduler.sleep(delay_s)
