"""``python -m tests.simulation.mutations``: is the simulation able to find what it looks for?

Each mutation is one deliberate fault in a copy of the product. The seeds are run against the copy until one fails; what
caught each is written to ``mutations.md``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]
_REPORT: Final = Path(__file__).with_name("mutations.md")
_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class Mutation:
    """In `path`, `old` becomes `new`: one place, and what the product promises is not so any more."""

    name: str
    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Caught:
    """The seed that has noticed it, and how."""

    seed: int
    failure: str


MUTATIONS: Final = (
    Mutation(
        "a chunk is visible before all ranks have it",
        "lmcache_ray/index/write_ledger.py",
        "            if owed == answered and slot not in unjoined:",
        "            if slot not in unjoined:",
    ),
    Mutation(
        "no quarantine",
        "lmcache_ray/index/write_ledger.py",
        "        self._decide(self.plans_of[slot][0])\n        if not self.owing[slot]:",
        "        self._decide(self.plans_of[slot][0])\n        if True:",
    ),
    Mutation(
        "leases do not protect",
        "lmcache_ray/index/store_planning.py",
        "states[slot] == ready and slot not in pinned and slot not in held_back",
        "states[slot] == ready and slot not in held_back",
    ),
    Mutation(
        "leases do not end by time",
        "lmcache_ray/index/leases.py",
        "if lease.expires <= now]",
        "if lease.expires <= 0]",
    ),
    Mutation(
        "no look after the last byte",
        "lmcache_ray/shard.py",
        "        loaded.append(data is not None and source.is_intact(ref))",
        "        loaded.append(data is not None)",
    ),
    Mutation(
        "a rebuild keeps what one holder lacks",
        "lmcache_ray/index/recovery.py",
        "set.intersection(*(set(report.committed)",
        "set.union(*(set(report.committed)",
    ),
    Mutation(
        "a returned rank is believed to have what it had",
        "lmcache_ray/index/recovery.py",
        "if held.get(ref.slot) != ref)",
        "if ref.slot in held and held[ref.slot] != ref)",
    ),
    Mutation(
        "a clear forgets those who are away",
        "cluster/record.py",
        "return any(clear.covers(ref) for clear in self.clears)",
        "return False",
    ),
    Mutation(
        "views do not hold their slots after a restart",
        "lmcache_ray/index/recovery.py",
        "hold_views(index, rebuilt.viewed, now=now)",
        "hold_views(index, (), now=now)",
    ),
    Mutation(
        "the floor does not rise",
        "lmcache_ray/arena/slots.py",
        "        self._floor[0] = max(self._floor[0], generation)",
        "        self._floor[0] = self._floor[0]",
    ),
    Mutation(
        "a rank does not ask which slots clients are writing",
        "lmcache_ray/shard.py",
        "            busy = {*self._in_progress.values(), *(slot for slot, _ in foreign)}",
        "            busy = {*self._in_progress.values()}",
    ),
    Mutation(
        "a coordinator that comes back has its predecessor's epoch",
        "cluster/record.py",
        "return replace(self, epoch=self.epoch + 1)",
        "return replace(self)",
    ),
    Mutation(
        "a disk write is not checked at its end",
        "lmcache_ray/tiers/rank_tiers.py",
        "return self._shard.slots.is_committed(source.slot, source.generation) and not self._is_withdrawn(target)",
        "return True",
    ),
    Mutation(
        "generations begin anew with each coordinator",
        "lmcache_ray/index/slot_table.py",
        "self.next_generation = (epoch << COUNTER_BITS) + 1",
        "self.next_generation = (1 << COUNTER_BITS) + 1",
    ),
)


def catch(mutation: Mutation, directory: Path, *, num_seeds: int) -> Caught | None:
    """The first seed that fails against the mutated product, or None. The copy is made in `directory`."""
    _copy(directory)
    path = directory / mutation.path
    source = path.read_text(encoding="utf-8")
    if source.count(mutation.old) != 1:
        raise ValueError(
            f"mutation {mutation.name!r} fits {source.count(mutation.old)} places in {mutation.path}, not 1"
        )
    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    for first in range(0, num_seeds, _AT_ONCE):
        failures = _failures(directory, first, min(first + _AT_ONCE, num_seeds))
        if failures:
            seed = min(failures)
            return Caught(seed, failures[seed])
    return None


def _copy(directory: Path) -> None:
    for package in ("lmcache_ray", "cluster", "tests/simulation"):
        shutil.copytree(
            _ROOT / package, directory / package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(_ROOT / "tests" / "__init__.py", directory / "tests")


def _failures(directory: Path, first: int, end: int) -> dict[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seeds", f"{first}:{end}"],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout:
        return {first: f"the simulation does not run: {done.stderr.splitlines()[-1]}"}
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])["failures"]
    return {int(seed): failure for seed, failure in found.items()}


def main() -> int:
    """1 if a mutation was not caught."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seeds", type=int, default=2000, help="how many to run against each at most (default: 2000)")
    options = parser.parse_args()
    lines = [
        "# Deliberate faults, and the seeds that find them",
        "",
        "Written by `python -m tests.simulation.mutations`: each fault was put into a copy of the product, alone.",
        "",
        "| fault | in | found by seed | as |",
        "|---|---|---|---|",
    ]
    missed = 0
    for mutation in MUTATIONS:
        with tempfile.TemporaryDirectory() as directory:
            caught = catch(mutation, Path(directory), num_seeds=options.seeds)
        missed += caught is None
        seed, failure = ("–", "**not found**") if caught is None else (caught.seed, caught.failure[:110])
        lines.append(f"| {mutation.name} | `{mutation.path}` | {seed} | {failure.replace('|', ' ')} |")
        print(lines[-1], flush=True)
    _REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
