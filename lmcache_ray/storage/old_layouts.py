"""Files of ours with another layout: nobody can read them here, so they make room for files that can be read.

They count against the limit of the rank that deletes them. Which rank that is, is decided by locks: each old directory
belongs to the first rank of the present cluster that locks it, so that no two ranks count or delete the same files,
however many ranks the old world had and wherever its ranks were. A rank prefers the directory of its own number.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lmcache_ray.arena.lock import FileLock, lock_existing
from lmcache_ray.storage.disk_names import (
    LOCK_NAME,
    fingerprint_directory,
    is_fingerprint_directory,
    parse_rank_directory,
)
from lmcache_ray.storage.disk_scan import ScannedFile, directory_nbytes, scan_tree


class OldLayouts:
    """What one rank has claimed of the directories of other layouts below `root`. Not thread-safe.

    Every method but `close` raises OSError where the filesystem does.
    """

    def __init__(self, root: Path, fingerprint: bytes, rank: int) -> None:
        self._root = root
        self._present = fingerprint_directory(fingerprint)
        self._rank = rank
        self._trees: dict[str, _OldTree] = {}
        self._newest_first: list[tuple[ScannedFile, _OldTree]] = []

    @property
    def nbytes(self) -> int:
        """What the claimed directories take."""
        return sum(tree.nbytes for tree in self._trees.values())

    def claim(self) -> None:
        """Take the directories that no other rank has, and sweep what was only half written in them."""
        for path in sorted(self._directories(), key=self._preference):
            if str(path) not in self._trees:
                lock = lock_existing(path / LOCK_NAME, create=True)
                if lock is not None:
                    tree = _OldTree(path, lock)
                    self._trees[str(path)] = tree
                    self._newest_first += [(file, tree) for file in tree.sweep()]
        self._newest_first.sort(key=lambda item: item[0].mtime_ns, reverse=True)
        self._drop_empty()

    def remove_oldest(self) -> bool:
        """Delete the file that was not used for longest; False if there is none."""
        if not self._newest_first:
            return False
        file, tree = self._newest_first[-1]
        tree.remove(file)
        self._newest_first.pop()
        self._drop_empty()
        return True

    def close(self) -> None:
        """Leave what is there to others. Idempotent."""
        for tree in list(self._trees.values()):
            tree.lock.release()

    def _directories(self) -> Iterator[Path]:
        for layout in os.listdir(self._root):
            if is_fingerprint_directory(layout) and layout != self._present:
                with suppress(FileNotFoundError, NotADirectoryError):
                    for name in os.listdir(self._root / layout):
                        path = self._root / layout / name
                        if parse_rank_directory(name) is not None and path.is_dir() and not path.is_symlink():
                            yield path

    def _preference(self, path: Path) -> tuple[bool, str]:
        return parse_rank_directory(path.name) != self._rank, str(path)

    def _drop_empty(self) -> None:
        for name, tree in list(self._trees.items()):
            if tree.num_files == 0:
                tree.discard()
                del self._trees[name]


class _OldTree:
    """One old rank directory, locked."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.lock = lock
        self.nbytes = 0
        self.num_files = 0
        self._path = path
        self._directories: dict[str, int] = {}

    def sweep(self) -> list[ScannedFile]:
        """The chunk files that are there, once temporary files and empty directories are gone."""
        scan = scan_tree(str(self._path))
        for temporary in scan.temporary:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        self._directories = scan.directories
        # The layout's own directory is counted with each of its ranks': too much rather than too little.
        self.nbytes = directory_nbytes(str(self._path.parent)) + sum(scan.directories.values())
        self.nbytes += sum(file.disk_nbytes for file in scan.files)
        self.num_files = len(scan.files)
        for name in sorted(scan.directories, key=len, reverse=True):
            self._remove_if_empty(name)
        return scan.files

    def remove(self, file: ScannedFile) -> None:
        with suppress(FileNotFoundError):
            os.unlink(file.path)
        self.nbytes -= file.disk_nbytes
        self.num_files -= 1
        leaf = os.path.relpath(os.path.dirname(file.path), self._path)
        if self._remove_if_empty(leaf):
            self._remove_if_empty(leaf[0])

    def discard(self) -> None:
        """Remove the directory, unless foreign files are in it, and let it go."""
        self.lock.unlink()
        self.lock.release()
        for path in (self._path, self._path.parent):
            with suppress(OSError):  # others' files are in it
                path.rmdir()

    def _remove_if_empty(self, name: str) -> bool:
        if not name:
            return False  # the lock file is in it
        try:
            os.rmdir(self._path / name)
        except OSError:
            return False
        self.nbytes -= self._directories.pop(name, 0)
        return True
