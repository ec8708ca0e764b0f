"""What lies in one rank's directory: names, sizes and times, without opening a file.

Apart from `disk.py` because directories of other layouts are scanned in the same way.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache_ray.storage.disk_names import LEAF_DIGITS, LOCK_NAME, StoredChunk, parse_chunk_name
from lmcache_ray.storage.disk_space import allocated_nbytes, file_nbytes_on_disk


class ScannedFile(NamedTuple):
    """One chunk file. `nbytes` is its length, `disk_nbytes` what it takes."""

    chunk: StoredChunk
    path: str
    nbytes: int
    disk_nbytes: int
    mtime_ns: int


@dataclass(slots=True)
class TreeScan:
    """All of ours in one rank's directory. `directories` by name below it ("", "x", "x/y"), with what each takes."""

    files: list[ScannedFile] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    """Paths of files that were being written, or are."""
    directories: dict[str, int] = field(default_factory=dict)
    num_foreign: int = 0
    """Names that are not ours; what lies in directories of theirs is not looked at."""


def scan_tree(directory: str) -> TreeScan:
    """Look through `directory`. What vanishes meanwhile counts as if it had not been there.

    :raises OSError: a directory of ours cannot be read.
    """
    scan = TreeScan()
    for first in _subdirectories(scan, directory, ""):
        for leaf in _subdirectories(scan, directory, first):
            _scan_leaf(scan, directory, leaf)
    return scan


def _subdirectories(scan: TreeScan, directory: str, name: str) -> list[str]:
    """The names below `directory` of our directories in the one called `name`."""
    found = []
    for entry in _entries(scan, directory, name):
        if entry.name in LEAF_DIGITS and len(entry.name) == 1 and entry.is_dir(follow_symlinks=False):
            found.append(f"{name}/{entry.name}" if name else entry.name)
        elif name or entry.name != LOCK_NAME:
            scan.num_foreign += 1
    return found


def _scan_leaf(scan: TreeScan, directory: str, leaf: str) -> None:
    for entry in _entries(scan, directory, leaf):
        name = parse_chunk_name(leaf, entry.name)
        if name is None or not entry.is_file(follow_symlinks=False):
            scan.num_foreign += 1
        elif name.is_temporary:
            scan.temporary.append(entry.path)
        else:
            _scan_file(scan, name.chunk, entry)


def _scan_file(scan: TreeScan, chunk: StoredChunk, entry: "os.DirEntry[str]") -> None:
    try:
        stat = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    # Blocks may be given late: the length is what the file will take at least.
    taken = max(allocated_nbytes(stat.st_blocks), file_nbytes_on_disk(stat.st_size))
    scan.files.append(ScannedFile(chunk, entry.path, stat.st_size, taken, stat.st_mtime_ns))


def _entries(scan: TreeScan, directory: str, name: str) -> Iterator["os.DirEntry[str]"]:
    path = f"{directory}/{name}" if name else directory
    try:
        scan.directories[name] = directory_nbytes(path)
        with os.scandir(path) as entries:
            yield from entries
    except FileNotFoundError:
        scan.directories.pop(name, None)


def directory_nbytes(path: str) -> int:
    """What a directory itself takes. Raises OSError."""
    return allocated_nbytes(os.stat(path, follow_symlinks=False).st_blocks)
