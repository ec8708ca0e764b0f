"""What a coordinator asks of ranks, apart from how it is carried: Ray calls in a cluster, a schedule in a simulation.

A rank that cannot be reached is an answer, not an exception, except where one rank alone is asked to come (back).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_ray.index.arena_report import ArenaReport, ViewedSlots
from lmcache_ray.index.plans import ChunkRef

from .messages import RankHello
from .record import MissedClear
from .topology import RankPlace


@dataclass(frozen=True, slots=True)
class Enlistment:
    """A coordinator's word to a rank: serve me, at `place`, if you are a fresh process.

    From now on coordinators of an earlier `epoch`, and writes of a generation below `floor`, are refused. With
    `may_attach` a fresh process takes over the arena that its predecessor has left on that node.
    """

    place: RankPlace
    epoch: int
    floor: int
    may_attach: bool


@dataclass(frozen=True, slots=True)
class Enlisted:
    """A rank's answer: who it is, and what its arena holds."""

    hello: RankHello
    report: ArenaReport


class RankPort(Protocol):
    """The ranks of one world, by number."""

    def node_of(self, rank: int, *, timeout_s: float) -> str:
        """The node on which the rank's process runs now. Raises `LMCacheRayError` if there is none in time."""
        ...

    def enlist(self, rank: int, enlistment: Enlistment, *, timeout_s: float) -> Enlisted:
        """Have the rank serve. Raises what kept it from it."""
        ...

    def free_slots(self, ranks: Sequence[int], refs: Sequence[ChunkRef]) -> Collection[int]:
        """Free these slots on these ranks; the ranks that have done it in time."""
        ...

    def forget(self, ranks: Sequence[int], clear: MissedClear) -> Collection[int]:
        """Free whatever a clear covers, known to the index or not; the ranks that have done it in time."""
        ...

    def settle(self, refs: Mapping[int, Sequence[ChunkRef]]) -> dict[int, list[ChunkRef]]:
        """Have each rank end its writes; per rank the refs that it proves it does not and will not write."""
        ...

    def viewed(self, ranks: Sequence[int]) -> dict[int, tuple[ViewedSlots, ...]]:
        """What views of living clients on these ranks' nodes show now, by rank; the silent are left out."""
        ...

    def ping(self, ranks: Sequence[int]) -> dict[int, int]:
        """The process ids of those among these ranks that answer."""
        ...

    def is_client_dead(self, rank: int, liveness_path: str) -> bool:
        """Whether the rank, on the client's node, finds that client's process ended."""
        ...
