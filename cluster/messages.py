"""What crosses a process border: frozen values whose bulk is packed into `bytes`. Pure.

Pickling a list of small objects costs more than a whole actor call, so keys, slots, generations and KV rows travel as
one `bytes` each. Messages should stay below `MESSAGE_NBYTES`; beyond it Ray sends them through its object store,
which costs some ten milliseconds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from lmcache_ray.index.plans import ChunkRef, make_refs
from lmcache_ray.keys import KEY_NBYTES

from .topology import RankPlace

if TYPE_CHECKING:
    from .ray_calls import Ref

MESSAGE_NBYTES: Final = 80 * 1024
_NUMBER_NBYTES: Final = 8


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Chunk keys, one after the other."""
    return b"".join(keys)


def unpack_keys(packed: bytes) -> list[bytes]:
    """The keys again."""
    return [packed[at : at + KEY_NBYTES] for at in range(0, len(packed), KEY_NBYTES)]


@dataclass(frozen=True, slots=True)
class PackedRefs:
    """A run of `ChunkRef` as three columns: keys, slots (8 bytes each) and generations (8 bytes each)."""

    keys: bytes
    slots: bytes
    generations: bytes

    @staticmethod
    def pack(refs: Sequence[ChunkRef]) -> PackedRefs:
        """Three columns of `refs`."""
        return PackedRefs(
            pack_keys([ref.key for ref in refs]),
            pack_numbers([ref.slot for ref in refs]),
            pack_numbers([ref.generation for ref in refs]),
        )

    @staticmethod
    def joined(parts: Sequence[PackedRefs]) -> PackedRefs:
        """All runs, one after the other."""
        return PackedRefs(
            b"".join([part.keys for part in parts]),
            b"".join([part.slots for part in parts]),
            b"".join([part.generations for part in parts]),
        )

    def unpack(self) -> tuple[ChunkRef, ...]:
        """The refs again."""
        return make_refs(unpack_keys(self.keys), _numbers(self.slots), _numbers(self.generations))

    def __len__(self) -> int:
        return len(self.keys) // KEY_NBYTES


def _numbers(packed: bytes) -> array[int]:
    numbers: array[int] = array("Q")
    numbers.frombytes(packed)
    return numbers


@dataclass(frozen=True, slots=True)
class PackedRows:
    """KV rows of consecutive chunks: runs of adjacent rows, and how many rows each chunk has.

    Engines hand out blocks of adjacent rows, so runs are far shorter than one number per token.
    """

    starts: bytes
    lengths: bytes
    rows_per_chunk: bytes

    @staticmethod
    def most_nbytes(rows: np.ndarray, num_chunks: int) -> int:
        """Bytes that rows of a prompt take at most when packed as this many chunks."""
        num_runs = 1 + np.count_nonzero(rows[1:] - 1 != rows[:-1])
        return int(2 * num_runs + num_chunks) * _NUMBER_NBYTES

    @staticmethod
    def pack(rows: Sequence[np.ndarray]) -> PackedRows:
        """`rows` has one int64 array per chunk."""
        counts = np.array([len(chunk) for chunk in rows], dtype=np.int64)
        flat = np.concatenate(rows) if rows else np.empty(0, dtype=np.int64)
        is_first = np.ones(len(flat) + 1, dtype=bool)  # of its run; one more for the end of the last
        np.not_equal(flat[1:] - 1, flat[:-1], out=is_first[1:-1])
        borders = np.flatnonzero(is_first)
        begins = borders[:-1]
        return PackedRows(flat[begins].tobytes(), (borders[1:] - begins).tobytes(), counts.tobytes())

    def unpack(self) -> list[np.ndarray]:
        """One int64 array per chunk again."""
        starts = np.frombuffer(self.starts, dtype=np.int64)
        lengths = np.frombuffer(self.lengths, dtype=np.int64)
        counts = np.frombuffer(self.rows_per_chunk, dtype=np.int64)
        ends = np.cumsum(lengths)
        flat = np.repeat(starts - (ends - lengths), lengths)
        flat += np.arange(len(flat))
        begin, rows = 0, []
        for count in counts.tolist():
            rows.append(flat[begin : begin + count])
            begin += count
        return rows


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Integers from 0 to 2^64 - 1, 8 bytes each."""
    return array("Q", numbers).tobytes()


def unpack_numbers(packed: bytes) -> list[int]:
    """The integers again."""
    return _numbers(packed).tolist()


def pack_flags(flags: Iterable[bool]) -> bytes:
    """One byte, 0 or 1, per flag."""
    return bytes(flags)


def unpack_flags(packed: bytes) -> list[bool]:
    """The flags again."""
    return [flag == 1 for flag in packed]


# -- caller <-> coordinator -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LookupItem:
    """One prompt to look up; with `lease_id` what is found is pinned under it."""

    keys: bytes
    lease_id: str | None = None


@dataclass(frozen=True, slots=True)
class LoadItem:
    """One prompt to load from chunk `start` on, pinned under each of `lease_ids`.

    With `keep` the first of them is to end by release or with its client, and never by time.
    """

    keys: bytes
    start: int
    lease_ids: tuple[str, ...]
    keep: bool = False

    def missed(self) -> PlannedLoad:
        """The answer where nothing of it can be loaded."""
        return PlannedLoad(self.start, PackedRefs.pack(()))


@dataclass(frozen=True, slots=True)
class StoreItem:
    """One prompt to store from chunk `start` on; `rank` is None when one caller writes for all ranks."""

    keys: bytes
    start: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """Where the cached chunks lie: `refs` are those of the prompt's chunks from `start` on.

    `is_kept`: the lease was asked to be kept, and does not end by time. `must_wait`: nothing was planned, since part of
    what is cached has to be brought into memory first.
    """

    start: int
    refs: PackedRefs
    is_kept: bool = False
    must_wait: bool = False


@dataclass(frozen=True, slots=True)
class PlannedStore:
    """What is to be written: `positions` (packed numbers): number i is the index of chunk i among the prompt's keys.

    `plan_id` is None if nothing was planned: because the cluster cannot serve now, or, with `must_wait`, because chunks
    that are being copied to disk leave no room yet.
    """

    plan_id: int | None
    refs: PackedRefs
    positions: bytes
    num_ready: int
    must_wait: bool = False


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """Load and store plans of the leading prompts of a window; if there are none, what the first one waits for."""

    plans: list[tuple[PlannedLoad, PlannedStore]]
    must_promote: bool = False
    must_wait_for_room: bool = False


@dataclass(frozen=True, slots=True)
class StoreDone:
    """Acknowledgements of one plan: per rank, one flag byte for each chunk."""

    plan_id: int
    flags: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class ClientHello:
    """A process that uses the cluster. `liveness_path` is a file it keeps locked while it lives."""

    client_id: str
    node_id: str
    pid: int
    liveness_path: str | None


@dataclass(frozen=True, slots=True)
class DirectWrites:
    """What a client process writes into arenas itself: the number of this call, and the lowest still under way there.

    What was planned for lower ones, in answers that never arrived, that process does not write any more.
    """

    call: int
    oldest: int


@dataclass(frozen=True, slots=True)
class RankHello:
    """A rank that is ready to serve."""

    worker_id: int
    local_worker_id: int
    local_world_size: int
    node_id: str
    pid: int
    arena_path: str | None
    slots_total: int
    kv_rows: int

    @property
    def place(self) -> RankPlace:
        """Where it runs."""
        return RankPlace(self.worker_id, self.local_worker_id, self.local_world_size, self.node_id)


# -- rank <-> rank, through the coordinator ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parcel:
    """A broadcast object on its way: pickled by the source, so that the coordinator need not be able to load it.

    `references` are objects in Ray's store that go with it; they stay alive as long as the parcel does.
    """

    pickled: bytes
    references: tuple[Ref, ...] = ()


# -- caller <-> rank ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Payload:
    """Chunk bytes that travel by Ray's object store: uint8 ``[num_chunks, slot_nbytes]`` and a flag byte per chunk."""

    data: np.ndarray
    present: bytes


@dataclass(frozen=True, slots=True)
class LoadTask:
    """Read `refs` into `rows`, the first chunk from `first_row` on, out of the arena at `arena_path` (None: own).

    Where that arena lies on another node, the step's payload has the bytes instead, from its chunk `payload_start` on.
    """

    refs: PackedRefs
    rows: PackedRows
    first_row: int
    arena_path: str | None = None
    payload_start: int | None = None


@dataclass(frozen=True, slots=True)
class StoreTask:
    """Write `rows` into the slots of `refs`."""

    refs: PackedRefs
    rows: PackedRows


@dataclass(frozen=True, slots=True)
class StepResult:
    """A flag byte per chunk: whether its rows are good (load tasks), whether it is committed (store tasks)."""

    loaded: list[bytes]
    stored: list[bytes]


def batches(sizes: Sequence[int], limit: int = MESSAGE_NBYTES) -> Iterable[range]:
    """Split items of the given sizes into consecutive ranges of at most `limit` in sum; a larger item goes alone."""
    begin, total = 0, 0
    for position, size in enumerate(sizes):
        if position > begin and total + size > limit:
            yield range(begin, position)
            begin, total = position, 0
        total += size
    if begin < len(sizes):
        yield range(begin, len(sizes))
