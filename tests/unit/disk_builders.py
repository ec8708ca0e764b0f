"""Disk directories for tests, and what `du` says of them."""

import os
from pathlib import Path

from lmcache_ray.layout import WorldLayout
from lmcache_ray.storage.directory_lock import DirectoryOwner
from lmcache_ray.storage.disk import RankDisk
from lmcache_ray.storage.disk_names import StoredChunk, chunk_path
from tests.unit.stored_chunks import CHUNK_SIZE, layout_of, slot_of

OWNER = DirectoryOwner("ns", "cache", "life 1")
ROOM = 64 * 2**20


def open_disk(
    root: Path,
    *,
    rank: int = 0,
    layout: WorldLayout | None = None,
    owner: DirectoryOwner = OWNER,
    max_nbytes: int = ROOM,
) -> RankDisk:
    """A directory that was looked through already."""
    disk = RankDisk.open(root, owner=owner, layout=layout or layout_of(), rank=rank, max_nbytes=max_nbytes)
    disk.inventory()
    return disk


def put(disk: RankDisk, chunk: StoredChunk, number: int, *, layout: WorldLayout | None = None, rank: int = 0) -> bool:
    """Write the slot of that number."""
    return disk.write(chunk, CHUNK_SIZE, slot_of(number, layout or layout_of(), rank), lambda: True)


def file_of(disk: RankDisk, chunk: StoredChunk) -> Path:
    """Where the chunk's file is."""
    return disk.directory / chunk_path(chunk)


def du(*tops: Path) -> int:
    """As the program of that name counts: blocks of all files and directories, each once."""
    blocks: dict[tuple[int, int], int] = {}
    for top in tops:
        for directory, _, names in os.walk(top):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                stat = os.lstat(path)
                blocks[stat.st_dev, stat.st_ino] = stat.st_blocks
    return 512 * sum(blocks.values())


def names_in(disk: RankDisk) -> list[str]:
    """All files in the rank's directory but its lock."""
    return sorted(path.name for path in disk.directory.rglob("*") if path.is_file() and path.suffix != ".lock")
