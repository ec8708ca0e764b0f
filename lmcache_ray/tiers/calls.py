"""What is said between who decides about tiers and the ranks that move the bytes, as values; and who carries it. Pure.

Every rank that holds chunks is told the same: which chunks of its memory to copy where. It answers an outcome for each
chunk, and what stands in its way if something does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Protocol

_READING_SHARE: Final = 0.8


class ChunkOutcome(IntEnum):
    """What became of one chunk of a call on one rank."""

    NOT_DONE = 0
    """Nothing was copied: the plan is out of date, or a problem of the place itself came first."""
    DONE = 1
    MISSING = 2
    """It is not where it should be."""
    DAMAGED = 3
    """What is there is not what it should be."""
    UNREADABLE = 4
    """It is there and cannot be read."""

    @property
    def is_gone(self) -> bool:
        """Whether it is of no use any more where it was to be read."""
        return self >= ChunkOutcome.MISSING


@dataclass(frozen=True, slots=True)
class TierCall:
    """One call of `RankTiers` by name."""

    name: str
    arguments: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskFound:
    """What a rank found in its directory: (key, generation) of each chunk, the least recently used first.

    `capacity` chunks fit within its limit. `problem_with_owner` is the refusal of a directory that belongs to another
    cluster.
    """

    entries: Sequence[tuple[bytes, int]] = ()
    capacity: int = 0
    directory: str = ""
    num_temporary: int = 0
    num_damaged: int = 0
    problem_with_owner: str | None = None


@dataclass(frozen=True, slots=True)
class CheckedDisk:
    """What a check of one rank's directory found, a sentence each; `lost` chunks are expected there and of no use."""

    num_files: int = 0
    nbytes_used: int = 0
    findings: Sequence[str] = ()
    lost: Sequence[tuple[bytes, int]] = ()


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """A rank's answer: one `ChunkOutcome` byte for each chunk, and `problem` if the tier cannot be used there."""

    outcomes: bytes = b""
    problem: str | None = None
    found: DiskFound = field(default_factory=DiskFound)
    checked: CheckedDisk = field(default_factory=CheckedDisk)

    @property
    def done(self) -> list[bool]:
        """Per chunk, whether it was done."""
        return [outcome == ChunkOutcome.DONE for outcome in self.outcomes]


def reading_s(timeout_s: float) -> float:
    """How long ranks may read that must have answered after `timeout_s`: what they have by then counts."""
    return _READING_SHARE * timeout_s


class TierRanks(Protocol):
    """The ranks that hold chunks, as far as their tiers are concerned."""

    @property
    def holders(self) -> Sequence[int]:
        """Their numbers."""
        ...

    def ask(self, calls: Mapping[int, TierCall], *, timeout_s: float) -> dict[int, RankAnswer]:
        """One call to each of these ranks, all at the same time; a rank that did not answer in time is left out."""
        ...


def problems_of(answers: Mapping[int, RankAnswer], holders: Sequence[int], timeout_s: float) -> list[str]:
    """What stands in the way of the tier, a sentence each: ranks that are silent, and what the others say."""
    silent = [f"rank {rank} did not answer in {timeout_s:g} s" for rank in holders if rank not in answers]
    said = [f"rank {rank}: {answer.problem}" for rank, answer in answers.items() if answer.problem is not None]
    return silent + said
