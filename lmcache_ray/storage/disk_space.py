"""Arithmetic of real bytes on disk: what files and directories take, what fits in a limit, what is taken now. Pure.

The limit holds for what `du` says of a rank's tree, so every file counts as whole blocks and directories count too.
"""

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

from lmcache_ray.layout import WorldLayout
from lmcache_ray.storage.chunk_format import RankHeads
from lmcache_ray.storage.disk_names import LEAF_DIGITS, StoredChunk

BLOCK_NBYTES: Final = 4096
"""What the usual filesystems give to a file or a directory in one piece."""
SPARE_NBYTES: Final = 16 * BLOCK_NBYTES
"""Kept free: for the root, the layout's directory, the lock files, and for directories that grow as they are used."""

_ENTRY_NBYTES: Final = 256  # of a directory for one file, in a directory whose blocks are half full
_SECTOR_NBYTES: Final = 512


def file_nbytes_on_disk(nbytes: int) -> int:
    """What a file of `nbytes` bytes takes: whole blocks."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


def allocated_nbytes(num_sectors: int) -> int:
    """What the filesystem says that it gave, from `st_blocks`."""
    return num_sectors * _SECTOR_NBYTES


def chunk_file_nbytes(layout: WorldLayout, rank: int) -> int:
    """The length of every chunk file of a rank."""
    return RankHeads(layout, rank).nbytes + layout.ranks[rank].slot_nbytes


def disk_capacity(max_nbytes: int, layout: WorldLayout, rank: int) -> int:
    """How many chunks of `rank` fit into a limit of `max_nbytes` whatever their keys are, files being written included.

    With so many, `du` of the rank's tree is never above the limit, and `RankDisk.write` never refuses.
    """
    each = file_nbytes_on_disk(chunk_file_nbytes(layout, rank)) + _ENTRY_NBYTES
    most = max(0, max_nbytes) // each
    return max(0, bisect_right(range(most + 1), max_nbytes, key=lambda count: _tree_nbytes(count, each)) - 1)


def _tree_nbytes(num_chunks: int, each_nbytes: int) -> int:
    """The most that a tree of so many chunks takes, each in a directory of its own as long as there are any."""
    num_digits = len(LEAF_DIGITS)
    num_directories = 1 + min(num_chunks, num_digits) + min(num_chunks, num_digits**2)
    return SPARE_NBYTES + num_directories * BLOCK_NBYTES + num_chunks * each_nbytes


class SpaceLedger:
    """What a rank's tree takes: every file and directory of ours, and what is promised to files being written.

    Not thread-safe. Counts what it is told, so a file that vanished by another's hand counts until it is `forget`ed.
    """

    def __init__(self) -> None:
        self._files: dict[StoredChunk, int] = {}
        self._directories: dict[str, int] = {}
        self._reserved_nbytes = 0
        self._nbytes = 0

    @property
    def num_files(self) -> int:
        """Files that are there."""
        return len(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of files and directories that are there."""
        return self._nbytes

    def fits(self, nbytes: int, limit_nbytes: int) -> bool:
        """Whether so many more stay within the limit, all promises being kept."""
        return self._nbytes + self._reserved_nbytes + nbytes + SPARE_NBYTES <= limit_nbytes

    def new_directories_nbytes(self, leaf: str) -> int:
        """What the directories up to `leaf` ("x/y") will take that are not there yet."""
        return BLOCK_NBYTES * sum(name not in self._directories for name in (leaf, leaf[0]))

    def reserve(self, nbytes: int) -> None:
        """Promise room to a file that is going to be written; ended by `release`."""
        self._reserved_nbytes += nbytes

    def release(self, nbytes: int) -> None:
        """The file is written and recorded, or will not be."""
        self._reserved_nbytes -= nbytes

    def record_file(self, chunk: StoredChunk, nbytes: int) -> None:
        """The chunk's file is there and takes `nbytes`."""
        self._nbytes += nbytes - self._files.get(chunk, 0)
        self._files[chunk] = nbytes

    def record_directory(self, name: str, nbytes: int) -> None:
        """The directory ("x", "x/y", or "" for the rank's) takes `nbytes`."""
        self._nbytes += nbytes - self._directories.get(name, 0)
        self._directories[name] = nbytes

    def forget_file(self, chunk: StoredChunk) -> None:
        """The chunk's file is not there any more, if it ever was."""
        self._nbytes -= self._files.pop(chunk, 0)

    def forget_directory(self, name: str) -> None:
        """The directory is not there any more."""
        self._nbytes -= self._directories.pop(name, 0)

    def directories_deepest_first(self) -> list[str]:
        """Names of the directories below the rank's."""
        return sorted(filter(None, self._directories), key=len, reverse=True)

    def restart(self, files: Mapping[StoredChunk, int], directories: Mapping[str, int]) -> None:
        """These are all files and directories that are there. Promises stand."""
        self._files = dict(files)
        self._directories = dict(directories)
        self._nbytes = sum(self._files.values()) + sum(self._directories.values())
