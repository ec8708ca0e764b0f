"""A rank's directory used by one thread, chunk by chunk: what proving every byte costs without help."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.disk_parts.plain import give_back
from benchmarks.workload import CHUNK_SIZE
from lmcache_ray.layout import WorldLayout
from lmcache_ray.storage.directory_lock import DirectoryOwner
from lmcache_ray.storage.disk import RankDisk
from lmcache_ray.storage.disk_names import StoredChunk, chunk_path

OWNER = DirectoryOwner("benchmarks", "disk", "one life")


def open_disk(root: Path, layout: WorldLayout) -> RankDisk:
    """The directory of the one rank."""
    return RankDisk.open(root, owner=OWNER, layout=layout, rank=0, max_nbytes=2**40)


def chunks_of(count: int, generation: int = 0) -> list[StoredChunk]:
    """Chunks with keys of their own."""
    return [StoredChunk(hashlib.sha256(b"%d" % number).digest(), generation) for number in range(count)]


class DirectoryChunks:
    """A file for each of `slots`. `read` reads these, `write` writes further ones."""

    def __init__(self, root: Path, layout: WorldLayout, slots: Sequence[np.ndarray]) -> None:
        self._disk = open_disk(root, layout)
        self._disk.inventory()
        self._slots = slots
        self._generation = 0
        self._kept = chunks_of(len(slots))
        self._write_all(self._kept)

    def write(self) -> None:
        """Every slot to a new file."""
        self._generation += 1
        self._write_all(self._written())

    def clear(self) -> None:
        """Give back the space of what was written last."""
        if self._generation:
            give_back(self._disk.directory / chunk_path(chunk) for chunk in self._written())

    def read(self) -> None:
        """Every file into its slot."""
        for chunk, slot in zip(self._kept, self._slots, strict=True):
            result = self._disk.read_into(chunk, slot)
            if result.fault is not None:
                raise RuntimeError(f"a chunk was not read: {result.fault}")

    def close(self) -> None:
        """Let the directory go."""
        self._disk.close()

    def _written(self) -> list[StoredChunk]:
        return chunks_of(len(self._slots), self._generation)

    def _write_all(self, chunks: Sequence[StoredChunk]) -> None:
        for chunk, slot in zip(chunks, self._slots, strict=True):
            if not self._disk.write(chunk, CHUNK_SIZE, slot, lambda: True):
                raise RuntimeError("a chunk was refused")
