"""However a driver ends, its cluster ends with it: no process and no file is left. A detached one waits for `down`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster.__main__ import main
from tests.on_ray.conftest import NAMESPACE, living_actors

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = Path(__file__).with_name("driver_program.py")
_PATIENCE_S = 60.0  # until something is reported as never happening, on a machine however busy
_SOON_S = 15.0


_COMMANDS = """
import sys
sys.path[0] = {root!r}
from cluster.__main__ import main
for words in ("up --world-size 1", "status", "down"):
    assert main([*words.split(), "--json"]) == 0, words
"""

TERMINATED = (128 + signal.SIGTERM, 1)
"""Ends in order after SIGTERM. Where the signal meets one of Ray's own waits, Ray makes the exit status 1."""


class Driver:
    """The driver program in a process of its own."""

    def __init__(
        self,
        arena_dir: Path,
        name: str,
        environment: Mapping[str, str],
        *,
        world_size: int = 1,
        how_long: str = "endless",
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, _PROGRAM, arena_dir, name, NAMESPACE, str(world_size), how_long],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def until(self, wanted: str) -> str:
        """Read what the driver prints up to the line that begins with `wanted`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(wanted):
                return line
        raise AssertionError(f"the driver ended with {self.process.wait()} and never printed {wanted!r}")

    def end(self, number: signal.Signals) -> int:
        """Send the signal and wait; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(_PATIENCE_S)


@contextmanager
def running(driver: Driver) -> Iterator[Driver]:
    """Never leaves the driver behind, however a test ends."""
    try:
        yield driver
    finally:
        driver.process.kill()
        driver.process.communicate()


@pytest.fixture
def joining(ray_nodes: list[str]) -> dict[str, str]:
    """The environment of a process that joins the tests' Ray."""
    return {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = _SOON_S) -> None:
    """Fails if the condition does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    """True if no such process runs; one that only waits to be reaped does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def descendants(pid: int) -> list[int]:
    """Every process that a process started, and those started, and so on."""
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in _words(task / "children")]
    return children + [grandchild for child in children for grandchild in descendants(child)]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


@pytest.mark.parametrize(("number", "statuses"), [(signal.SIGINT, (-signal.SIGINT,)), (signal.SIGTERM, TERMINATED)])
def test_a_signal_in_the_middle_of_calls_leaves_nothing(
    number: signal.Signals, statuses: tuple[int, ...], arena_dir: Path, joining: dict[str, str]
) -> None:
    with running(Driver(arena_dir, f"ended-by-{number.name}", joining)) as driver:
        pids = json.loads(driver.until("["))
        driver.until("calling")
        assert driver.end(number) in statuses
    assert os.listdir(arena_dir) == []
    wait_until(lambda: all(map(is_gone, pids)), "coordinator and ranks are gone")


def test_sigterm_during_the_start_leaves_nothing(arena_dir: Path, joining: dict[str, str]) -> None:
    with running(Driver(arena_dir, "ended-early", joining)) as driver:
        driver.until("starting")
        wait_until(lambda: len(living_actors()) > 0, "an actor is being made", _PATIENCE_S)
        assert driver.end(signal.SIGTERM) in TERMINATED
    wait_until(lambda: living_actors() == [], "all actors are gone")
    assert os.listdir(arena_dir) == []


def test_a_killed_driver_takes_its_ranks_along_and_the_next_one_sweeps(
    arena_dir: Path, joining: dict[str, str]
) -> None:
    with running(Driver(arena_dir, "killed", joining, world_size=2)) as driver:
        pids = json.loads(driver.until("["))
        driver.until("calling")
        driver.end(signal.SIGKILL)
    assert os.listdir(arena_dir) != []  # nobody was left to remove them
    with running(Driver(arena_dir, "killed", joining, how_long="once")) as driver:
        driver.until("calling")
        assert driver.process.wait(_PATIENCE_S) == 0
    assert os.listdir(arena_dir) == []
    wait_until(lambda: all(map(is_gone, pids)), "the first coordinator and ranks are gone")


def test_a_driver_with_a_ray_of_its_own_ends_that_too(arena_dir: Path) -> None:
    with running(Driver(arena_dir, "alone", os.environ)) as driver:
        driver.until("calling")
        started = descendants(driver.process.pid)
        assert len(started) > 3
        assert driver.end(signal.SIGTERM) in TERMINATED
    assert os.listdir(arena_dir) == []
    wait_until(lambda: all(map(is_gone, started)), "every process of its Ray is gone")


def test_a_detached_cluster_is_used_and_ended_by_other_processes(
    arena_dir: Path, joining: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    identity = ["--name", "kept", "--namespace", NAMESPACE]
    capacity = ["--chunk-size", "512", "--capacity-chunks", "512", "--num-blocks", "1024"]
    up = _command(joining, "up", *identity, *capacity, "--arena-dir", str(arena_dir), "--json")
    assert [rank["alive"] for rank in up["ranks"]] == [True, True]

    assert main(["status", *identity, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["problems"] == []

    on_it = ["--cluster", "kept", "--namespace", NAMESPACE]
    report = _command(joining, "replay", *on_it, "--requests", "40", "--verify", "--json")
    assert (report["requests"], report["byte_mismatches"]) == (40, 0)
    assert report["hit_blocks"] > 0

    assert main(["down", *identity]) == 0
    assert "kept" in capsys.readouterr().out
    assert os.listdir(arena_dir) == []
    wait_until(lambda: all(is_gone(rank["pid"]) for rank in up["ranks"]), "the ranks are gone")

    assert main(["down", *identity]) == 1
    assert f"no cache cluster 'kept' lives in namespace '{NAMESPACE}'" in capsys.readouterr().err


def test_replays_begun_together_have_names_of_their_own_and_the_next_one_sweeps_for_a_killed_one(
    arena_dir: Path, joining: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["replay", "--namespace", NAMESPACE, "--arena-dir", str(arena_dir), "--world-size", "1", "--json"]
    long = [*line, "--requests", "200000", "--window", "1", "--capacity-blocks", "50"]
    replays = [
        subprocess.Popen([sys.executable, "-m", "cluster", *long], cwd=_ROOT, env=joining, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    names = {"lmcache_ray:replay:rank0", "lmcache_ray:replay-2:rank0"}
    try:
        wait_until(lambda: names <= set(living_actors()), "both have a cluster", _PATIENCE_S)
        wait_until(lambda: len(list(arena_dir.glob("*.arena"))) == 2, "both have an arena", _PATIENCE_S)
        replays[0].kill()
        wait_until(lambda: not names <= set(living_actors()), "the killed one's rank is gone")
        replays[1].send_signal(signal.SIGINT)
        replays[1].wait(_PATIENCE_S)
    finally:
        for process in replays:
            process.kill()
            process.wait()
    assert list(arena_dir.glob("*.arena")) != []  # of the killed one, whichever of the names it had
    wait_until(lambda: living_actors() == [], "both clusters are gone")
    assert main([*line, "--requests", "20", "--verify"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["requests"], report["byte_mismatches"]) == (20, 0)
    assert os.listdir(arena_dir) == []


def test_the_configuration_names_the_cluster_where_the_command_is_given(
    arena_dir: Path, joining: dict[str, str], tmp_path: Path
) -> None:
    """A file that is named relative to the caller's folder, in which a package `cluster` of somebody else lies."""
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "__init__.py").write_text("SOMETHING = 'else'\n")
    (tmp_path / "mine.yaml").write_text(
        f"cluster_name: by-file\ncluster_namespace: {NAMESPACE}\narena_dir: {arena_dir}\ncapacity_chunks: 4\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS.format(root=str(_ROOT))],
        cwd=tmp_path,
        env={**joining, "LMCACHE_CONFIG_FILE": "mine.yaml"},
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    up, status, down = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert up["name"] == down["name"] == "by-file"
    assert status["namespace"] == NAMESPACE


def _command(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """What `python -m cluster` answers in a process of its own."""
    command = [sys.executable, "-m", "cluster", *arguments]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
