"""What a chaos run counts, and when it was a good one. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Final

RECOVERY_BAR_S: Final = 15.0
"""What was committed must be a hit again within so many seconds after a kill."""
GRACE_S: Final = 1.0
"""A call may take so much longer than its deadline before it counts as hung."""


@dataclass(frozen=True, slots=True)
class Call:
    """One step of a driver: how long the longest call in it took, what that was allowed, and what came of it.

    `error` is the name of the exception, if it ended with one, and `is_named` whether that is one of this project's.
    """

    kind: str
    seconds: float
    allowed_s: float
    hits: int = 0
    mismatches: int = 0
    error: str | None = None
    is_named: bool = True

    @property
    def is_hung(self) -> bool:
        """Whether it took longer than it may."""
        return self.seconds > self.allowed_s + GRACE_S


@dataclass(slots=True)
class ChaosReport:
    """A run; its fields, and what follows from them, are the keys of the JSON that `--json` prints.

    `kills` and `stops` count blows: processes that were killed, and that were only stopped for a while. `recoveries_s`
    are, for each blow, the seconds until all that was committed before was a hit on every rank again, and `whole_s`
    until the cluster called itself whole. `faults` are broken promises in words; what is in `leftovers` should not be
    there in the end.
    """

    seed: int
    minutes: float
    world_size: int
    use_mla: bool
    calls: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    hit_chunks: int = 0
    mismatches: int = 0
    hangs: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def count(self, call: Call) -> None:
        """One more step of somebody."""
        self.calls[call.kind] += 1
        self.hit_chunks += call.hits
        self.mismatches += call.mismatches
        if call.error is not None:
            self.errors[call.error] += 1
        if not call.is_named:
            self.faults.append(f"{call.kind} ended with {call.error}")
        if call.is_hung:
            self.hangs.append(f"{call.kind} took {call.seconds:.1f} s of {call.allowed_s:.1f} s")

    @property
    def is_good(self) -> bool:
        """Whether every promise was kept."""
        is_in_time = max(self.recoveries_s, default=0.0) <= RECOVERY_BAR_S
        return is_in_time and not (self.mismatches or self.hangs or self.faults or self.leftovers)

    def to_json(self) -> dict[str, object]:
        """A JSON-ready dictionary."""
        numbers: dict[str, object] = {one.name: getattr(self, one.name) for one in fields(self)}
        numbers |= {
            "operations": sum(self.calls.values()),
            "num_kills": sum(self.kills.values()),
            "recoveries": len(self.recoveries_s),
            "recovery_s": _summary(self.recoveries_s),
            "whole_s": _summary(self.whole_s),
            "is_good": self.is_good,
        }
        del numbers["recoveries_s"]
        return numbers


def _summary(seconds: Sequence[float]) -> Mapping[str, float]:
    if not seconds:
        return {}
    return {"min": round(min(seconds), 2), "p50": round(median(seconds), 2), "max": round(max(seconds), 2)}
