"""The index at scale: a million and ten million chunks, worlds of a thousand ranks, many callers at once.

    python benchmarks/index_scale.py                  # 1 and 10 million chunks, every policy: 7 minutes, 6 GiB
    python benchmarks/index_scale.py --entries 1000000 --policies LRU
    python benchmarks/index_scale.py --coordinator    # the actor itself under 64 drivers, on a local Ray: 1 minute
    python benchmarks/index_scale.py --quick

Without `--coordinator` no Ray is started: the index, and the service around it, in this process and its children.
Prints one JSON document.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.claims import Claim, Part, Promise, at_least, at_most, beside, results_of
from benchmarks.index_parts.latency import Latency
from benchmarks.index_parts.one_index import Found, Setting, allocated_alone, measure_alone
from benchmarks.index_parts.prompts import NUM_CHUNKS
from benchmarks.measure import Json, begin_run, emit, ratio
from lmcache_ray.index.policy import POLICIES

_ENTRIES = (1_000_000, 10_000_000)
_QUICK_ENTRIES = (100_000, 200_000)
_WORLD_SIZES = (8, 64, 256, 1024)
_THREADS = (1, 64)
_LOOKUPS_PER_S, _STORES_PER_S, _NBYTES, _P99_MS, _SLOWDOWN = 600_000, 250_000, 300, 1, 2
_PLANS = {
    "lookup": "lookup",
    "prepare_store": "plan of a store with eviction",
    "prepare_load_and_release": "plan and end of a load",
}


def main() -> None:
    arguments = _parse_arguments()
    run = begin_run("index_scale", vars(arguments))
    parts = _coordinator_parts(arguments.quick) if arguments.coordinator else _index_parts(arguments)
    emit(run, results_of(parts))


def _index_parts(arguments: argparse.Namespace) -> dict[str, Part]:
    from benchmarks.index_parts.threads import measure_threads
    from benchmarks.index_parts.wide_worlds import measure_wide_worlds

    quick = arguments.quick
    entries = arguments.entries or (_QUICK_ENTRIES if quick else _ENTRIES)
    rounds = 100 if quick else 1500
    parts = {}
    for policy in arguments.policies:
        settings = [Setting.of(number, policy, rounds) for number in sorted(entries)]
        parts[policy] = _of_policy([measure_alone(setting) for setting in settings], allocated_alone(settings[0]))
    parts["wide_worlds"] = measure_wide_worlds(_WORLD_SIZES, rounds=3 if quick else 30)
    parts["threads"] = measure_threads(
        num_entries=min(entries), thread_counts=_THREADS, seconds=0.5 if quick else 5.0
    )
    return parts


def _coordinator_parts(quick: bool) -> dict[str, Part]:
    from benchmarks.index_parts.drivers import Load, measure_drivers  # Ray, which nothing else here needs

    loads = [
        Load(processes, threads, batch)
        for batch in (0, 1, 64)
        for processes, threads in ((1, 1), (2, 2) if quick else (8, 8))
    ]
    return {"coordinator": measure_drivers(loads, seconds=1.0 if quick else 8.0)}


def _of_policy(found: Sequence[Found], allocated: float) -> Part:
    """The claims of one policy, smallest index first, and what was measured of each size."""
    smallest = found[0]
    claims = [*_rates(smallest, is_promised=True)]
    claims.append(_nbytes(smallest, "by the count of Python's allocator").claim(allocated, allocated, allocated))
    for one in found:
        nbytes = one.nbytes["kept_full"]
        claims.append(_nbytes(one, "growth of the process").claim(nbytes, nbytes, nbytes))
        claims += _slowest(one)
    for larger in found[1:]:
        claims += [*_rates(larger, is_promised=False), *_slowdowns(smallest, larger)]
    measured: dict[str, Json] = {str(one.setting.num_entries): one.to_json() for one in found}
    return Part(claims, {"allocated_bytes_per_entry": allocated, **measured})


def _rates(found: Found, *, is_promised: bool) -> list[Claim]:
    bars = {"lookup": ("looked up and touched", _LOOKUPS_PER_S), "prepare_store": ("planned to store", _STORES_PER_S)}
    note = f"128 a call, {_size(found)}"
    claims = []
    for case, (done, bar) in bars.items():
        promise = at_least(f"chunks {done} a second, {found.setting.policy}", bar, "", note)
        spread = Latency(found.samples[case].times_s).per_second(NUM_CHUNKS)
        claims.append((promise if is_promised else _without_bar(promise)).of_spread(spread))
    strangers = beside(f"chunks of 128 prompts looked up a second, {found.setting.policy}", "", note)
    claims.append(strangers.of_spread(Latency(found.samples["lookup_of_strangers"].times_s).per_second(NUM_CHUNKS)))
    plain_note = f"time, of as many finds in a plain dict, {_size(found)}"
    plain = beside(f"lookup with touch, {found.setting.policy}", "x", plain_note)
    return [*claims, plain.of_ratio(ratio(found.samples["lookup"], found.samples["plain_dict"]))]


def _without_bar(promise: Promise) -> Promise:
    return beside(promise.name, promise.unit, promise.note)


def _nbytes(found: Found, how: str) -> Promise:
    name = f"memory of a chunk in the index, {found.setting.policy}"
    return at_most(name, _NBYTES, "bytes", f"{_size(found)}, {how}")


def _slowest(found: Found) -> list[Claim]:
    """The slowest in a hundred calls: by the clock, and on the processor alone."""
    claims = []
    for case, done in _PLANS.items():
        name, note = f"p99 of a {done}, {found.setting.policy}", f"128 chunks, {_size(found)}"
        by_clock = Latency(found.samples[case].times_s).p99_ms
        claims.append(at_most(name, _P99_MS, note=note).of_spread(by_clock))
        claims.append(beside(name, note=f"{note}, time on the processor").of_spread(found.on_processor[case].p99_ms))
    return claims


def _slowdowns(smaller: Found, larger: Found) -> list[Claim]:
    """By the medians of calls that ran in different processes, one after the other."""
    note = f"time, at {larger.setting.num_entries:,} of that at {smaller.setting.num_entries:,} chunks"
    return [
        at_most(f"{done}, {larger.setting.policy}", _SLOWDOWN, "x", note).of_ratio(
            ratio(larger.samples[case], smaller.samples[case])
        )
        for case, done in _PLANS.items()
    ]


def _size(found: Found) -> str:
    return f"{found.setting.num_entries:,} chunks"


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The index at scale.")
    parser.add_argument("--entries", type=int, nargs="+", metavar="N", help="chunks in the index (1 and 10 million)")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="(all)")
    parser.add_argument("--coordinator", action="store_true", help="the actor under 64 drivers instead")
    parser.add_argument("--quick", action="store_true", help="small and short: a test of the script")
    return parser.parse_args()


if __name__ == "__main__":
    main()
