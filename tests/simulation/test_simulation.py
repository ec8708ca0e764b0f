"""Thousands of seeds, in CI: every world comes to rest as it must, and together they have seen every kind of mishap.

Seeds are run in processes of their own, where sets of keys have the same order every time: what fails here fails with
the command that is printed.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.simulation import mutations
from tests.simulation.faults import Fault

ROOT: Final = Path(__file__).parents[2]
NUM_SEEDS: Final = 2000
AT_ONCE: Final = 250
_PATIENCE_S: Final = 600.0

RECOVERIES: Final = (
    "a rank came back to its arena",
    "a rank began anew",
    "a rank came back with unfinished slots",
    "a rank came back with slots in view",
    "an index was rebuilt with chunks",
    "an empty index was rebuilt",
    "quarantined slots were settled",
    "a client was proven dead",
    "a client registered again",
    "a clear was pending on a rank",
    "a clear kept what was leased",
    "a view was given up",
    "a lease was left to its time",
    "a rank was silent to a store",
    "a write was refused",
    "a read was refused",
    "found again",
    "write_disk",
    "read_disk",
    "delete_disk",
    "put_remote",
    "load_remote",
)
"""What must have happened in some world: ways back, and what is not done because it comes too late."""

covered: dict[str, int] = {}


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.stdout, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return summary


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, AT_ONCE))
def test_every_world_is_sound_and_comes_to_rest(first: int) -> None:
    done = simulate("--seeds", f"{first}:{first + AT_ONCE}")
    summary = summary_of(done)
    assert done.returncode == 0, done.stdout
    assert summary["seeds"] == AT_ONCE
    for counts in (summary["faults"], summary["happened"]):
        for what, number in counts.items():
            covered[what] = covered.get(what, 0) + number


def test_every_kind_of_mishap_and_every_way_back_was_seen() -> None:
    if not covered:
        pytest.skip("no seeds have been run in this process")
    wanted = [*(fault.name for fault in Fault), *RECOVERIES]
    assert [what for what in wanted if not covered.get(what)] == []


def test_a_seed_tells_the_same_story_every_time() -> None:
    first, again = (simulate("--seed", "3", "--trace").stdout.splitlines()[:-1] for _ in range(2))
    assert len(first) > 50
    assert first == again


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a chunk is visible before all ranks have it", "no look after the last byte"])
def test_a_fault_in_the_product_is_found(name: str, tmp_path: Path) -> None:
    (mutation,) = [mutation for mutation in mutations.MUTATIONS if mutation.name == name]
    caught = mutations.catch(mutation, tmp_path, num_seeds=NUM_SEEDS)
    assert caught is not None, f"{name}: {NUM_SEEDS} seeds have not noticed it"
