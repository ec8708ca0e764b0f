"""What every benchmark shares: timing several cases side by side, ratios of them, and the facts about the run.

Apart from the scripts, so that all of them mean the same by "median" and "ratio". Imports neither torch nor this
project: a peer's interpreter runs it as well. A time is a `Samples`, a comparison a `Ratio`, the answer of a script one
JSON document (`emit`); everything for the human eye goes to stderr (`progress`).
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Case: TypeAlias = Callable[[], object]

_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, quartiles and extremes of at least one value."""

    count: int
    median: float
    lower_quartile: float
    upper_quartile: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """ValueError when there are none."""
        if not values:
            raise ValueError("values: none given, at least one is needed for a median")
        several = [*values, *values] if len(values) == 1 else values  # of one value all quartiles are that value
        lower, median, upper = statistics.quantiles(several, n=4, method="inclusive")
        return cls(len(values), median, lower, upper, min(values), max(values))

    def to_json(self, suffix: str = "") -> dict[str, Json]:
        """`count`, and the other fields with `suffix` (their unit: "_s") after the name."""
        names = ("median", "lower_quartile", "upper_quartile", "min", "max")
        return {"count": self.count} | {name + suffix: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Samples:
    """The times of one case in seconds, one per round, in order."""

    times_s: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        return Spread.of(self.times_s)

    @property
    def median_s(self) -> float:
        return self.spread.median

    @property
    def count(self) -> int:
        return len(self.times_s)

    @classmethod
    def joined(cls, parts: Iterable["Samples"]) -> "Samples":
        """The rounds of several runs, one run after the other."""
        return cls(tuple(time_s for part in parts for time_s in part.times_s))

    def to_json(self) -> dict[str, Json]:
        """The spread in seconds, and every single time."""
        return self.spread.to_json("_s") | {"times_s": list(self.times_s)}


@dataclass(frozen=True, slots=True)
class TimedElsewhere:
    """What a case returns that timed itself, in another process: this time counts, not that of asking for it."""

    time_s: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times longer one case took than another: by the medians, and the spread of the ratios round by round."""

    of_medians: float
    per_round: Spread

    def to_json(self) -> dict[str, Json]:
        return {"of_medians": self.of_medians, "per_round": self.per_round.to_json()}


def ratio(numerator: Samples, denominator: Samples) -> Ratio:
    """Time of `numerator` over time of `denominator`; ValueError unless both were timed in the same rounds.

    For a speed relative to a memory copy of as many bytes the copy is the numerator: `ratio(copy, case)`.
    """
    if numerator.count != denominator.count:
        raise ValueError(f"numerator has {numerator.count} rounds, denominator {denominator.count}: give the same ones")
    rounds = zip(numerator.times_s, denominator.times_s, strict=True)
    return Ratio(numerator.median_s / denominator.median_s, Spread.of([above / below for above, below in rounds]))


def interleaved(
    cases: Mapping[str, Case], *, rounds: int, warmup: int = 1, before: Mapping[str, Case] | None = None
) -> dict[str, Samples]:
    """Time every case once a round, so that whatever else the machine does hits all of them alike.

    Every second round runs backwards: no case always follows the same one. `before` names untimed preparations, run
    each time just before the case of that name. The first `warmup` rounds are not counted. A case that answers
    `TimedElsewhere` took that time. ValueError for no round, or for a preparation of a case that there is not.
    """
    preparations = before or {}
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds={rounds}, warmup={warmup}: at least one round and no negative number")
    if unknown := sorted(preparations.keys() - cases.keys()):
        raise ValueError(f"before names {unknown}, which are no cases; there are {sorted(cases)}")
    times_s: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-warmup, rounds):
        for name in list(cases) if number % 2 == 0 else reversed(list(cases)):
            if name in preparations:
                preparations[name]()
            time_s = _timed(cases[name])
            if number >= 0:
                times_s[name].append(time_s)
    return {name: Samples(tuple(times)) for name, times in times_s.items()}


def _timed(case: Case) -> float:
    begin = time.perf_counter()
    answer = case()
    time_s = time.perf_counter() - begin
    return answer.time_s if isinstance(answer, TimedElsewhere) else time_s


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one script: what it was asked, and where and when it ran. Made by `begin_run`, ended by `emit`."""

    benchmark: str
    arguments: Mapping[str, Json]
    facts: Mapping[str, Json]
    load_before: tuple[float, float, float]


def begin_run(benchmark: str, arguments: Mapping[str, Json]) -> Run:
    """Gather the facts before anything is timed. `arguments` are the script's own, with their effective values."""
    progress(f"{benchmark}: load average {os.getloadavg()[0]:.2f} on {_num_cores()} cores")
    return Run(benchmark, arguments, _facts(), os.getloadavg())


def emit(run: Run, results: Mapping[str, Json]) -> None:
    """Print the one JSON document of this run to stdout: `benchmark`, `arguments`, `run` (the facts) and `results`."""
    load = {"before": list(run.load_before), "after": list(os.getloadavg())}
    document = {
        "benchmark": run.benchmark,
        "arguments": run.arguments,
        "run": {**run.facts, "load_average": load},
        "results": results,
    }
    print(json.dumps(document, indent=2, allow_nan=False), flush=True)


def progress(text: str) -> None:
    """One line for whoever watches, to stderr."""
    print(text, file=sys.stderr, flush=True)


def _facts() -> dict[str, Json]:
    status = _git("status", "--porcelain")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "is_tree_dirty": None if status is None else bool(status),
        "cpu": _cpu_model(),
        "num_cores": _num_cores(),
        "ram_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "ray": _version("ray"),
    }


def _git(*arguments: str) -> str | None:
    """What git says about this tree; None without git, or outside a repository."""
    try:
        answer = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
