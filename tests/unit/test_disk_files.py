"""One rank's chunks on disk: what is written is read, and what was done to a file is a miss and nothing else."""

import os
import pickle
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lmcache_ray.errors import ClosedError, LayoutError, ProtocolError, StorageError
from lmcache_ray.layout import Placement
from lmcache_ray.storage.disk import RankDisk, StoredChunk
from lmcache_ray.storage.disk_check import FindingKind
from lmcache_ray.storage.faults import ChunkFault, ReadResult
from tests.unit.disk_builders import OWNER, file_of, names_in, open_disk, put
from tests.unit.stored_chunks import CHUNK_SIZE, chunk_of, empty_slot, layout_of, slot_of

LAYOUT = layout_of()


def read(disk: RankDisk, chunk: StoredChunk, number: int) -> ReadResult:
    """Read the chunk, and compare every byte with the slot of that number unless there was a fault."""
    slot = empty_slot(LAYOUT)
    result = disk.read_into(chunk, slot)
    assert result.fault is not None or np.array_equal(slot, slot_of(number, LAYOUT))
    assert (result.num_tokens == 0) == (result.fault is not None)
    return result


@pytest.mark.parametrize("num_tokens", [1, 9, CHUNK_SIZE])
def test_what_is_written_is_read(tmp_path: Path, num_tokens: int) -> None:
    disk = open_disk(tmp_path)
    assert disk.write(chunk_of(1), num_tokens, slot_of(1, LAYOUT), lambda: True)
    assert read(disk, chunk_of(1), 1) == ReadResult(num_tokens, None)
    assert read(disk, chunk_of(1, generation=2), 1).fault is ChunkFault.MISSING
    assert read(disk, chunk_of(2, generation=1), 1).fault is ChunkFault.MISSING
    disk.delete([chunk_of(1), chunk_of(7)])
    assert read(disk, chunk_of(1), 1).fault is ChunkFault.MISSING
    assert names_in(disk) == []


def test_ranks_and_slots_that_lie_in_larger_memory(tmp_path: Path) -> None:
    arena = np.zeros((3, LAYOUT.ranks[1].slot_nbytes), dtype=np.uint8)
    arena[1] = slot_of(5, LAYOUT, 1)
    with_rank = [open_disk(tmp_path, rank=rank) for rank in (0, 1)]
    assert with_rank[1].write(chunk_of(1), 4, arena[1], lambda: True)
    assert with_rank[1].read_into(chunk_of(1), arena[2]) == (4, None)
    assert np.array_equal(arena[1], arena[2]) and not arena[0].any()
    assert with_rank[0].read_into(chunk_of(1), empty_slot(LAYOUT)).fault is ChunkFault.MISSING


def test_a_large_slot_is_read_in_pieces(tmp_path: Path) -> None:
    layout = layout_of(layers=2048)  # 4 MiB and a little
    disk = open_disk(tmp_path, layout=layout)
    slot = slot_of(1, layout)
    assert slot.nbytes % 2**20
    assert disk.write(chunk_of(1), CHUNK_SIZE, slot, lambda: True)
    found = empty_slot(layout)
    assert disk.read_into(chunk_of(1), found) == (CHUNK_SIZE, None)
    assert np.array_equal(found, slot)
    for position in (-1, 2**20, 2**21 + 700):
        with file_of(disk, chunk_of(1)).open("r+b") as file:
            file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 16]))
        assert disk.read_into(chunk_of(1), found).fault is ChunkFault.DAMAGED
        assert disk.write(chunk_of(1), CHUNK_SIZE, slot, lambda: True)
        assert disk.read_into(chunk_of(1), found).fault is None


def test_a_large_file_that_gets_no_room_leaves_nothing(tmp_path: Path) -> None:
    layout = layout_of(layers=2048)
    disk = open_disk(tmp_path, layout=layout)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*\.kv: File too large"):
            disk.write(chunk_of(1), CHUNK_SIZE, slot_of(1, layout), lambda: True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(disk) == [] and disk.num_files == 0
    assert disk.write(chunk_of(1), CHUNK_SIZE, slot_of(1, layout), lambda: True)


def test_a_slot_that_changed_under_the_writer_leaves_no_file(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    seen: list[int] = []

    def is_intact() -> bool:
        (temporary,) = disk.directory.rglob("*.tmp")
        seen.append(temporary.stat().st_size)
        return False

    before = disk.nbytes_used
    assert not disk.write(chunk_of(1), CHUNK_SIZE, slot_of(1, LAYOUT), is_intact)
    assert seen[0] > slot_of(1, LAYOUT).nbytes, "asked before the last byte was written"
    assert names_in(disk) == []
    assert disk.nbytes_used == before + 2 * 4096  # its directories stay
    assert disk.num_files == 0


def test_an_error_of_the_caller_leaves_no_file(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)

    def is_intact() -> bool:
        raise ClosedError("the arena is gone")

    with pytest.raises(ClosedError):
        disk.write(chunk_of(1), CHUNK_SIZE, slot_of(1, LAYOUT), is_intact)
    assert names_in(disk) == []


def swap_bit(position: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position] ^= 4
        path.write_bytes(content)

    return change


def as_pickle(path: Path) -> None:
    class Marks:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(path.parents[3] / "marker"),))

    path.write_bytes(pickle.dumps(Marks()) * 100)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "twice": lambda path: path.write_bytes(path.read_bytes() * 2),
    "header length": swap_bit(12),
    "data length": swap_bit(16),
    "data checksum": swap_bit(24),
    "header": swap_bit(60),
    "first byte of data": swap_bit(-slot_of(1, LAYOUT).nbytes),
    "last byte": swap_bit(-1),
    "pickle": as_pickle,
    "directory": lambda path: (path.unlink(), path.mkdir()),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_and_the_next_write_repairs_it(tmp_path: Path, damage: str) -> None:
    disk = open_disk(tmp_path)
    assert put(disk, chunk_of(1), 1) and put(disk, chunk_of(2), 2)
    DAMAGES[damage](file_of(disk, chunk_of(1)))
    assert read(disk, chunk_of(1), 1) == ReadResult(0, ChunkFault.DAMAGED)
    assert read(disk, chunk_of(2), 2).fault is None
    assert not list(tmp_path.rglob("marker"))
    repaired = chunk_of(1, generation=9)  # the index gives every writing another generation
    assert put(disk, repaired, 1)
    assert read(disk, repaired, 1).fault is None


@pytest.mark.parametrize(
    "other", [chunk_of(2), chunk_of(1, generation=2)], ids=["another chunk's file", "another generation's"]
)
def test_another_chunks_file_is_found(tmp_path: Path, other: StoredChunk) -> None:
    disk = open_disk(tmp_path)
    assert put(disk, chunk_of(1), 1) and put(disk, other, 2)
    shutil.copy(file_of(disk, other), file_of(disk, chunk_of(1)))
    assert read(disk, chunk_of(1), 1).fault is ChunkFault.DAMAGED


@pytest.mark.parametrize("change", ["rank", "layout"])
def test_a_file_of_another_rank_or_layout_is_found(tmp_path: Path, change: str) -> None:
    other = layout_of(world_size=4) if change == "layout" else LAYOUT
    theirs = open_disk(tmp_path / "theirs", layout=other, rank=1 if change == "rank" else 0)
    ours = open_disk(tmp_path / "ours")
    assert put(theirs, chunk_of(1), 1, layout=other) and put(ours, chunk_of(1), 1)
    shutil.copy(file_of(theirs, chunk_of(1)), file_of(ours, chunk_of(1)))
    assert read(ours, chunk_of(1), 1).fault is ChunkFault.DAMAGED


def test_one_copy_for_all_ranks_is_read_by_a_world_of_any_size(tmp_path: Path) -> None:
    few, many = (layout_of(world_size=size, placement=Placement.FIRST_RANK) for size in (2, 4))
    disk = open_disk(tmp_path, layout=few)
    assert put(disk, chunk_of(1), 1, layout=few)
    disk.close()
    again = RankDisk.open(tmp_path, owner=OWNER, layout=many, rank=0, max_nbytes=2**20)
    assert again.inventory().entries == [chunk_of(1)]
    found = empty_slot(many)
    assert again.read_into(chunk_of(1), found) == (CHUNK_SIZE, None)
    assert np.array_equal(found, slot_of(1, many))


def test_what_is_no_file_is_a_miss(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    for number in (1, 2, 3):
        assert put(disk, chunk_of(number), number)
        file_of(disk, chunk_of(number)).unlink()
    os.mkfifo(file_of(disk, chunk_of(1)))
    file_of(disk, chunk_of(2)).symlink_to("/dev/zero")
    shutil.rmtree(file_of(disk, chunk_of(3)).parent)
    file_of(disk, chunk_of(3)).parent.write_text("a file, no directory")
    faults = [read(disk, chunk_of(number), number).fault for number in (1, 2, 3)]
    assert faults == [ChunkFault.UNREADABLE, ChunkFault.UNREADABLE, ChunkFault.MISSING]
    disk.delete([chunk_of(1), chunk_of(2), chunk_of(3)])


def test_the_whole_directory_removed_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "root"
    disk = open_disk(root)
    assert put(disk, chunk_of(1), 1)
    shutil.rmtree(root)
    assert read(disk, chunk_of(1), 1).fault is ChunkFault.MISSING
    disk.delete([chunk_of(1)])
    disk.touch([chunk_of(1)])
    assert put(disk, chunk_of(2), 2)
    assert read(disk, chunk_of(2), 2).fault is None
    assert disk.num_files == 1
    shutil.rmtree(root)
    assert disk.inventory().entries == []
    assert put(disk, chunk_of(3), 3)


def test_a_directory_removed_under_a_writer_is_no_error(tmp_path: Path) -> None:
    disk = open_disk(tmp_path / "root")

    def remove_all() -> bool:
        shutil.rmtree(tmp_path / "root")
        return True

    assert not disk.write(chunk_of(1), CHUNK_SIZE, slot_of(1, LAYOUT), remove_all)
    assert put(disk, chunk_of(1), 1)


def test_check_finds_what_index_and_files_say_differently(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    for number in range(1, 6):
        assert put(disk, chunk_of(number), number)
    swap_bit(-1)(file_of(disk, chunk_of(1)))
    file_of(disk, chunk_of(2)).unlink()
    left = file_of(disk, chunk_of(3)).with_name(file_of(disk, chunk_of(3)).name + ".0123abcd.tmp")
    left.write_bytes(b"half")
    swap_bit(50)(file_of(disk, chunk_of(5)))
    expected = [chunk_of(number) for number in (1, 2, 3)]
    found = {(finding.kind, finding.chunk, finding.is_expected) for finding in disk.check(expected)}
    assert found == {
        (FindingKind.DAMAGED, chunk_of(1), True),
        (FindingKind.MISSING, chunk_of(2), True),
        (FindingKind.UNKNOWN, chunk_of(4), False),
        (FindingKind.DAMAGED, chunk_of(5), False),
        (FindingKind.TEMPORARY, None, False),
    }
    texts = {str(finding) for finding in disk.check(expected, repair=True)}
    assert f"damaged: {file_of(disk, chunk_of(1))}: the data is damaged (wrong checksum)" in texts
    assert names_in(disk) == [file_of(disk, chunk_of(3)).name]
    assert disk.check([chunk_of(3)]) == [] and disk.num_files == 1


def test_threads_write_read_and_delete_at_once(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    errors: list[object] = []

    def use(first: int) -> None:
        for number in range(first, first + 20):
            if not put(disk, chunk_of(number), number) or read(disk, chunk_of(number), number).fault is not None:
                errors.append(number)
            if number % 2:
                disk.delete([chunk_of(number)])

    threads = [threading.Thread(target=use, args=(100 * part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and disk.num_files == 40
    before = disk.nbytes_used
    assert len(disk.inventory().entries) == 40
    assert disk.nbytes_used == before


def test_what_is_no_slot_is_refused(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    slot = slot_of(1, LAYOUT)
    for wrong in (slot[:-1], slot.view(np.int8), slot.reshape(2, -1), np.repeat(slot, 2)[::2]):
        with pytest.raises(LayoutError, match=f"a slot of {slot.nbytes} contiguous bytes is needed"):
            disk.write(chunk_of(1), CHUNK_SIZE, wrong, lambda: True)
        with pytest.raises(LayoutError):
            disk.read_into(chunk_of(1), wrong)
    with pytest.raises(LayoutError, match="1 to 16 tokens; got 17"):
        disk.write(chunk_of(1), 17, slot, lambda: True)
    assert names_in(disk) == []


def test_calls_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    disk = RankDisk.open(tmp_path, owner=OWNER, layout=LAYOUT, rank=0, max_nbytes=2**20)
    with pytest.raises(ProtocolError, match="inventory"):
        put(disk, chunk_of(1), 1)
    disk.close()
    disk.close()
    for call in (disk.inventory, lambda: read(disk, chunk_of(1), 1), lambda: disk.check([]), lambda: disk.delete([])):
        with pytest.raises(ClosedError, match=str(disk.directory)):
            call()
    with pytest.raises(LayoutError, match="rank 1 holds no chunks"):
        RankDisk.open(tmp_path, owner=OWNER, layout=layout_of(placement=Placement.FIRST_RANK), rank=1, max_nbytes=0)
