"""One rank's part in the tiers: moves chunks between its arena and its disk, or the remote store, as it is told.

It decides nothing. Whatever stands in its way is an answer, not an exception: the tier is then out of order, and the
chunks are misses. Copies out of a slot count only if the slot was COMMITTED with the plan's generation after the last
byte was read; copies into one go through the shard, as every other write does.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np

from lmcache_ray.errors import ClosedError, DirectoryTakenError, StorageError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.layout import WorldLayout
from lmcache_ray.shard import EngineShard
from lmcache_ray.storage.directory_lock import DirectoryOwner
from lmcache_ray.storage.disk import RankDisk, StoredChunk
from lmcache_ray.storage.disk_space import disk_capacity
from lmcache_ray.storage.faults import ChunkFault, ReadResult
from lmcache_ray.storage.remote import RemoteChunk, RemoteStore
from lmcache_ray.tiers.calls import CheckedDisk, ChunkOutcome, DiskFound, RankAnswer, TierCall
from lmcache_ray.tiers.chunk_threads import ChunkThreads
from lmcache_ray.tiers.spec import DiskSpec

_WORTH_SHARING_NBYTES: Final = 2**19
"""With smaller files, two threads lose more by taking turns in the interpreter than they gain."""
_OUTCOME_OF: Final = {
    ChunkFault.MISSING: ChunkOutcome.MISSING,
    ChunkFault.DAMAGED: ChunkOutcome.DAMAGED,
    ChunkFault.UNREADABLE: ChunkOutcome.UNREADABLE,
}


class RankTiers:
    """The tiers of rank `rank`, whose memory is `shard`. Thread-safe; one call at a time opens or closes the disk.

    `disk` and `owner` say where its directory is and whose; `remote` is the world's remote store, if it has one.
    """

    def __init__(
        self,
        shard: EngineShard,
        layout: WorldLayout,
        rank: int,
        *,
        disk: DiskSpec | None,
        owner: DirectoryOwner,
        remote: RemoteStore | None,
    ) -> None:
        self._shard = shard
        self._layout = layout
        self._rank = rank
        self._spec = disk
        self._owner = owner
        self._remote = remote
        self._disk: RankDisk | None = None
        self._lock = threading.Lock()  # guards `_wanted`
        self._wanted: set[StoredChunk] = set()  # of those that are being written; a deletion withdraws them
        self._opening = threading.Lock()
        self._threads = ChunkThreads(f"tiers of rank {rank}")
        self._are_files_large = shard.slots.slot_nbytes >= _WORTH_SHARING_NBYTES
        calls: tuple[Callable[..., RankAnswer], ...] = (
            self.open_disk, self.write_disk, self.read_disk, self.delete_disk, self.touch_disk, self.check_disk,
            self.probe_disk,
            self.put_remote, self.load_remote, self.probe_remote,
        )  # fmt: skip
        self._calls = {call.__name__: call for call in calls}

    def run(self, call: TierCall) -> RankAnswer:
        """Carry a call out. Whatever goes wrong is an answer: a rank that raised would count as silent."""
        try:
            return self._calls[call.name](*call.arguments)
        except (StorageError, ClosedError) as error:
            return RankAnswer(problem=str(error))
        except Exception as error:  # the outermost frame of a call
            return RankAnswer(problem=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Give the directory back; chunks that are being copied are not waited for. Idempotent."""
        self._threads.close()
        with self._opening:
            if self._disk is not None:
                self._disk.close()
                self._disk = None
        if self._remote is not None:
            self._remote.chunks.close()

    # -- disk ---------------------------------------------------------------------------------------------------------

    def open_disk(self) -> RankAnswer:
        """Open the rank's directory, if it is not open, and say what is in it.

        Files that are being written meanwhile come to nothing: whoever asked for them does not count them any more.
        """
        if self._spec is None:
            return RankAnswer(problem="no disk is configured")
        with self._lock:
            self._wanted.clear()
        with self._opening:
            self._threads.check_open()
            try:
                if self._disk is None:
                    self._disk = RankDisk.open(
                        self._spec.root,
                        owner=self._owner,
                        layout=self._layout,
                        rank=self._rank,
                        max_nbytes=self._spec.max_nbytes,
                    )
                found = self._disk.inventory()
            except DirectoryTakenError as error:
                return RankAnswer(problem=str(error), found=DiskFound(problem_with_owner=str(error)))
        return RankAnswer(
            found=DiskFound(
                entries=[(chunk.key, chunk.generation) for chunk in found.entries],
                capacity=disk_capacity(self._spec.max_nbytes, self._layout, self._rank),
                directory=str(self._disk.directory),
                num_temporary=found.num_temporary,
                num_damaged=found.num_damaged,
            )
        )

    def write_disk(
        self, sources: Sequence[ChunkRef], targets: Sequence[ChunkRef], evicted: Sequence[ChunkRef]
    ) -> RankAnswer:
        """Delete the files of `evicted`, then copy each of `sources` out of memory to the file of its target."""
        disk = self._opened()
        with suppress(StorageError):  # then it is room that stays taken; if that is too little, a write will say so
            disk.delete(map(_stored, evicted))

        def write(position: int) -> ChunkOutcome:
            source, target = sources[position], _stored(targets[position])
            data = self._shard.slots.chunk(source.slot, source.generation, source.key)
            num_tokens = self._shard.slots.num_tokens(source.slot, source.generation)
            if data is None or not num_tokens:  # it is not there, or was cleared between the two looks
                return ChunkOutcome.NOT_DONE

            def is_intact() -> bool:
                return self._shard.slots.is_committed(source.slot, source.generation) and not self._is_withdrawn(target)

            is_written = disk.write(target, num_tokens, data, is_intact)
            if is_written and self._is_withdrawn(target):  # deleted between the last look and the file's appearance
                disk.delete([target])
                is_written = False
            return ChunkOutcome.DONE if is_written else ChunkOutcome.NOT_DONE

        wanted = {_stored(target) for target in targets}
        with self._lock:
            self._wanted |= wanted
        answer = self._threads.each(len(sources), write, with_help=self._are_files_large)
        with self._lock:
            self._wanted -= wanted
        return answer

    def read_disk(self, targets: Sequence[ChunkRef], sources: Sequence[ChunkRef], within_s: float) -> RankAnswer:
        """Copy the file of each of `sources` into memory's slot of its target; none is begun after `within_s`."""
        disk = self._opened()

        def read(position: int, data: np.ndarray) -> ReadResult:
            return disk.read_into(_stored(sources[position]), data)

        return self._fill(targets, read, within_s, with_help=self._are_files_large)

    def delete_disk(self, chunks: Sequence[ChunkRef]) -> RankAnswer:
        """Delete files; one that is being written will not appear. One that cannot be deleted keeps no other."""
        stored = [_stored(ref) for ref in chunks]
        with self._lock:
            self._wanted.difference_update(stored)
        disk, problems = self._opened(), list[str]()

        def delete(chunk: StoredChunk) -> ChunkOutcome:
            try:
                disk.delete([chunk])
            except StorageError as error:
                problems.append(str(error))
                return ChunkOutcome.NOT_DONE
            return ChunkOutcome.DONE

        return RankAnswer(bytes(map(delete, stored)), problems[0] if problems else None)

    def touch_disk(self, chunks: Sequence[tuple[bytes, int]]) -> RankAnswer:
        """These were used, least recently first: what a later life knows of it is the files' time."""
        self._opened().touch(StoredChunk(*chunk) for chunk in chunks)
        return RankAnswer()

    def probe_disk(self) -> RankAnswer:
        """Whether chunks could be written now; if not, a problem."""
        self._opened().probe()
        return RankAnswer()

    def check_disk(self, expected: Sequence[tuple[bytes, int]], repair: bool) -> RankAnswer:
        """Read every file, compare with what is `expected`; with `repair` delete what is of no use."""
        disk = self._opened()
        findings = disk.check([StoredChunk(*chunk) for chunk in expected], repair=repair)
        lost = [finding.chunk for finding in findings if finding.chunk is not None and finding.is_expected]
        return RankAnswer(
            checked=CheckedDisk(
                num_files=disk.num_files,
                nbytes_used=disk.nbytes_used,
                findings=[f"rank {self._rank}: {finding}" for finding in findings],
                lost=[(chunk.key, chunk.generation) for chunk in lost],
            )
        )

    # -- remote -------------------------------------------------------------------------------------------------------

    def put_remote(self, sources: Sequence[ChunkRef]) -> RankAnswer:
        """Copy this rank's shard of each chunk from memory to the remote store."""
        remote, slots = self._configured_remote().chunks, self._shard.slots

        def put(position: int) -> ChunkOutcome:
            key, slot, generation = sources[position]
            data = slots.chunk(slot, generation, key)
            if data is None:
                return ChunkOutcome.NOT_DONE
            num_tokens = slots.num_tokens(slot, generation)
            is_put = remote.put_shard(
                key, generation, self._rank, num_tokens, data, lambda: slots.is_committed(slot, generation)
            )
            return ChunkOutcome.DONE if is_put else ChunkOutcome.NOT_DONE

        return self._threads.each(len(sources), put, with_help=True)

    def load_remote(self, targets: Sequence[ChunkRef], sources: Sequence[RemoteChunk], within_s: float) -> RankAnswer:
        """Copy this rank's shard of each chunk from the remote store into memory's slot of its target.

        Ends after `within_s`, with what came by then. A store that is not asked any more is a problem.
        """
        remote = self._configured_remote()
        chunks = remote.within(within_s)

        def load(position: int, data: np.ndarray) -> ReadResult:
            return chunks.load_shard(sources[position], self._rank, data)

        answer = self._fill(targets, load, within_s, with_help=True)
        return replace(answer, problem=answer.problem or remote.backend.problem)

    def probe_remote(self) -> RankAnswer:
        """Whether the store answers this rank; if not, a problem. To be asked again and again while it does not."""
        backend = self._configured_remote().backend
        return RankAnswer(problem=None if backend.probe() else backend.problem)

    # -- both ---------------------------------------------------------------------------------------------------------

    def _fill(
        self,
        targets: Sequence[ChunkRef],
        read: Callable[[int, np.ndarray], ReadResult],
        within_s: float,
        *,
        with_help: bool,
    ) -> RankAnswer:
        until = time.monotonic() + within_s

        def fill(position: int) -> ChunkOutcome:
            outcome = ChunkOutcome.NOT_DONE  # unless the slot is ours to write
            if time.monotonic() >= until:
                return outcome

            def read_into(_: int, data: np.ndarray) -> int:
                nonlocal outcome
                result = read(position, data)
                outcome = ChunkOutcome.NOT_DONE if result.fault is None else _OUTCOME_OF[result.fault]
                return result.num_tokens

            (is_committed,) = self._shard.fill([targets[position]], read_into)
            return ChunkOutcome.DONE if is_committed else outcome

        return self._threads.each(len(targets), fill, with_help=with_help)

    def _is_withdrawn(self, chunk: StoredChunk) -> bool:
        with self._lock:
            return chunk not in self._wanted

    def _opened(self) -> RankDisk:
        if self._disk is None:
            raise StorageError("the disk's directory is not open")
        return self._disk

    def _configured_remote(self) -> RemoteStore:
        if self._remote is None:
            raise StorageError("no remote store is configured")
        return self._remote


def _stored(ref: ChunkRef) -> StoredChunk:
    return StoredChunk(ref.key, ref.generation)
