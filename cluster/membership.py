"""Which ranks are there, and what that means for the world. Pure.

A chunk is readable only where every holder rank lives, so the question that matters is `is_whole`; the rest says why
not.
"""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum
from typing import Final

from .messages import RankHello

_SILENT_AFTER_PINGS: Final = 2


class RankState(Enum):
    """What is known of one rank."""

    STARTING = "starting"
    ALIVE = "alive"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank: `hello` is what it said when it last registered, `reason` why it is not there.

    `since` is when its state began, in seconds of whatever clock the caller has; `start` numbers its processes.
    """

    state: RankState
    since: float
    hello: RankHello | None = None
    reason: str = ""
    start: int = 0


@dataclass(slots=True)
class Membership:
    """The ranks of one world. `holders` are those whose arenas hold bytes; `now` is when they began to start."""

    world_size: int
    holders: Sequence[int]
    now: InitVar[float] = 0.0
    _ranks: dict[int, RankRecord] = field(init=False)
    _missed_pings: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self, now: float) -> None:
        self._ranks = {rank: RankRecord(RankState.STARTING, now) for rank in range(self.world_size)}

    def joined(self, hello: RankHello, now: float, *, start: int = 1) -> None:
        """A rank is ready."""
        self._missed_pings.pop(hello.worker_id, None)
        self._ranks[hello.worker_id] = RankRecord(RankState.ALIVE, now, hello, start=start)

    def lost(self, rank: int, reason: str, now: float) -> bool:
        """A rank's process ended. False if that was known."""
        record = self._ranks[rank]
        if record.state is RankState.LOST:
            return False
        self._ranks[rank] = replace(record, state=RankState.LOST, since=now, reason=reason)
        return True

    def kept_away(self, rank: int, reason: str) -> None:
        """A rank that is not there could not be brought back, for this reason."""
        record = self._ranks[rank]
        if record.state is not RankState.ALIVE:
            self._ranks[rank] = replace(record, reason=reason)

    def pinged(self, rank: int, *, answered: bool) -> None:
        """A rank was asked for a sign of life; several unanswered in a row make it silent, one answer ends that."""
        self._missed_pings[rank] = 0 if answered else self._missed_pings.get(rank, 0) + 1

    def is_silent(self, rank: int) -> bool:
        """True for a rank whose process lives but has not answered lately."""
        return self.is_alive(rank) and self._missed_pings.get(rank, 0) >= _SILENT_AFTER_PINGS

    def is_alive(self, rank: int) -> bool:
        """True between a rank's registration and its loss."""
        return self._ranks[rank].state is RankState.ALIVE

    def absent(self) -> list[int]:
        """The ranks that are not alive."""
        return [rank for rank in range(self.world_size) if not self.is_alive(rank)]

    def can_serve(self) -> bool:
        """True if every holder lives: only then is a chunk of the index readable on all ranks."""
        return all(self.is_alive(rank) for rank in self.holders)

    def problems(self) -> dict[int, str]:
        """Rank -> one sentence, for each that is not alive, or silent; empty if the world is whole."""
        found: dict[int, str] = {}
        for rank, record in self._ranks.items():
            if record.state is not RankState.ALIVE:
                found[rank] = f"rank {rank} is {record.state.value}" + (f": {record.reason}" if record.reason else "")
            elif self.is_silent(rank):
                found[rank] = (
                    f"rank {rank} is silent: its process lives, but the last {self._missed_pings[rank]} pings got no "
                    "answer"
                )
        return found

    def records(self) -> list[RankRecord]:
        """All ranks, in order."""
        return [self._ranks[rank] for rank in range(self.world_size)]
