"""How long single calls take: the middle, and the slowest in a hundred. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measure import Json, Spread

_MS_PER_S = 1000.0
_NUM_PARTS = 4


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of one kind of call in seconds, in the order in which they ran; at least 8."""

    times_s: Sequence[float]

    @property
    def spread(self) -> Spread:
        """Median, quartiles and extremes."""
        return Spread.of(self.times_s)

    @property
    def p99_ms(self) -> Spread:
        """The 99th percentile in milliseconds of each quarter of the calls: the median is that of a quarter."""
        size = len(self.times_s) // _NUM_PARTS
        parts = [self.times_s[at * size : (at + 1) * size] for at in range(_NUM_PARTS)]
        return Spread.of([_percentile_99(part) * _MS_PER_S for part in parts])

    def per_second(self, shares: int = 1) -> Spread:
        """How many of the `shares` things that each call does are done in a second."""
        return Spread.of([shares / time_s for time_s in self.times_s])

    def to_json(self) -> dict[str, Json]:
        """The spread in seconds, and the 99th percentile of all calls."""
        return self.spread.to_json("_s") | {"p99_s": _percentile_99(self.times_s)}


def _percentile_99(times_s: Sequence[float]) -> float:
    return statistics.quantiles(times_s, n=100, method="inclusive")[98]
