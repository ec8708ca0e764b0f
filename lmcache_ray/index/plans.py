"""What the index decides, as values: plans for others to carry out, and reports of what it ended.

Apart from the index, so that ranks, engines and messages can speak of plans without the machine that makes them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from typing import Final, NamedTuple


class ChunkRef(NamedTuple):
    """One use of one slot: `key`'s chunk lies in `slot`, on every holder rank, for as long as `generation` is current.

    Whoever reads or writes the slot checks the generation, so a ref that has been overtaken is harmless. A named tuple,
    because a busy index makes hundreds of thousands of them a second.
    """

    key: bytes
    slot: int
    generation: int


_new_ref: Final[Callable[[type[ChunkRef], tuple[bytes, int, int]], ChunkRef]] = tuple.__new__
"""`ChunkRef._make` without its Python frame, which would be the largest single cost of a plan."""


def make_refs(keys: Iterable[bytes], slots: Iterable[int], generations: Iterable[int]) -> tuple[ChunkRef, ...]:
    """Zip three columns of equal length into refs."""
    return tuple(map(_new_ref, repeat(ChunkRef), zip(keys, slots, generations, strict=True)))


class Deferred(Enum):
    """Instead of a plan: one made now might differ from one made when all unfinished work is done. Nothing changed."""

    KEY_BEING_WRITTEN = "the run to load is stopped by a key that an unfinished plan writes"
    ROOM_IN_USE = "the chunk to evict next is leased or being written, or slots wait to be settled"
    NOT_WHOLE = "there is not room for all of it before chunks have been copied to the tier below"
    BELOW = "part of the run to load is not in memory, but in a tier below"


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Chunks to write, reserved until every rank has answered or the plan's deadline has passed.

    `positions[i]` is the index of `refs[i].key` in the request's keys. `num_ready` leading keys were READY before this
    plan; `num_refused` keys at the tail were left out because the first of them found no room. `evicted` chunks are
    gone already, and their slots given away.
    """

    plan_id: int
    refs: tuple[ChunkRef, ...]
    positions: tuple[int, ...]
    num_ready: int
    num_refused: int
    evicted: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Chunks to read: `refs` are those of ``keys[start : start + len(refs)]``, pinned while the lease lasts.

    Without refs there is no lease.
    """

    lease_id: str
    refs: tuple[ChunkRef, ...]
    start: int


@dataclass(frozen=True, slots=True)
class ClearPlan:
    """Chunks to forget. Each rank drops `refs` and `aborted`, then the index is told by `complete_clear`.

    `refs` were READY: no lookup finds them any more, and their slots stay unused until every holder has answered.
    `aborted` were being written: they count neither as removed nor as kept, and their slots come free by their own
    store plan; a rank drops them too, lest they reappear when an index is rebuilt from the ranks. `kept` chunks stay
    because they are leased.
    """

    plan_id: int
    refs: tuple[ChunkRef, ...]
    aborted: tuple[ChunkRef, ...]
    kept: tuple[ChunkRef, ...]

    @property
    def num_kept(self) -> int:
        """Chunks that stay because they are leased."""
        return len(self.kept)


@dataclass(frozen=True, slots=True)
class Expired:
    """What the index ended by itself: leases, store plans, and chunks that will not become READY any more.

    Slots of `aborted` that some rank has still to answer for are quarantined: see `CacheIndex.unsettled`.
    """

    lease_ids: tuple[str, ...]
    plan_ids: tuple[int, ...]
    aborted: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True)
class IndexCounts:
    """Slots by state (they add up to `capacity`), living leases, and store and clear plans that are not finished."""

    ready: int
    writing: int
    free: int
    quarantined: int
    leases: int
    plans: int
    capacity: int
