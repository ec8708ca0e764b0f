"""A mapping for one reader: it shows the file, and what is written into it stays in it."""

import ctypes
import gc
import resource
from pathlib import Path

import pytest

from lmcache_ray.arena.copy_on_write import MAX_IDLE_MAPS, CopyOnWriteMap, CopyOnWriteMaps
from lmcache_ray.errors import ArenaError

PAGE = 4096


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "arena"
    path.write_bytes(b"\x05" * 2 * PAGE)
    return path


def shown(mapping: CopyOnWriteMap, offset: int) -> int:
    return ctypes.string_at(mapping.address + offset, 1)[0]


def test_what_others_write_into_the_file_is_seen_and_what_is_written_here_is_not_seen_by_others(file: Path) -> None:
    with file.open("r+b") as opened:
        mine, other = CopyOnWriteMap(opened.fileno(), 2 * PAGE), CopyOnWriteMap(opened.fileno(), 2 * PAGE)
        opened.write(b"\x06")
    assert (shown(mine, 0), shown(mine, PAGE)) == (6, 5), "also after the descriptor was closed"
    ctypes.memset(mine.address + PAGE, 9, 1)
    assert (shown(mine, PAGE), shown(other, PAGE), file.read_bytes()[PAGE]) == (9, 5, 5)


def test_it_outlives_the_file_and_ends_with_the_object(file: Path) -> None:
    with file.open("rb") as opened:
        mapping = CopyOnWriteMap(opened.fileno(), 2 * PAGE)
    file.unlink()
    assert shown(mapping, 2 * PAGE - 1) == 5
    place = f"{mapping.address:x}-"
    assert place in Path("/proc/self/maps").read_text()
    del mapping
    gc.collect()
    assert place not in Path("/proc/self/maps").read_text()


def test_what_cannot_be_mapped_is_an_error_that_says_why() -> None:
    with pytest.raises(ArenaError, match="4096 bytes of an arena: Bad file descriptor"):
        CopyOnWriteMap(-1, PAGE)


@pytest.mark.parametrize("offset", [0, PAGE - 1, PAGE, 3 * PAGE - 1])
def test_a_written_page_is_found_wherever_it_is(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "arena"
    path.write_bytes(b"\x05" * 4 * PAGE)
    with path.open("r+b") as opened:
        mapping = CopyOnWriteMap(opened.fileno(), 4 * PAGE)
        assert not mapping.is_written([range(4 * PAGE)]), "no page is there yet"
        assert [shown(mapping, number * PAGE) for number in range(4)] == [5] * 4
        opened.write(b"\x06")
        opened.flush()
        assert not mapping.is_written([range(4 * PAGE)]), "written by another"
    ctypes.memset(mapping.address + offset, 5, 1)
    assert mapping.is_written([range(2 * PAGE, 3 * PAGE), range(2 * PAGE)])
    assert mapping.is_written([range(offset, offset + 1)])
    assert not mapping.is_written([range(3 * PAGE, 4 * PAGE)])
    assert not mapping.is_written([])


def test_a_mapping_counts_as_written_where_the_page_table_cannot_be_read(file: Path) -> None:
    with file.open("rb") as opened:
        mapping = CopyOnWriteMap(opened.fileno(), 2 * PAGE)
    assert not mapping.is_written([range(2 * PAGE)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # nothing can be opened now
    try:
        assert mapping.is_written([range(2 * PAGE)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_few_unwritten_mappings_wait_for_the_next_reader(file: Path) -> None:
    with file.open("rb") as opened:
        maps = CopyOnWriteMaps(lambda: CopyOnWriteMap(opened.fileno(), 2 * PAGE))
        taken = [maps.take() for _ in range(MAX_IDLE_MAPS + 1)]
        places = [mapping.address for mapping in taken]
        ctypes.memset(places[0] + PAGE, 9, 1)
        while taken:
            maps.give_back(taken.pop(), [range(2 * PAGE)])
        again = [maps.take() for _ in range(MAX_IDLE_MAPS)]
        assert sorted(mapping.address for mapping in again) == sorted(places[1:])
        assert [shown(mapping, PAGE) for mapping in again] == [5] * MAX_IDLE_MAPS
        maps.take()


def test_readers_have_so_many_mappings_and_no_more(file: Path) -> None:
    with file.open("rb") as opened:
        maps = CopyOnWriteMaps(lambda: CopyOnWriteMap(opened.fileno(), 2 * PAGE), max_maps=3)
        taken = [maps.take() for _ in range(3)]
        with pytest.raises(ArenaError, match="3 mappings of an arena are in readers' hands"):
            maps.take()
        maps.give_back(taken.pop(), [])
        taken.append(maps.take())
        ctypes.memset(taken[0].address, 9, 1)
        maps.give_back(taken.pop(0), [range(PAGE)])  # it is written, and so it ends
        assert shown(maps.take(), 0) == 5
