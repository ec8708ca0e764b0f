"""Names of local replays: one run holds one name; what a killed one left goes with the next run, whatever its name."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from cluster.replay_name import MAX_REPLAYS, held_name
from lmcache_ray.arena.names import arena_path
from lmcache_ray.errors import ArenaError, ClusterError

ROOT = Path(__file__).resolve().parents[2]
HOLD_FOREVER = """
import sys, time
from cluster.replay_name import held_name
with held_name(sys.argv[1], "ns", restart_window_s=60, now=time.time()) as name:
    print(name, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's."""
    path = Path(tempfile.mkdtemp(prefix="lmcache_ray-tests-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def hold(folder: Path, taken: tuple[str, ...] = ()) -> AbstractContextManager[str]:
    return held_name(str(folder), "ns", restart_window_s=60, now=time.time(), is_taken=lambda name: name in taken)


def leave_arena(folder: Path, name: str) -> Path:
    """As a killed rank does: a file that nobody holds."""
    path = arena_path(folder, "ns", name, 0)
    path.write_bytes(b"left behind")
    return path


def test_a_name_is_held_from_begin_to_end(folder: Path) -> None:
    with hold(folder) as first, hold(folder) as second:
        assert (first, second) == ("replay", "replay-2")
        with hold(folder) as third:
            assert third == "replay-3"
    with hold(folder) as again:
        assert again == "replay"
    assert os.listdir(folder) == []


def test_a_name_that_is_taken_elsewhere_is_passed_over(folder: Path) -> None:
    with hold(folder, taken=("replay", "replay-2")) as name:
        assert name == "replay-3"
        with hold(folder) as other:
            assert other == "replay"


def test_a_killed_run_leaves_its_name_free_and_the_next_run_of_any_name_sweeps_it(folder: Path) -> None:
    with hold(folder):
        killed = subprocess.Popen(
            [sys.executable, "-c", HOLD_FOREVER, folder], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert killed.stdout is not None and killed.stdout.readline() == b"replay-2\n"
        arena = leave_arena(folder, "replay-2")
        with hold(folder) as third:
            assert third == "replay-3"
            assert arena.exists(), "its holder lives"
        killed.kill()
        killed.communicate()
    assert arena.exists()
    with hold(folder) as name:
        assert name == "replay"
        assert not arena.exists()
    assert os.listdir(folder) == []


def test_what_is_left_of_the_name_itself_is_for_the_start_of_its_cluster(folder: Path) -> None:
    arena, foreign = leave_arena(folder, "replay"), leave_arena(folder, "another cluster")
    with hold(folder) as name:
        assert name == "replay"
    assert arena.exists() and foreign.exists()


def test_another_users_name_is_taken_for_good(folder: Path) -> None:
    with hold(folder):
        (theirs,) = folder.iterdir()
        kept = theirs.with_name("kept")
        theirs.rename(kept)
    kept.rename(theirs)
    theirs.chmod(0)
    try:
        if os.geteuid() == 0:  # whom no mode keeps out
            os.seteuid(65534)
        with hold(folder) as name:
            assert name == "replay-2"
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
    assert theirs.exists()


def test_a_folder_that_cannot_be_used_is_named(folder: Path) -> None:
    with pytest.raises(ArenaError, match="no-such"), hold(folder / "no-such"):
        pass


def test_the_number_of_names_is_bounded(folder: Path) -> None:
    with ExitStack() as held:
        for _ in range(MAX_REPLAYS):
            held.enter_context(hold(folder))
        with pytest.raises(ClusterError, match=f"{MAX_REPLAYS} replays run already"), hold(folder):
            pass
