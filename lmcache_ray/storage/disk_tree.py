"""A rank's directory as names and space: which files are there, what they take, what may be added.

Apart from `disk.py`, which knows what is in the files. Every change of the directory's names is made here, together
with its record, under one lock: the counts are those of the directory whatever threads do.
"""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

from lmcache_ray.errors import ProtocolError
from lmcache_ray.storage.directory_lock import DirectoryHold
from lmcache_ray.storage.disk_files import remove_quietly
from lmcache_ray.storage.disk_names import StoredChunk, chunk_path, leaf_directory, temporary_path
from lmcache_ray.storage.disk_scan import ScannedFile, TreeScan, directory_nbytes, scan_tree
from lmcache_ray.storage.disk_space import SpaceLedger, file_nbytes_on_disk
from lmcache_ray.storage.old_layouts import OldLayouts

_SUFFIX_NBYTES: Final = 4


@dataclass(frozen=True, slots=True)
class DiskInventory:
    """What a rank's directory holds: chunks with a good head, least recently used first, and what was cleaned up.

    `num_temporary` and `num_damaged` files were removed; `old_nbytes` are those of other layouts that this rank counts;
    `num_foreign` names are not ours and were left alone.
    """

    entries: list[StoredChunk]
    num_temporary: int
    num_damaged: int
    old_nbytes: int
    num_foreign: int


class NewFile(NamedTuple):
    """A file that may be written: at `temporary`, in the directory `leaf`, until it is published as `path`."""

    chunk: StoredChunk
    path: str
    temporary: str
    leaf: str
    promised_nbytes: int


class DiskTree:
    """The directory that `hold` holds, of files of `file_nbytes` bytes. Thread-safe; OSError passes through."""

    def __init__(self, hold: DirectoryHold, old: OldLayouts, *, file_nbytes: int, max_nbytes: int) -> None:
        self._hold = hold
        self._old = old
        self._prefix = f"{hold.directory}/"
        self._file_disk_nbytes = file_nbytes_on_disk(file_nbytes)
        self._max_nbytes = max_nbytes
        self._lock = threading.Lock()
        self._ledger = SpaceLedger()
        self._being_written: set[str] = set()
        self._is_counted = False

    @property
    def nbytes_used(self) -> int:
        """Bytes of all files and directories as `du` counts them, those of other layouts included."""
        return self._ledger.nbytes + self._old.nbytes

    @property
    def num_files(self) -> int:
        """Chunk files that are there."""
        return self._ledger.num_files

    def path_of(self, chunk: StoredChunk) -> str:
        """Where the chunk's file is, if there is one."""
        return self._prefix + chunk_path(chunk)

    def scan(self) -> TreeScan:
        """What is there now. Files that are being written are not in it."""
        scan = scan_tree(str(self._hold.directory))
        with self._lock:
            scan.temporary = [path for path in scan.temporary if path not in self._being_written]
        return scan

    def count(self, is_good: Callable[[ScannedFile], bool]) -> DiskInventory:
        """Look through the directory, remove half-written files and those that are not good, and keep the limit."""
        with self._lock:
            self._hold.take()
            scan = scan_tree(str(self._hold.directory))
            temporary = [path for path in scan.temporary if path not in self._being_written]
            files = [file for file in scan.files if is_good(file)]
            damaged = {file.path for file in scan.files} - {file.path for file in files}
            for path in (*temporary, *damaged):
                _remove(path)
            self._recount(scan, files)
            self._old.claim()
            self._make_room(0)
            files.sort(key=lambda file: file.mtime_ns)
            entries = [file.chunk for file in files]
            return DiskInventory(entries, len(temporary), len(damaged), self._old.nbytes, scan.num_foreign)

    def promise(self, chunk: StoredChunk) -> NewFile | None:
        """Keep room for the chunk's file, deleting files of other layouts if need be; None if there is none.

        Ended by `settle`.
        """
        path, leaf = self.path_of(chunk), leaf_directory(chunk.key)
        with self._lock:
            if not self._is_counted:
                raise ProtocolError(f"disk directory {self._hold.directory}: inventory must be called before write")
            nbytes = self._file_disk_nbytes + self._ledger.new_directories_nbytes(leaf)
            if not self._make_room(nbytes):
                return None
            self._ledger.reserve(nbytes)
            new = NewFile(chunk, path, temporary_path(path, os.urandom(_SUFFIX_NBYTES)), leaf, nbytes)
            self._being_written.add(new.temporary)
            return new

    def hold_again(self) -> None:
        """Make the directory anew, and hold it, if somebody removed it.

        :raises DirectoryTakenError: another cluster came first in that.
        """
        with self._lock:
            if self._hold.take():  # not the directory that was counted
                scan = scan_tree(str(self._hold.directory))
                self._recount(scan, scan.files)

    def make_directory(self, new: NewFile) -> None:
        """Make the directory that the file needs: its first one, or all if somebody removed them."""
        self.hold_again()
        with self._lock:
            os.makedirs(self._prefix + new.leaf, exist_ok=True)
            for name in (new.leaf[0], new.leaf):
                self._ledger.record_directory(name, directory_nbytes(self._prefix + name))

    def publish(self, new: NewFile) -> bool:
        """Give the complete file its name; False if somebody removed it."""
        with self._lock, suppress(FileNotFoundError):
            os.rename(new.temporary, new.path)
            self._ledger.record_file(new.chunk, self._file_disk_nbytes)
            self._ledger.record_directory(new.leaf, directory_nbytes(self._prefix + new.leaf))
            return True
        return False

    def settle(self, new: NewFile, *, is_published: bool) -> None:
        """The file is published, or will not be: then nothing of it stays."""
        if not is_published:
            remove_quietly(new.temporary)
        with self._lock:
            self._being_written.discard(new.temporary)
            self._ledger.release(new.promised_nbytes)

    def delete(self, chunk: StoredChunk) -> None:
        """Delete the chunk's file, if there is one."""
        with self._lock:
            _remove(self.path_of(chunk))
            self._ledger.forget_file(chunk)

    def close(self) -> None:
        """Let the directory go, without waiting for a call that is stuck in it. Idempotent."""
        self._old.close()
        self._hold.release()

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _make_room(self, nbytes: int) -> bool:
        while not self._ledger.fits(nbytes, self._max_nbytes - self._old.nbytes):
            if not (self._old.remove_oldest() or self._remove_empty_directories()):
                return False
        return True

    def _recount(self, scan: TreeScan, files: Iterable[ScannedFile]) -> None:
        self._ledger.restart({file.chunk: file.disk_nbytes for file in files}, scan.directories)
        self._is_counted = True

    def _remove_empty_directories(self) -> bool:
        """Whether there were any. Elsewhere they stay: most will soon be needed again."""
        removed = [name for name in self._ledger.directories_deepest_first() if _remove_directory(self._prefix + name)]
        for name in removed:
            self._ledger.forget_directory(name)
        return bool(removed)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


def _remove_directory(path: str) -> bool:
    """Whether the directory was empty, or gone already."""
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
