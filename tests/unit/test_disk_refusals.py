"""Directories that cannot be used: the message names the place and the reason, and nothing is left half done."""

import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lmcache_ray.arena.lock import OWNER_PATIENCE_S, FileLock, lock_existing
from lmcache_ray.errors import ClosedError, DirectoryTakenError, StorageError
from lmcache_ray.storage.directory_lock import DirectoryHold, DirectoryOwner, lock_directory
from lmcache_ray.storage.disk import RankDisk
from lmcache_ray.storage.disk_names import LOCK_NAME
from lmcache_ray.storage.faults import ChunkFault
from tests.unit.disk_builders import OWNER, file_of, names_in, open_disk, put
from tests.unit.stored_chunks import CHUNK_SIZE, chunk_of, empty_slot, layout_of

LAYOUT = layout_of()
OTHER = DirectoryOwner("other ns", "other", "life 9")


def open_at(root: Path | str) -> RankDisk:
    return RankDisk.open(root, owner=OWNER, layout=LAYOUT, rank=0, max_nbytes=2**20)


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 256 KiB."""
    place = tmp_path / "device"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small filesystem cannot be mounted here (that needs root): a full disk is not tested")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Writing further fails in the middle of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_missing_directories_are_made(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    disk = open_at(root)
    assert disk.directory.is_dir() and (root / LOCK_NAME).is_file()
    assert disk.directory.stat().st_mode & 0o077 == 0, "others can read the KV of prompts"


@pytest.mark.parametrize("name", ["ein Käse@home \N{SNOWMAN}", "x" * 255, "a:b,c\nd", "~", "%s{0}"])
def test_odd_names_are_names(tmp_path: Path, name: str) -> None:
    disk = open_disk(tmp_path / name)
    assert put(disk, chunk_of(1), 1)
    assert disk.read_into(chunk_of(1), empty_slot(LAYOUT)) == (CHUNK_SIZE, None)
    assert disk.directory.parents[1] == tmp_path / name


@pytest.mark.parametrize(
    ("place", "reason"),
    [("x" * 300, "File name too long"), ("file", "Not a directory"), ("file/below", "Not a directory")],
)
def test_a_place_that_cannot_be_a_directory(tmp_path: Path, place: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=reason) as caught:
        open_at(tmp_path / place)
    assert str(tmp_path / place) in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_name_that_the_filesystem_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="surrogates not allowed"):
        open_at(f"{tmp_path}/\ud800")


def test_where_nothing_can_be_made() -> None:
    with pytest.raises(StorageError, match="cannot use disk directory /proc/no/such"):
        open_at("/proc/no/such")


def test_a_read_only_place(small_device: Path) -> None:
    open_disk(small_device).close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_device)], check=True)
    with pytest.raises(StorageError, match=f"cannot use disk directory {small_device}.*Read-only file system"):
        open_at(small_device)


def test_a_full_device(small_device: Path) -> None:
    disk = open_disk(small_device)
    written = 0
    with pytest.raises(StorageError, match=r"cannot write .*No space left on device"):
        while put(disk, chunk_of(written), written):
            written += 1
    assert written > 10
    assert len(names_in(disk)) == written and not list(small_device.rglob("*.tmp"))
    assert disk.read_into(chunk_of(0), empty_slot(LAYOUT)).fault is None
    disk.delete([chunk_of(0), chunk_of(1)])
    assert put(disk, chunk_of(written), written)
    disk.close()
    with pytest.raises(OSError, match="No space"):
        (small_device / "others").write_bytes(bytes(2**20))
    again = open_at(small_device)  # what lies on a full device can still be found, read and deleted
    assert len(again.inventory().entries) == written - 1
    again.delete([chunk_of(2)])


def test_a_write_that_fails_in_the_middle_leaves_no_file(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    assert put(disk, chunk_of(1), 1)
    used = disk.nbytes_used
    with files_of_at_most(3000), pytest.raises(StorageError, match=r"cannot write .*File too large"):
        put(disk, chunk_of(1, generation=2), 1)
    assert names_in(disk) == [file_of(disk, chunk_of(1)).name] and disk.nbytes_used == used
    assert put(disk, chunk_of(1, generation=2), 1)


def test_one_file_that_cannot_be_deleted_does_not_keep_the_others(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    for number in range(3):
        assert put(disk, chunk_of(number), number)
    stuck = file_of(disk, chunk_of(1))
    stuck.unlink()
    stuck.mkdir()
    with pytest.raises(StorageError, match=stuck.name):
        disk.delete([chunk_of(number) for number in range(3)])
    assert names_in(disk) == []


class TestOneCluster:
    def test_another_is_refused_with_the_name_of_the_first(self, tmp_path: Path) -> None:
        disk = open_disk(tmp_path)
        with pytest.raises(DirectoryTakenError) as caught:
            RankDisk.open(tmp_path, owner=OTHER, layout=LAYOUT, rank=0, max_nbytes=0)
        for said in (str(tmp_path), "'ns/cache'", f"process {os.getpid()} "):
            assert said in str(caught.value)
        disk.close()
        open_disk(tmp_path, owner=OTHER)

    def test_a_later_life_of_the_same_cluster_is_another(self, tmp_path: Path) -> None:
        disk = open_disk(tmp_path)
        with pytest.raises(DirectoryTakenError):
            open_disk(tmp_path, owner=DirectoryOwner("ns", "cache", "life 2"))
        disk.close()

    def test_it_has_the_directory_as_long_as_one_of_its_ranks_has(self, tmp_path: Path) -> None:
        ranks = [open_disk(tmp_path, rank=rank) for rank in (0, 1)]
        ranks[0].close()
        with pytest.raises(DirectoryTakenError, match="ns/cache"):
            open_disk(tmp_path, owner=OTHER)
        ranks.append(open_disk(tmp_path, rank=0))
        for rank in ranks:
            rank.close()
        open_disk(tmp_path, owner=OTHER)

    def test_a_rank_has_one_directory_once(self, tmp_path: Path) -> None:
        disk = open_disk(tmp_path)
        second = DirectoryHold(tmp_path, disk.directory, OWNER, patience_s=0.02)
        with pytest.raises(StorageError, match=f"{disk.directory} is in use by another process of this cluster"):
            second.take()
        second.release()
        disk.close()
        open_disk(tmp_path)

    def test_a_directory_that_was_removed_may_get_another_owner(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        disk = open_disk(root)
        shutil.rmtree(root)
        theirs = open_disk(root, owner=OTHER)
        with pytest.raises(DirectoryTakenError, match="'other ns/other'"):
            put(disk, chunk_of(1), 1)
        assert put(theirs, chunk_of(1), 1)
        with pytest.raises(DirectoryTakenError):
            disk.inventory()
        theirs.close()
        assert put(disk, chunk_of(2), 2)
        disk.inventory()

    def test_a_lock_file_that_says_nothing_is_no_obstacle(self, tmp_path: Path) -> None:
        for text in (b"", b"{", b"[]", b"\xff" * 9000, b'{"life": "life 1"}'):
            (tmp_path / LOCK_NAME).write_bytes(text)
            open_disk(tmp_path).close()
        assert b"cache" in (tmp_path / LOCK_NAME).read_bytes()

    @pytest.mark.parametrize("round_", range(8))
    def test_of_clusters_that_start_at_once_exactly_one_comes_in(self, tmp_path: Path, round_: int) -> None:
        """Each with three ranks; a lock file of a cluster that is gone lies there."""
        (tmp_path / LOCK_NAME).write_text('{"namespace": "n", "name": "gone", "life": "0"}')
        came_in: list[tuple[str, FileLock]] = []
        start = threading.Barrier(6)

        def take(life: str) -> None:
            start.wait()
            with suppress(DirectoryTakenError):
                came_in.append((life, lock_directory(tmp_path, DirectoryOwner("n", life, life))))

        threads = [threading.Thread(target=take, args=(life,)) for life in "AB" * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [life for life, _ in came_in] in (["A"] * 3, ["B"] * 3)

    def test_a_first_rank_that_is_slow_in_writing_its_name_is_waited_for(self, tmp_path: Path) -> None:
        (tmp_path / LOCK_NAME).write_text('{"namespace": "n", "name": "gone", "life": "0"}')
        alone = lock_existing(tmp_path / LOCK_NAME)
        assert alone is not None
        writer = threading.Timer(3 * OWNER_PATIENCE_S, alone.release)
        writer.start()
        lock_directory(tmp_path, OWNER).release()
        writer.join()

    def test_a_hold_that_was_released_is_not_taken_again(self, tmp_path: Path) -> None:
        hold = DirectoryHold(tmp_path, tmp_path / "a" / "rank-0", OWNER)
        assert hold.take() and not hold.take()
        hold.release()
        with pytest.raises(ClosedError):
            hold.take()


def test_a_file_that_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    """Its device fails: here a file in whose place there is a loop of links."""
    disk = open_disk(tmp_path)
    assert put(disk, chunk_of(1), 1)
    path = file_of(disk, chunk_of(1))
    path.unlink()
    path.symlink_to(path)
    assert disk.read_into(chunk_of(1), empty_slot(LAYOUT)) == (0, ChunkFault.UNREADABLE)
