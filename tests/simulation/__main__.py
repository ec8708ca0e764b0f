"""``python -m tests.simulation``: the story of one seed, or what came of many.

::

    python -m tests.simulation --seed 17 --trace     one world, a line for everything that happens
    python -m tests.simulation --seeds 0:2000        many worlds; failing seeds, then a JSON line of what was covered
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Final

from tests.simulation.faults import Fault
from tests.simulation.runner import Outcome, run

_AT_ONCE: Final = 25
_ANY_HASHES: Final = "0"


def main(arguments: Sequence[str]) -> int:
    """1 if a seed has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seed", type=int, help="one world")
    parser.add_argument("--seeds", type=_range, metavar="A:B", help="the worlds of seeds A to B - 1")
    parser.add_argument("--jobs", type=int, default=1, help="processes to share them (default: 1)")
    parser.add_argument("--trace", action="store_true", help="tell the story of each")
    options = parser.parse_args(arguments)
    if (options.seed is None) == (options.seeds is None):
        parser.error("give either --seed N or --seeds A:B")
    seeds = options.seeds or range(options.seed, options.seed + 1)
    began = time.perf_counter()
    outcomes = list(_outcomes(seeds, options.jobs, is_told=options.trace))
    print(json.dumps(_summary(outcomes, time.perf_counter() - began)))
    return int(any(outcome.failure for outcome in outcomes))


def _outcomes(seeds: range, jobs: int, *, is_told: bool) -> Iterator[Outcome]:
    parts = [seeds[at : at + _AT_ONCE] for at in range(0, len(seeds), _AT_ONCE)]
    if jobs == 1:
        for part in parts:
            yield from map(_told, _run_part(part, is_told))
        return
    with ProcessPoolExecutor(jobs) as pool:
        for outcomes in pool.map(_run_part, parts, [is_told] * len(parts)):
            yield from map(_told, outcomes)


def _run_part(seeds: range, is_told: bool) -> list[Outcome]:
    return [run(seed, is_told=is_told) for seed in seeds]


def _told(outcome: Outcome) -> Outcome:
    for line in outcome.story:
        print(line)
    outcome.story.clear()
    if outcome.failure is not None:
        print(f"seed {outcome.seed} fails: {outcome.failure}")
        print(f"    python -m tests.simulation --seed {outcome.seed} --trace", flush=True)
    return outcome


def _summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, object]:
    faults: Counter[Fault] = sum((outcome.faults for outcome in outcomes), Counter())
    happened: Counter[str] = sum((outcome.happened for outcome in outcomes), Counter())
    return {
        "seeds": len(outcomes),
        "failures": {outcome.seed: outcome.failure for outcome in outcomes if outcome.failure is not None},
        "steps": sum(outcome.num_steps for outcome in outcomes),
        "simulated_s": round(sum(outcome.simulated_s for outcome in outcomes)),
        "seconds": round(seconds, 1),
        "faults": {fault.name: faults[fault] for fault in Fault},
        "happened": dict(sorted(happened.items())),
    }


def _range(text: str) -> range:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of seeds; accepted: A:B with A below B")
    return range(int(first), int(end))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != _ANY_HASHES:  # sets of keys are in the same order in every process then
        os.environ["PYTHONHASHSEED"] = _ANY_HASHES
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
