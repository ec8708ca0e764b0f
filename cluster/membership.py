"""Which ranks are there, and what that means for the world. Pure.

A chunk is readable only where every holder rank lives, so the question that matters is `is_whole`; the rest says why
not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    """One rank: `hello` is what it said when it registered, `reason` why it is lost."""

    state: RankState
    hello: RankHello | None = None
    reason: str = ""


@dataclass(slots=True)
class Membership:
    """The ranks of one world. `holders` are those whose arenas hold bytes."""

    world_size: int
    holders: Sequence[int]
    _ranks: dict[int, RankRecord] = field(init=False)
    _missed_pings: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._ranks = {rank: RankRecord(RankState.STARTING) for rank in range(self.world_size)}

    def joined(self, hello: RankHello) -> None:
        """A rank is ready."""
        self._ranks[hello.worker_id] = RankRecord(RankState.ALIVE, hello)

    def lost(self, rank: int, reason: str) -> bool:
        """A rank's process ended. False if that was known."""
        if self._ranks[rank].state is RankState.LOST:
            return False
        self._ranks[rank] = RankRecord(RankState.LOST, self._ranks[rank].hello, reason)
        return True

    def pinged(self, rank: int, *, answered: bool) -> None:
        """A rank was asked for a sign of life; several unanswered in a row make it silent, one answer ends that."""
        self._missed_pings[rank] = 0 if answered else self._missed_pings.get(rank, 0) + 1

    def is_silent(self, rank: int) -> bool:
        """True for a rank whose process lives but has not answered lately."""
        return self.is_alive(rank) and self._missed_pings.get(rank, 0) >= _SILENT_AFTER_PINGS

    def is_alive(self, rank: int) -> bool:
        """True between a rank's registration and its loss."""
        return self._ranks[rank].state is RankState.ALIVE

    def can_serve(self) -> bool:
        """True if every holder lives: only then is a chunk of the index readable on all ranks."""
        return all(self.is_alive(rank) for rank in self.holders)

    def problems(self) -> list[str]:
        """One sentence for each rank that is not alive, or silent; empty if the world is whole."""
        absent = [
            f"rank {rank} is {record.state.value}" + (f": {record.reason}" if record.reason else "")
            for rank, record in self._ranks.items()
            if record.state is not RankState.ALIVE
        ]
        silent = [
            f"rank {rank} is silent: its process lives, but the last {self._missed_pings[rank]} pings got no answer"
            for rank in self._ranks
            if self.is_silent(rank)
        ]
        return absent + silent

    def records(self) -> list[RankRecord]:
        """All ranks, in order."""
        return [self._ranks[rank] for rank in range(self.world_size)]
