"""The next life of a disk directory: what is found again, what is swept, and the limit, which holds at every moment."""

import os
import random
import shutil
from pathlib import Path

import pytest

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.storage.directory_lock import DirectoryOwner
from lmcache_ray.storage.disk import RankDisk
from lmcache_ray.storage.disk_space import chunk_file_nbytes, disk_capacity, file_nbytes_on_disk
from lmcache_ray.storage.faults import ChunkFault
from tests.unit.disk_builders import ROOM, du, file_of, names_in, open_disk, put
from tests.unit.stored_chunks import CHUNK_SIZE, chunk_of, empty_slot, layout_of, slot_of

LAYOUT = layout_of()
OLD = layout_of(dtype=KVDtype.FLOAT32)
OLDER = layout_of(world_size=3)
LATER = DirectoryOwner("ns", "cache", "life 2")


def reopened(root: Path, rank: int = 0, max_nbytes: int = ROOM) -> RankDisk:
    """The same rank in the cluster's next life, before it looked through its directory."""
    return RankDisk.open(root, owner=LATER, layout=LAYOUT, rank=rank, max_nbytes=max_nbytes)


def test_chunks_are_found_again_in_the_order_of_their_use(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    for number in range(4):
        assert put(disk, chunk_of(number), number)
        os.utime(file_of(disk, chunk_of(number)), ns=(0, 10**9 * number))
    disk.touch([chunk_of(1), chunk_of(99)])
    disk.close()
    again = reopened(tmp_path)
    found = again.inventory()
    assert found.entries == [chunk_of(number) for number in (0, 2, 3, 1)]
    assert (found.num_temporary, found.num_damaged, found.old_nbytes, found.num_foreign) == (0, 0, 0, 0)
    assert again.read_into(chunk_of(2), empty_slot(LAYOUT)) == (CHUNK_SIZE, None)
    assert again.num_files == 4 and again.nbytes_used == disk.nbytes_used


def test_several_generations_of_a_chunk_are_all_reported(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    for generation in (7, 2**64 - 1, 0):
        assert put(disk, chunk_of(1, generation=generation), generation % 5)
    assert {entry.generation for entry in disk.inventory().entries} == {7, 2**64 - 1, 0}


def test_half_written_files_and_bad_heads_are_swept(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    for number in range(5):
        assert put(disk, chunk_of(number), number)
    paths = [file_of(disk, chunk_of(number)) for number in range(5)]
    disk.close()
    paths[0].rename(f"{paths[0]}.00000001.tmp")
    os.truncate(paths[1], 5000)
    with paths[2].open("r+b") as file:
        file.seek(70)
        file.write(b"?")
    shutil.copy(paths[3], paths[4])
    again = reopened(tmp_path)
    found = again.inventory()
    assert (found.entries, found.num_temporary, found.num_damaged) == ([chunk_of(3)], 1, 3)
    assert names_in(again) == [paths[3].name]
    assert again.inventory().num_damaged == 0


def test_damaged_data_is_found_when_it_is_read(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    assert put(disk, chunk_of(1), 1)
    with file_of(disk, chunk_of(1)).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0" if slot_of(1, LAYOUT)[-1] else b"\1")
    assert disk.inventory().entries == [chunk_of(1)]
    assert disk.read_into(chunk_of(1), empty_slot(LAYOUT)).fault is ChunkFault.DAMAGED


def test_foreign_files_are_left_alone_and_not_counted(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    assert put(disk, chunk_of(1), 1)
    leaf = file_of(disk, chunk_of(1)).parent
    elsewhere = disk.directory / ("0" if leaf.parent.name != "0" else "1") / "0"
    elsewhere.mkdir(parents=True)
    shutil.copy(file_of(disk, chunk_of(1)), elsewhere)  # our name in a place where nobody looks for it
    foreign = [
        leaf / "notes.txt", leaf.parent / "g", leaf.parent.parent / "README", tmp_path / "mine",
        elsewhere / file_of(disk, chunk_of(1)).name,
    ]  # fmt: skip
    for path in foreign[:-1]:
        path.write_bytes(bytes(100_000))
    (leaf / file_of(disk, chunk_of(2)).name).mkdir()
    used = disk.nbytes_used
    found = disk.inventory()
    assert found.entries == [chunk_of(1)] and found.num_foreign == 5
    assert disk.nbytes_used - used <= 2 * 4096  # the new directories
    disk.delete([chunk_of(1)])
    disk.check([], repair=True)
    assert all(path.exists() for path in foreign)


def test_a_file_being_written_survives_the_sweep(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    found = []

    def look() -> bool:
        found.append(disk.inventory())
        return True

    assert disk.write(chunk_of(1), CHUNK_SIZE, slot_of(1, LAYOUT), look)
    assert (found[0].entries, found[0].num_temporary) == ([], 0)
    assert disk.inventory().entries == [chunk_of(1)]


@pytest.mark.parametrize("num_chunks", [1, 5, 40])
def test_the_capacity_always_fits_and_one_more_is_refused_in_time(tmp_path: Path, num_chunks: int) -> None:
    """Whatever the keys are: here most have a directory of their own, and the old ones' directories are empty."""
    each = file_nbytes_on_disk(chunk_file_nbytes(LAYOUT, 0))
    limit = next(nbytes for nbytes in range(0, 2**22, 512) if disk_capacity(nbytes, LAYOUT, 0) == num_chunks)
    disk = open_disk(tmp_path, max_nbytes=limit)
    kept: list[int] = []
    for number in range(4 * num_chunks):
        if len(kept) == num_chunks:
            disk.delete([chunk_of(kept.pop(0))])
        assert put(disk, chunk_of(number), number)
        kept.append(number)
        assert du(tmp_path) <= limit
    refused = 1000
    while put(disk, chunk_of(refused), refused):
        refused += 1
        assert du(tmp_path) <= limit
    assert limit - du(tmp_path) < each + 20 * 4096
    assert f"{chunk_of(refused).key.hex()}.{refused:016x}.kv" not in names_in(disk)


def test_the_space_used_is_what_du_says(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    order = random.Random(5)
    for number in range(60):
        assert put(disk, chunk_of(number), number)
        if order.random() < 0.4:
            disk.delete([chunk_of(order.randrange(number + 1))])
        assert 0 <= disk.nbytes_used - du(disk.directory) <= 4096 * disk.num_files  # equal on ext4


class TestOldLayouts:
    def fill(self, root: Path, layout: object, ranks: range, numbers: range) -> list[Path]:
        """Chunks of another layout, each a second younger than the one before."""
        paths = []
        for rank in ranks:
            disk = open_disk(root, layout=layout, rank=rank)  # type: ignore[arg-type]
            for number in numbers:
                assert put(disk, chunk_of(number), number, layout=layout, rank=rank)  # type: ignore[arg-type]
                paths.append(file_of(disk, chunk_of(number)))
                os.utime(paths[-1], ns=(0, 10**9 * number))
            disk.close()
        return paths

    def test_their_files_count_and_go_first_the_oldest_before(self, tmp_path: Path) -> None:
        older = self.fill(tmp_path, OLDER, range(1), range(0, 3))
        old = self.fill(tmp_path, OLD, range(1), range(3, 6))
        before = du(tmp_path)
        disk = reopened(tmp_path, max_nbytes=before + 20 * 4096)
        found = disk.inventory()
        assert found.entries == [] and all(path.exists() for path in (*older, *old))
        assert before - 5 * 4096 <= found.old_nbytes <= before
        for number in range(100, 120):
            assert put(disk, chunk_of(number), number)
            assert du(tmp_path) <= before + 20 * 4096
            left = [path for path in (*older, *old) if path.exists()]
            assert left == [*older, *old][6 - len(left) :]
            if not left:
                break
        assert not left
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [disk.directory.parent.name]

    def test_a_limit_that_they_exceed_is_kept_at_the_start(self, tmp_path: Path) -> None:
        self.fill(tmp_path, OLD, range(1), range(40))
        limit = du(tmp_path) // 2
        disk = reopened(tmp_path, max_nbytes=limit)
        assert 0 < disk.inventory().old_nbytes < limit
        assert du(tmp_path) <= limit

    def test_each_is_counted_by_one_rank_whatever_ranks_there_were(self, tmp_path: Path) -> None:
        self.fill(tmp_path, OLDER, range(3), range(2))
        ranks = [reopened(tmp_path, rank) for rank in (0, 1)]
        counted = [rank.inventory().old_nbytes for rank in ranks]
        assert counted[0] > 0 and counted[1] == 0
        ranks[0].close()
        assert ranks[1].inventory().old_nbytes == counted[0]

    def test_half_written_files_of_theirs_go_at_once_and_foreign_ones_never(self, tmp_path: Path) -> None:
        (path,) = self.fill(tmp_path, OLD, range(1), range(1))
        path.rename(f"{path}.00000001.tmp")
        (path.parent / "notes.txt").write_text("mine")
        disk = reopened(tmp_path)
        assert disk.inventory().old_nbytes == 0
        assert [found.name for found in path.parents[2].rglob("*") if found.is_file()] == ["notes.txt"]

    def test_what_is_called_alike_but_is_no_directory_of_ours(self, tmp_path: Path) -> None:
        (tmp_path / ("0" * 32)).write_text("a file")
        (tmp_path / ("1" * 32)).mkdir()
        (tmp_path / ("1" * 32) / "rank-0").symlink_to(tmp_path)
        (tmp_path / ("1" * 32) / "rank-1").write_text("a file")
        assert reopened(tmp_path).inventory().old_nbytes == 0
        assert (tmp_path / ("1" * 32) / "rank-0").is_symlink()
