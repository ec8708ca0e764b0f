"""A disk that cannot be used: memory goes on serving, `problems()` says what is wrong, no call of an engine raises, and
the tier comes back by itself when the cause has gone.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_ray.tiers import health, tier_service
from tests.unit.disk_worlds import MIB, C, DiskWorld, Prompt, disk_world, small_device, wait_until

__all__ = ("small_device",)

WHOLE = 3 * C
CAPACITY = 16


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is out of order is tried again soon."""
    monkeypatch.setattr(health, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(health, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(tier_service, "_ROUND_S", 0.02)


class Place:
    """A directory in which nothing can be changed while it is `denied`, not even by root."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_mounted = False

    def deny(self) -> None:
        if os.geteuid() != 0:
            self.path.chmod(0o500)
            return
        mounts = [["--bind", str(self.path), str(self.path)], ["-o", "remount,bind,ro", str(self.path)]]
        for mount in mounts:
            if subprocess.run(["mount", *mount], capture_output=True, check=False).returncode != 0:
                pytest.skip("root cannot mount here: a read-only directory is not tested")
            self._is_mounted = True

    def allow(self) -> None:
        if self._is_mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=True)
            self._is_mounted = False
        else:
            self.path.chmod(0o700)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """An empty one."""
    place = Place(tmp_path / "place")
    place.path.mkdir()
    try:
        yield place
    finally:
        place.allow()


def check_memory_serves(disk: DiskWorld, *reasons: str) -> None:
    """More is stored than memory holds; the problem, which has come or comes with it, names all of `reasons`."""
    for number in range(100, 110):
        prompt = Prompt(number)
        assert disk.store(prompt) == WHOLE
        assert disk.world.engines[0].lookup(prompt.tokens) == disk.retrieved(prompt) == WHOLE
    engine = disk.world.engines[0]
    wait_until(lambda: not engine.is_healthy())
    (problem,) = engine.problems()
    for reason in ("disk tier is out of order", *reasons):
        assert reason in problem
    assert engine.lookup(Prompt(100).tokens) < WHOLE, "the test tests nothing: memory held all of it"
    with disk.service.at_now() as (index, _):
        index.check_integrity()


def check_it_is_back(disk: DiskWorld) -> None:
    """Without a restart, what is stored from now on comes to the disk."""
    engine = disk.world.engines[0]
    wait_until(lambda: not disk.is_suspended())
    disk.spilled(Prompt(200))
    assert disk.retrieved(Prompt(200)) == WHOLE
    wait_until(engine.is_healthy)
    assert engine.problems() == []
    disk.flush()
    disk.check_idle()


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks", "MLA"])
def test_a_directory_that_is_missing_is_made(tmp_path: Path, kind: str) -> None:
    with disk_world(tmp_path, kind, root=tmp_path / "a" / "b" / "c") as disk:
        assert disk.world.engines[0].problems() == []
        disk.spilled(Prompt(1))
        assert disk.retrieved(Prompt(1)) == WHOLE


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks", "MLA"])
def test_a_file_in_the_place_of_the_directory(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "kv"
    root.write_text("mine")
    with disk_world(tmp_path, kind, root=root, capacity_chunks=CAPACITY) as disk:
        check_memory_serves(disk, str(root), "Not a directory")
        assert root.read_text() == "mine"
        root.unlink()
        check_it_is_back(disk)


def test_a_directory_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with disk_world(tmp_path, root=tmp_path / "file" / "kv", capacity_chunks=CAPACITY) as disk:
        check_memory_serves(disk, "file/kv", "Not a directory")
        (tmp_path / "file").unlink()
        check_it_is_back(disk)


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks"])
def test_a_read_only_directory_at_the_start(tmp_path: Path, place: Place, kind: str) -> None:
    place.deny()
    with disk_world(tmp_path, kind, root=place.path / "kv", capacity_chunks=CAPACITY) as disk:
        check_memory_serves(disk, str(place.path), "Read-only" if os.geteuid() == 0 else "Permission denied")
        place.allow()
        check_it_is_back(disk)


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks"])
def test_a_directory_that_becomes_read_only(tmp_path: Path, place: Place, kind: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a directory read-only that is in use")
    with disk_world(tmp_path, kind, root=place.path, capacity_chunks=CAPACITY) as disk:
        prompt = disk.spilled(Prompt(1))
        place.deny()
        check_memory_serves(disk, str(place.path), "Read-only")
        assert disk.retrieved(prompt) == WHOLE, "what is there can still be read"
        disk.world.engines[0].clear(prompt.tokens)
        assert disk.retrieved(prompt) == 0
        place.allow()
        check_it_is_back(disk)
        assert disk.retrieved(prompt) == 0


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks", "MLA"])
def test_a_full_device(tmp_path: Path, small_device: Path, kind: str) -> None:
    """Others' files fill it: what is there is served, and there is no half of a file."""
    with disk_world(tmp_path, kind, root=small_device / "kv", capacity_chunks=CAPACITY) as disk:
        prompt = disk.spilled(Prompt(1))
        filler = small_device / "theirs"
        fill_up(filler)
        check_memory_serves(disk, str(small_device), "No space left on device")
        assert disk.retrieved(prompt) == WHOLE
        assert not list(small_device.rglob("*.tmp"))
        filler.unlink()
        check_it_is_back(disk)
    with disk_world(tmp_path, kind, root=small_device / "kv") as again:
        assert again.retrieved(prompt) == again.retrieved(Prompt(200)) == WHOLE


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks"])
def test_a_device_that_is_smaller_than_the_limit(tmp_path: Path, small_device: Path, kind: str) -> None:
    """It fills up with what is stored: that stays, and the engine goes on."""
    root = small_device / "kv"
    with disk_world(tmp_path, kind, root=root, max_local_disk_size=64 * MIB, capacity_chunks=CAPACITY) as disk:
        prompt = disk.spilled(Prompt(1))
        numbers = iter(range(1000, 2000))
        while disk.world.engines[0].is_healthy():
            assert disk.store(Prompt(next(numbers))) == WHOLE
        (problem,) = disk.world.engines[0].problems()
        assert "No space left on device" in problem
        assert disk.retrieved(prompt) == WHOLE
        disk.world.engines[0].clear(locations=["disk"])
        check_it_is_back(disk)


def test_a_device_that_is_full_at_the_start(tmp_path: Path, small_device: Path) -> None:
    fill_up(small_device / "theirs")
    with disk_world(tmp_path, root=small_device / "kv", capacity_chunks=CAPACITY) as disk:
        check_memory_serves(disk, str(small_device), "No space left on device")
        (small_device / "theirs").unlink()
        check_it_is_back(disk)


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks", "MLA"])
def test_a_file_takes_the_directorys_place_while_it_is_used(tmp_path: Path, kind: str) -> None:
    with disk_world(tmp_path, kind, capacity_chunks=CAPACITY) as disk:
        prompt = disk.spilled(Prompt(1))
        shutil.rmtree(disk.root)
        disk.root.write_text("mine")
        assert disk.retrieved(prompt) == 0
        check_memory_serves(disk, str(disk.root), "Not a directory")
        disk.root.unlink()
        check_it_is_back(disk)
        assert disk.store(prompt) == disk.retrieved(prompt) == WHOLE


def test_another_world_takes_a_directory_that_was_removed(tmp_path: Path) -> None:
    """Ours is the one without a disk then, and says whose it is; when the other has gone it is ours again."""
    with disk_world(tmp_path, "2 ranks", capacity_chunks=CAPACITY) as ours:
        prompt = ours.spilled(Prompt(1))
        shutil.rmtree(ours.root)
        with disk_world(tmp_path, "2 ranks", model="theirs") as theirs:
            stored = theirs.spilled(Prompt(2))
            assert ours.retrieved(prompt) == 0
            check_memory_serves(ours, str(ours.root), "belongs to the living cluster 'in process/theirs in process")
            assert theirs.retrieved(stored) == WHOLE
        check_it_is_back(ours)


# -- names ------------------------------------------------------------------------------------------------------------

NAMES = ["ein Käse@home \N{SNOWMAN}", "a@b", "x" * 255, "..dots..", "%s{0}", "-rf", "~"]


@pytest.mark.parametrize("name", NAMES)
def test_directories_of_any_name(tmp_path: Path, name: str) -> None:
    for root in (tmp_path / name, f"{tmp_path}/elsewhere/../{name}"):
        with disk_world(tmp_path, root=root) as disk:
            assert disk.store(Prompt(1)) == WHOLE
            assert disk.world.engines[0].problems() == []
        with disk_world(tmp_path, root=tmp_path / name) as again:
            assert again.locate(Prompt(1)).disk == again.retrieved(Prompt(1)) == WHOLE
    assert {path.name for path in tmp_path.iterdir()} <= {name, "elsewhere"}


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with disk_world(tmp_path, root=tmp_path / ("x" * 300), capacity_chunks=CAPACITY) as disk:
        check_memory_serves(disk, "x" * 300, "File name too long")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", [*NAMES, "new\nline", "m" * 300, "../../up", "/etc", "org/model", ".."])
def test_models_of_any_name(tmp_path: Path, model: str) -> None:
    """No name of a model becomes a name of a file."""
    with disk_world(tmp_path, "2 ranks", model="an ordinary one") as disk:
        disk.spilled(Prompt(1))
    with disk_world(tmp_path, "2 ranks", model=model) as other:
        assert other.retrieved(Prompt(1)) == 0
        other.spilled(Prompt(1))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(path.is_relative_to(tmp_path / "disk") for path in files)
    assert len([path for path in files if path.suffix == ".kv"]) == 2 * 2 * 3
    assert [path.name for path in files if path.suffix != ".kv"] == ["lmcache_ray.lock"] * 3
    with disk_world(tmp_path, "2 ranks", model=model) as again:
        assert again.retrieved(Prompt(1)) == WHOLE


def fill_up(path: Path) -> None:
    """A file that takes all that the device has left."""
    with path.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)) == 4096:
                pass
        except OSError:
            return
