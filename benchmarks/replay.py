"""Whole workloads through the command that users run: `python -m cluster replay`, one process after the other.

    python benchmarks/replay.py TRACE       # for example Mooncake's conversation trace, 12,031 requests: 3 minutes
    python benchmarks/replay.py TRACE --policies lru,lfu --capacities 0,10000 --runs 3
    python benchmarks/replay.py             # a generated chat workload

Each run is timed from the start of its process to its end, the start and the end of a local Ray included. The hit rate
without a limit on capacity is checked against one that is counted here, from the trace alone. Prints one JSON document.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.claims import Claim, Part, at_least, at_most, beside, results_of
from benchmarks.measure import Json, Spread, begin_run, emit, progress
from cluster.chat_workload import chat_workload
from cluster.workload import TraceRequest, parse_trace

_ROOT = Path(__file__).resolve().parent.parent
_CONVERSATION_REQUESTS = 12_031
_BAR_S = 60.0
_QUICK_REQUESTS = 300
_CALLS = {
    "lookup": "planning of a window of requests",
    "retrieve": "retrieve of a request in its slowest rank",
    "store": "store of a request in its slowest rank",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What one run is asked for; `capacity` in blocks, 0 for as many as there are."""

    capacity: int
    policy: str

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.capacity or 'all'} blocks, {self.policy}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: its whole time, and the report that the command printed."""

    whole_s: float
    report: dict[str, Json]

    def number(self, name: str) -> float:
        """A number of the report."""
        value = self.report[name]
        assert isinstance(value, int | float)
        return float(value)

    def percentiles_ms(self, call: str) -> dict[str, float | None]:
        """The percentiles of one kind of call; None where there was none."""
        of_calls: dict[str, dict[str, float | None]] = self.report["latency_ms"]  # type: ignore[assignment]  # as printed
        return of_calls[call]


def main() -> None:
    arguments = _parse_arguments()
    limit = arguments.requests or (_QUICK_REQUESTS if arguments.quick else None)
    requests = _workload(arguments.trace, limit)
    run = begin_run("replay", {**vars(arguments), "trace": arguments.trace and Path(arguments.trace).name})
    parts: dict[str, Part] = {}
    for setting in _settings(arguments):
        runs = 1 if arguments.quick or setting.capacity else arguments.runs
        outcomes = []
        for number in range(runs):
            progress(f"replay: {len(requests)} requests, {setting.name}, run {number + 1} of {runs}")
            outcomes.append(_replay(setting, arguments, limit))
        exact = count_hits(requests) if setting.capacity == 0 else None
        parts[setting.name] = part_of(setting, outcomes, exact, is_from_trace=arguments.trace is not None)
    emit(run, results_of(parts))


def part_of(setting: Setting, outcomes: Sequence[Outcome], exact_hits: int | None, *, is_from_trace: bool) -> Part:
    """The claims of the runs of one setting. `exact_hits` are the blocks that must hit, where they can be counted."""
    last = outcomes[-1]
    workload = f"{last.number('requests'):,.0f} requests on {last.number('world_size'):.0f} ranks, {setting.name}"
    is_promised = is_from_trace and exact_hits is not None and last.number("requests") == _CONVERSATION_REQUESTS
    note = "from the start of the process to its end, Ray included"
    seconds = (
        at_most(f"replay of {workload}", _BAR_S, "s", note)
        if is_promised
        else beside(f"replay of {workload}", "s", note)
    )
    claims: list[Claim] = [
        seconds.of_spread(Spread.of([outcome.whole_s for outcome in outcomes])),
        beside(f"of which the requests took, {setting.name}", "s", "without start and end").of_spread(
            Spread.of([outcome.number("seconds") for outcome in outcomes])
        ),
        beside(f"hit rate, {setting.name}", "", "blocks found of blocks looked up").of_spread(
            Spread.of([outcome.number("hit_rate") for outcome in outcomes])
        ),
    ]
    claims += _latencies(setting, outcomes)
    if exact_hits is not None:
        shares = [outcome.number("hit_blocks") / exact_hits if exact_hits else 1.0 for outcome in outcomes]
        name = f"blocks found of those counted from the workload, {setting.name}"
        claims.append(at_least(name, 1.0, "x", "exact").of_spread(Spread.of(shares)))
    measured: dict[str, Json] = {
        "exact_hit_blocks": exact_hits,
        "runs": [{"whole_s": outcome.whole_s, **outcome.report} for outcome in outcomes],
    }
    return Part(claims, measured)


def _latencies(setting: Setting, outcomes: Sequence[Outcome]) -> list[Claim]:
    """The medians of the calls that there were; their high percentiles, of the last run, in the notes."""
    claims = []
    for call, what in _CALLS.items():
        percentiles = [outcome.percentiles_ms(call) for outcome in outcomes]
        medians = [of_run["p50"] for of_run in percentiles if of_run["p50"] is not None]
        if medians:
            note = f"p95 {percentiles[-1]['p95']}, p99 {percentiles[-1]['p99']} ms"
            claims.append(beside(f"{what}, p50, {setting.name}", note=note).of_spread(Spread.of(medians)))
    return claims


def count_hits(requests: Iterable[TraceRequest]) -> int:
    """Blocks that hit in a cache without limit: per request the leading ones that an earlier request had.

    An id stands for all up to its block, so a block that was seen comes after seen ones only.
    """
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += sum(block in seen for block in request.hash_ids)
        seen.update(request.hash_ids)
    return hits


def _workload(trace: str | None, limit: int | None) -> list[TraceRequest]:
    """The requests that the command will run, for counting."""
    if trace is None:
        return chat_workload(seed=0) if limit is None else chat_workload(seed=0, num_requests=limit)
    with Path(trace).open(encoding="utf-8") as lines:
        return list(parse_trace(lines, source=trace, limit=limit))


def _settings(arguments: argparse.Namespace) -> list[Setting]:
    """Without a limit on capacity the policies do the same: one is enough."""
    settings: list[Setting] = []
    for capacity in arguments.capacities:
        policies = arguments.policies[:1] if capacity == 0 else arguments.policies
        settings += [Setting(capacity, policy) for policy in policies]
    return settings


def _replay(setting: Setting, arguments: argparse.Namespace, limit: int | None) -> Outcome:
    command = [sys.executable, "-m", "cluster", "replay", "--json", f"--world-size={arguments.world_size}"]
    command += [f"--capacity-blocks={setting.capacity}", f"--policy={setting.policy}"]
    command += [] if limit is None else [f"--requests={limit}"]
    command += [] if arguments.trace is None else [str(Path(arguments.trace).resolve())]
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    whole_s = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(f"the replay ended with status {done.returncode}; its message stands above")
    report: dict[str, Json] = json.loads(done.stdout.splitlines()[-1])
    return Outcome(whole_s, report)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Whole workloads, as `python -m cluster replay` runs them.")
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="JSON lines; omit it for a generated chat workload")
    parser.add_argument("--quick", action="store_true", help=f"the first {_QUICK_REQUESTS} requests, once")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--world-size", type=int, default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--runs", type=int, default=2, metavar="N", help="without a limit on capacity (2), else one")
    parser.add_argument("--capacities", type=_numbers, default=[0, 10_000], metavar="N,N", help="blocks (0,10000)")
    parser.add_argument("--policies", type=lambda text: text.split(","), default=["lru"], metavar="NAMES", help="(lru)")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
