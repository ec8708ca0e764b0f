"""What a sweep removes and what it leaves."""

import os
from pathlib import Path

import pytest

from lmcache_ray.arena.arena import Arena
from lmcache_ray.arena.liveness import LivenessFile
from lmcache_ray.arena.names import arena_path, liveness_path, temporary_path
from lmcache_ray.arena.spec import ArenaGeometry, ArenaSpec
from lmcache_ray.arena.sweep import SweepReport, sweep
from lmcache_ray.errors import ArenaError

NOW = 1_000_000.0
WINDOW = 60.0


def leave_arena(directory: Path, name: str, rank: int = 0, *, heartbeat: float = NOW) -> Path:
    """The arena of an owner that died."""
    arena = make_arena(directory, name, rank, heartbeat)
    arena.close(unlink=False)
    return arena.path


def make_arena(directory: Path, name: str, rank: int = 0, heartbeat: float = NOW) -> Arena:
    spec = ArenaSpec("ns", name, rank, 4, bytes(32), ArenaGeometry(1, 64))
    return Arena.create(spec, directory, node_id="n", now=heartbeat)


def sweep_mine(directory: Path, keep_ranks: tuple[int, ...] = ()) -> SweepReport:
    return sweep(directory, "ns", "mine", restart_window_s=WINDOW, now=NOW, keep_ranks=keep_ranks)


def test_own_dead_arenas_go_but_those_of_ranks_that_may_return(tmp_path: Path) -> None:
    paths = [leave_arena(tmp_path, "mine", rank) for rank in range(3)]
    report = sweep_mine(tmp_path, keep_ranks=(1,))
    assert report.removed == (paths[0], paths[2])
    assert [kept.path for kept in report.kept] == [paths[1]] and "rank 1" in report.kept[0].reason
    assert sweep_mine(tmp_path).removed == (paths[1],)
    assert os.listdir(tmp_path) == []


def test_a_living_owners_arena_stays_however_old(tmp_path: Path) -> None:
    with make_arena(tmp_path, "mine", heartbeat=1.0) as mine, make_arena(tmp_path, "other", heartbeat=1.0) as other:
        report = sweep_mine(tmp_path)
        assert report.removed == ()
        assert {kept.path for kept in report.kept} == {mine.path, other.path}
        assert all("living process" in kept.reason for kept in report.kept)
        assert mine.slots.num_slots == 1 and mine.path.exists()


@pytest.mark.parametrize(
    ("heartbeat", "goes"), [(NOW - 59, False), (NOW - 61, True), (NOW + 59, False), (NOW + 61, True)]
)
def test_anothers_arena_waits_for_the_restart_window(tmp_path: Path, heartbeat: float, goes: bool) -> None:
    path = leave_arena(tmp_path, "other", heartbeat=heartbeat)
    report = sweep_mine(tmp_path)
    assert path.exists() is not goes
    assert report.removed == ((path,) if goes else ())
    assert goes or "restart within 60 s" in report.kept[0].reason


@pytest.mark.parametrize(("age", "goes"), [(10.0, False), (100.0, True)])
def test_without_a_readable_header_the_modification_time_counts(tmp_path: Path, age: float, goes: bool) -> None:
    damaged = leave_arena(tmp_path, "other", heartbeat=NOW)
    damaged.write_bytes(b"nonsense")
    temporary = temporary_path(arena_path(tmp_path, "ns", "other", 1), b"abcd")
    temporary.touch()
    client = liveness_path(tmp_path, "ns", "other", "client")
    client.touch()
    for path in (damaged, temporary, client):
        os.utime(path, (NOW - age, NOW - age))
    report = sweep_mine(tmp_path)
    assert set(report.removed) == ({damaged, temporary, client} if goes else set())
    assert len(report.kept) == (0 if goes else 3)


def test_own_temporary_and_liveness_files_of_the_dead_go_at_once(tmp_path: Path) -> None:
    temporary = temporary_path(arena_path(tmp_path, "ns", "mine", 1), b"abcd")
    temporary.touch()
    dead = liveness_path(tmp_path, "ns", "mine", "dead")
    dead.touch()
    with LivenessFile.create(tmp_path, "ns", "mine", "alive") as alive:
        report = sweep_mine(tmp_path, keep_ranks=(0, 1, 2, 3))
        assert set(report.removed) == {temporary, dead}
        assert alive.path.exists() and LivenessFile.is_alive(alive.path)


def test_foreign_files_links_and_directories_are_not_touched(tmp_path: Path) -> None:
    foreign = [tmp_path / "psm_123", tmp_path / "lmcache_ray-notes.arena", tmp_path / "x.tmp"]
    for path in foreign:
        path.touch()
        os.utime(path, (0, 0))
    link = arena_path(tmp_path, "ns", "mine", 0)
    link.symlink_to(foreign[0])
    folder = arena_path(tmp_path, "ns", "mine", 1)
    folder.mkdir()
    report = sweep_mine(tmp_path)
    assert report.removed == ()
    assert {kept.path for kept in report.kept} == {link, folder}
    assert all(path.exists() for path in (*foreign, link, folder))


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArenaError, match="nowhere"):
        sweep_mine(tmp_path / "nowhere")
