"""One rank's chunks on disk: writing, reading and deleting files that it is told to, within a limit that it keeps.

The directory decides nothing. What to write, read and delete is the coordinator's to say, and a file counts for the
world only when every rank has confirmed it. Two things a rank does by itself: it refuses to exceed its limit, and makes
room by deleting files of other layouts, oldest first. `disk_names.py` draws the tree, `chunk_format.py` a file.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from lmcache_ray.errors import ClosedError, DamagedChunkError, LayoutError, StorageError
from lmcache_ray.layout import WorldLayout
from lmcache_ray.storage.chunk_format import RankHeads
from lmcache_ray.storage.chunk_frame import DataChecksum, open_frame
from lmcache_ray.storage.directory_lock import DirectoryHold, DirectoryOwner
from lmcache_ray.storage.disk_check import DiskFinding, find_contradictions
from lmcache_ray.storage.disk_files import read_start, read_whole, remove_quietly, storage_errors, write_new
from lmcache_ray.storage.disk_names import PROBE_NAME, StoredChunk, rank_directory
from lmcache_ray.storage.disk_scan import ScannedFile
from lmcache_ray.storage.disk_space import BLOCK_NBYTES
from lmcache_ray.storage.disk_tree import DiskInventory, DiskTree, NewFile
from lmcache_ray.storage.faults import ChunkFault, ReadResult
from lmcache_ray.storage.old_layouts import OldLayouts

__all__ = ("DirectoryOwner", "DiskFinding", "DiskInventory", "RankDisk", "StoredChunk")

_MAX_LOST_RACES: Final = 4  # with a delete that removes the directory just made, or with somebody's rm -rf
_OF_THE_PLACE: Final = frozenset(
    (errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT)
)
"""Errors that say nothing of a file that could not be read: it may be as good as ever."""


class RankDisk:
    """The disk directory of one rank, from `open` until `close` or the end of the process. Thread-safe.

    `data` is always one slot: contiguous uint8 [slot_nbytes], which may lie in an arena. Calls after `close` raise
    `ClosedError`. `inventory` comes first.
    """

    def __init__(self, hold: DirectoryHold, layout: WorldLayout, rank: int, max_nbytes: int) -> None:
        """Use `open`."""
        self.directory: Final = hold.directory
        self._heads = RankHeads(layout, rank)
        self._slot_nbytes = layout.ranks[rank].slot_nbytes
        self._tree = DiskTree(
            hold,
            OldLayouts(hold.root, layout.fingerprint, rank),
            file_nbytes=self._heads.nbytes + self._slot_nbytes,
            max_nbytes=max_nbytes,
        )
        self._is_closed = False

    @classmethod
    def open(
        cls, root: str | Path, *, owner: DirectoryOwner, layout: WorldLayout, rank: int, max_nbytes: int
    ) -> "RankDisk":
        """Make and lock the directory of `rank` below `root`, which all ranks of the cluster on a node may share.

        :raises DirectoryTakenError: the root belongs to another living cluster.
        :raises StorageError: the directory cannot be used; the message names it and says why.
        """
        if rank not in layout.holders:
            raise LayoutError(f"rank {rank} holds no chunks and needs no disk directory; {layout.holders} hold them")
        hold = DirectoryHold(Path(root), Path(root) / rank_directory(layout.fingerprint, rank), owner)
        try:
            with storage_errors(f"cannot use disk directory {hold.directory}"):
                hold.take()
        except StorageError:
            hold.release()
            raise
        return cls(hold, layout, rank, max_nbytes)

    @property
    def nbytes_used(self) -> int:
        """Bytes of all files and directories as `du` counts them, those of other layouts included."""
        return self._tree.nbytes_used

    @property
    def num_files(self) -> int:
        """Chunk files that are there."""
        return self._tree.num_files

    def inventory(self) -> DiskInventory:
        """Look through the directory, sweep what is half written or has a bad head, and keep the limit.

        Reads names, sizes and heads; the data is proven when it is read. May be called again at any time.

        :raises DirectoryTakenError: the root was removed, and another cluster came first in making it anew.
        :raises StorageError: the directory cannot be read or swept.
        """
        self._check_open()
        with storage_errors(f"cannot look through disk directory {self.directory}"):
            return self._tree.count(self._has_good_head)

    def write(self, chunk: StoredChunk, num_tokens: int, data: np.ndarray, is_intact: Callable[[], bool]) -> bool:
        """Make the chunk's file of `data`; False, and no file, if `is_intact` says so or the limit does.

        `is_intact` is asked after the last byte was read: whether the slot still holds what it held before.

        :raises DirectoryTakenError: as `inventory`.
        :raises StorageError: the filesystem refuses; no file is left.
        """
        self._check_open()
        slot = self._bytes_of(data)
        with storage_errors(f"cannot write {self._tree.path_of(chunk)}"):
            new = self._tree.promise(chunk)
            if new is None:
                return False
            is_published = False
            try:
                head = self._heads.pack(chunk.key, chunk.generation, num_tokens, slot)
                self._write_aside(new, head, slot)
                is_published = is_intact() and self._tree.publish(new)
            finally:
                self._tree.settle(new, is_published=is_published)
        return is_published

    def read_into(self, chunk: StoredChunk, data: np.ndarray) -> ReadResult:
        """Read the chunk straight into `data` and prove every byte. With a fault, `data` holds garbage.

        :raises StorageError: for a reason that says nothing of the file, such as too many open files.
        """
        self._check_open()
        slot = self._bytes_of(data)
        try:
            return ReadResult(self._read(chunk, slot))
        except (FileNotFoundError, NotADirectoryError):
            return ReadResult(0, ChunkFault.MISSING)
        except (DamagedChunkError, IsADirectoryError):
            return ReadResult(0, ChunkFault.DAMAGED)
        except OSError as error:
            if error.errno in _OF_THE_PLACE:
                raise StorageError(f"cannot read {self._tree.path_of(chunk)}: {error.strerror}") from error
            return ReadResult(0, ChunkFault.UNREADABLE)

    def touch(self, chunks: Iterable[StoredChunk]) -> None:
        """Note on the files that they are used now, one after the other, so that the order of use survives a restart.

        Best effort.
        """
        now_ns = time.time_ns()  # the filesystem's own clock has steps of milliseconds
        for place, chunk in enumerate(chunks):
            with suppress(OSError):
                os.utime(self._tree.path_of(chunk), ns=(now_ns + place, now_ns + place))

    def delete(self, chunks: Iterable[StoredChunk]) -> None:
        """Delete these chunks' files; those that are missing are fine.

        :raises StorageError: some could not be deleted; all others were.
        """
        self._check_open()
        failures: list[OSError] = []
        for chunk in chunks:
            try:
                self._tree.delete(chunk)
            except OSError as error:
                failures.append(error)
        if failures:
            raise StorageError(f"cannot delete {len(failures)} files, the first: {failures[0]}") from failures[0]

    def probe(self) -> None:
        """Write and remove a small file, and see that there is room for a chunk. A removed directory is made anew.

        :raises StorageError: a chunk could not be written now; the message says why.
        """
        self._check_open()
        path = str(self.directory / PROBE_NAME)
        with storage_errors(f"cannot write in disk directory {self.directory}"):
            self._tree.hold_again()
            remove_quietly(path)
            write_new(path, (bytes(BLOCK_NBYTES),))
            os.unlink(path)
            space = os.statvfs(self.directory)
            if space.f_bavail * space.f_frsize < self._slot_nbytes + BLOCK_NBYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def check(self, expected: Iterable[StoredChunk], *, repair: bool = False) -> list[DiskFinding]:
        """Read every file to its last byte and compare with the chunks that should be there.

        With `repair`, files that are damaged, unknown or half written are deleted afterwards. A chunk that is written
        or deleted meanwhile may be found unknown or missing: check when nothing is written.

        :raises StorageError: the directory cannot be read, or a file not be deleted.
        """
        self._check_open()
        slot = memoryview(bytearray(self._slot_nbytes))
        with storage_errors(f"cannot check disk directory {self.directory}"):
            findings = list(
                find_contradictions(
                    self._tree.scan(),
                    expected,
                    path_of=self._tree.path_of,
                    read=lambda chunk: self._read(chunk, slot),
                )
            )
            if repair:
                self._repair(findings)
        return findings

    def close(self) -> None:
        """Let the directory go; its files stay. Idempotent, and never waits for a call that is stuck in it."""
        self._is_closed = True
        self._tree.close()

    def _read(self, chunk: StoredChunk, data: memoryview) -> int:
        """The chunk's tokens. Raises OSError or `DamagedChunkError`."""
        head, checksum = bytearray(self._heads.nbytes), DataChecksum()
        nbytes = read_whole(self._tree.path_of(chunk), head, data, checksum.add)
        return self._heads.num_tokens_of(head, chunk.key, chunk.generation, nbytes, checksum)

    def _has_good_head(self, file: ScannedFile) -> bool:
        head = bytearray(self._heads.nbytes)
        try:
            read_start(file.path, head)
            self._heads.check_frame(open_frame(head, file.nbytes), file.chunk.key, file.chunk.generation)
        except DamagedChunkError:
            return False
        except OSError as error:
            if error.errno in _OF_THE_PLACE:
                raise
            return False
        return True

    def _write_aside(self, new: NewFile, head: bytes, data: memoryview) -> None:
        for _ in range(_MAX_LOST_RACES):
            try:
                write_new(new.temporary, (head, data))
                return
            except FileNotFoundError:  # a directory's first file, or the directory was removed
                self._tree.make_directory(new)
        write_new(new.temporary, (head, data))

    def _repair(self, findings: Iterable[DiskFinding]) -> None:
        for finding in findings:
            if finding.chunk is not None:
                self._tree.delete(finding.chunk)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(finding.path)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"disk directory {self.directory} was closed")

    def _bytes_of(self, data: np.ndarray) -> memoryview:
        if data.dtype != np.uint8 or data.shape != (self._slot_nbytes,) or not data.flags.c_contiguous:
            raise LayoutError(
                f"a slot of {self._slot_nbytes} contiguous bytes is needed; got {data.dtype} {list(data.shape)}"
            )
        return data.data
