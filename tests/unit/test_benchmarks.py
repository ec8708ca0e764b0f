"""The arithmetic that every benchmark relies on, and that the scripts say what they promise to say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.claims import at_least, at_most
from benchmarks.measure import Samples, Spread, TimedElsewhere, interleaved, ratio

_FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
_SCRIPTS = sorted(path.name for path in _FOLDER.glob("*.py") if '__name__ == "__main__"' in path.read_text())

# One process for all scripts, because what they import takes longest; each finds its own folder first on the path, and
# `benchmarks` not yet imported, as it would in a process of its own.
_ASK_ALL = """
import os, runpy, sys
for script in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.path[0], sys.argv = os.path.dirname(script), [script, "--help"]
    print(end="\\f")
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
"""


def test_a_spread_has_the_median_and_quartiles_of_the_values() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(5, 3.0, 2.0, 4.0, 1.0, 5.0)
    assert Spread.of([7.0]) == Spread(1, 7.0, 7.0, 7.0, 7.0, 7.0)


def test_there_is_no_median_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_the_unit_stands_in_the_names_of_the_times() -> None:
    document = Samples((0.5, 1.5)).to_json()
    assert document["count"] == 2
    assert document["median_s"] == 1.0
    assert document["times_s"] == [0.5, 1.5]


def test_a_ratio_is_of_the_medians_and_its_spread_of_the_rounds() -> None:
    found = ratio(Samples((1.0, 2.0, 30.0)), Samples((2.0, 1.0, 10.0)))
    assert found.of_medians == 1.0
    assert (found.per_round.min, found.per_round.median, found.per_round.max) == (0.5, 2.0, 3.0)


def test_a_ratio_needs_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="2 rounds, denominator 1"):
        ratio(Samples((1.0, 2.0)), Samples((1.0,)))


def test_rounds_of_several_runs_follow_each_other() -> None:
    assert Samples.joined([Samples((1.0,)), Samples((3.0, 2.0))]).times_s == (1.0, 3.0, 2.0)


def test_cases_run_side_by_side_there_and_back_each_after_its_own_preparation() -> None:
    calls: list[str] = []
    cases = {name: lambda name=name: calls.append(name) for name in "ab"}
    samples = interleaved(cases, rounds=2, warmup=1, before={"b": lambda: calls.append("before b")})
    assert calls == ["before b", "b", "a", "a", "before b", "b", "before b", "b", "a"]
    assert {name: of_case.count for name, of_case in samples.items()} == {"a": 2, "b": 2}


def test_a_case_that_timed_itself_took_that_time() -> None:
    samples = interleaved({"there": lambda: TimedElsewhere(12.5)}, rounds=1, warmup=0)
    assert samples["there"].times_s == (12.5,)


def test_wrong_rounds_and_unknown_preparations_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds=0"):
        interleaved({"a": int}, rounds=0)
    with pytest.raises(ValueError, match=r"\['b'\].*\['a'\]"):
        interleaved({"a": int}, rounds=1, before={"b": int})


def test_a_claim_holds_on_its_side_of_the_bar_and_on_the_bar() -> None:
    copy, case = Samples((2.0,)), Samples((4.0,))
    assert at_least("speed", 0.5).of_speed(case, copy).holds
    assert not at_least("speed", 0.51).of_speed(case, copy).holds
    assert at_most("time", 2000.0).of_excess(case, copy).holds
    assert not at_most("time", 1999.0).of_excess(case, copy).holds


@pytest.mark.slow
def test_every_script_tells_from_any_folder_how_to_call_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _ASK_ALL, *(str(_FOLDER / script) for script in _SCRIPTS)]
    said = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    answers = said.split("\f")[1:]
    assert len(answers) == len(_SCRIPTS) > 3
    for script, answer in zip(_SCRIPTS, answers, strict=True):
        assert answer.startswith(f"usage: {script}")


@pytest.mark.slow
def test_the_engine_benchmark_puts_its_claims_first_and_all_times_after_them(tmp_path: Path) -> None:
    document = json.loads(_run("engine.py", "--quick", "--turns", "1", folder=tmp_path))
    assert document["benchmark"] == "engine"
    assert document["arguments"]["turns"] == 1
    assert {"date", "commit", "is_tree_dirty", "cpu", "num_cores", "load_average"} <= document["run"].keys()
    results = document["results"]
    assert results["lmcache"] is None
    bars = {claim["name"]: claim["bar"] for claim in results["claims"] if claim["bar"] is not None}
    assert bars["engine store, random blocks of 8 KiB"] == 0.7
    assert sorted(bars.values()) == [0.7, 0.7, 0.95, 0.95, 20.0]
    assert {"gb_per_s", "over_memory_copy_torch", "over_memory_copy_libc"} == results["measured"]["copies"]["speeds"][
        "store_random_narrow"
    ].keys()
    assert results["measured"]["calls"]["times"]["lmcache_ray"]["lookup_keys"]["count"] == 2


def test_a_peer_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    from benchmarks.peers.child import PeerError, PeerProcess

    with pytest.raises(PeerError, match="no_python"):
        PeerProcess(str(tmp_path / "no_python"), "lmcache_engine.py")


def _run(script: str, *arguments: str, folder: Path) -> str:
    command = [sys.executable, str(_FOLDER / script), *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout
