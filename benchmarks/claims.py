"""A number beside its bar: what every script answers first, and what the tables are made of. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.measure import Json, Ratio, Samples, Spread, ratio

_MS_PER_S = 1000.0


class Bar(Enum):
    """On which side of the bar the number must lie."""

    AT_LEAST = ">="
    AT_MOST = "<="


@dataclass(frozen=True, slots=True)
class Claim:
    """One number and its bar, in `unit` ("x" is a ratio). Half of the rounds lie between `low` and `high`.

    Without a `bar` nothing is promised. `note` says what the name leaves open: sizes, what the ratio is of.
    """

    name: str
    value: float
    low: float
    high: float
    unit: str
    side: Bar
    bar: float | None
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the value reaches the bar; None where there is none."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.side is Bar.AT_LEAST else self.value <= self.bar

    def to_json(self) -> dict[str, Json]:
        """The fields, `side` as its sign, and `holds`."""
        return {
            "name": self.name,
            "value": self.value,
            "low": self.low,
            "high": self.high,
            "unit": self.unit,
            "side": self.side.value,
            "bar": self.bar,
            "holds": self.holds,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Promise:
    """A bar, or None, that no number stands beside yet."""

    name: str
    side: Bar
    bar: float | None
    unit: str
    note: str = ""

    def claim(self, value: float, low: float, high: float) -> Claim:
        """The number in its place."""
        return Claim(self.name, value, low, high, self.unit, self.side, self.bar, self.note)

    def of_ratio(self, found: Ratio) -> Claim:
        """The ratio of the medians; low and high are the quartiles of the ratios round by round."""
        return self.claim(found.of_medians, found.per_round.lower_quartile, found.per_round.upper_quartile)

    def of_spread(self, found: Spread, value: float | None = None) -> Claim:
        """The median, or a `value` that stands for the rounds better, and the quartiles."""
        return self.claim(found.median if value is None else value, found.lower_quartile, found.upper_quartile)

    def of_milliseconds(self, samples: Samples, *, shares: int = 1) -> Claim:
        """The time in milliseconds of each of `shares` things that are done in one call."""
        return self.of_spread(Spread.of([time_s * _MS_PER_S / shares for time_s in samples.times_s]))

    def of_excess(self, case: Samples, over: Samples) -> Claim:
        """How many milliseconds longer `case` takes than `over`: by the medians, and the quartiles round by round."""
        differences = Spread.of(
            [(time_s - less_s) * _MS_PER_S for time_s, less_s in zip(case.times_s, over.times_s, strict=True)]
        )
        return self.of_spread(differences, (case.median_s - over.median_s) * _MS_PER_S)

    def of_speed(self, case: Samples, memory_copy: Samples) -> Claim:
        """The speed of `case` as a share of that of a memory copy of as many bytes."""
        return self.of_ratio(ratio(memory_copy, case))


def at_least(name: str, bar: float, unit: str = "x", note: str = "") -> Promise:
    """The number must not be less than `bar`."""
    return Promise(name, Bar.AT_LEAST, bar, unit, note)


def at_most(name: str, bar: float, unit: str = "ms", note: str = "") -> Promise:
    """The number must not be more than `bar`."""
    return Promise(name, Bar.AT_MOST, bar, unit, note)


def beside(name: str, unit: str = "ms", note: str = "") -> Promise:
    """A number that stands beside the promised ones and has no bar."""
    return Promise(name, Bar.AT_MOST, None, unit, note)


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of a script found: its claims, and everything measured for them."""

    claims: Sequence[Claim]
    measured: dict[str, Json]


def results_of(parts: dict[str, Part]) -> dict[str, Json]:
    """The `results` of a script: all claims in order, then by part what was measured."""
    claims: list[Json] = [claim.to_json() for part in parts.values() for claim in part.claims]
    return {"claims": claims, "measured": {name: part.measured for name, part in parts.items()}}


def samples_json(samples: dict[str, Samples]) -> dict[str, Json]:
    """The times of all cases."""
    return {name: of_case.to_json() for name, of_case in samples.items()}
