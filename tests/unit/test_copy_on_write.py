"""A mapping for one reader: it shows the file, and what is written into it stays in it."""

import ctypes
import gc
from pathlib import Path

import pytest

from lmcache_ray.arena.copy_on_write import CopyOnWriteMap
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
