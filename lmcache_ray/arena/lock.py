"""Locks that end with their process: how everyone sees that the owner of a file lives.

A `flock` on a file of its own descriptor, exclusive or shared by several owners. It is released by the kernel at the
latest when the process ends, however it ends. Two ways of outliving it are closed here: programs that the process
starts do not inherit the descriptor (close-on-exec), and forked children close theirs at once. For the second, this
module registers one handler with `os.register_at_fork` when it is first imported; it is the module's only side effect.
(POSIX record locks need no handler, but are lost as soon as any other descriptor of the file is closed in the process.)

Plain `OSError` of opening a file passes through: callers know what the file means and translate.
"""

import fcntl
import os
import time
import weakref
from io import FileIO
from pathlib import Path
from typing import Final

_OPEN_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_MODE: Final = 0o600
_PAUSE_S: Final = 0.005
_MAX_LOST_RACES: Final = 100

OWNER_PATIENCE_S: Final = 0.1
"""How long to wait before a lock is taken for an owner's: those who only look hold it for microseconds."""


class FileLock:
    """The lock on one file, held until `release`.

    `path` is the file's present name; whoever publishes the file under another one sets it.
    """

    def __init__(self, path: Path, file: FileIO) -> None:
        """Use `lock_existing` or `lock_new`: they take the lock and make sure that `path` names the locked file."""
        self.path = path
        self._file = file
        _HELD.add(self)

    @property
    def is_held(self) -> bool:
        """False after `release`, and in a process forked from the one that took the lock."""
        return not self._file.closed

    @property
    def fd(self) -> int:
        """The descriptor of the locked file; valid while the lock is held."""
        return self._file.fileno()

    def owns_path(self) -> bool:
        """True if the lock is held and `path` still names the locked file, not a later one nor none."""
        if not self.is_held:
            return False
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def share(self) -> bool:
        """Turn an exclusive lock into a shared one. False if another came between: the lock is then released.

        The kernel gives the old lock up before it takes the new one.
        """
        try:
            fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        return True

    def unlink(self) -> bool:
        """Remove the locked file from its directory, if `path` still names it; True if it did."""
        if not self.owns_path():
            return False
        self.path.unlink(missing_ok=True)
        return True

    def release(self) -> None:
        """Give the lock up. Idempotent."""
        # Closing is enough, and in a forked child it is all that may be done: LOCK_UN there would unlock the parent.
        self._file.close()


_HELD: Final[weakref.WeakSet[FileLock]] = weakref.WeakSet()


def lock_existing(
    path: Path, *, create: bool = False, patience_s: float = 0.0, is_shared: bool = False
) -> FileLock | None:
    """Lock the file called `path`; None if another process (or this one) holds its lock for longer than `patience_s`.

    With `create`, an empty file is made if there is none. A shared lock is only kept away by an exclusive one.

    :raises OSError: if the file cannot be opened.
    """
    deadline = time.monotonic() + patience_s
    operation = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    lost_races = 0
    while lost_races < _MAX_LOST_RACES:
        lock = _lock_opened(path, _OPEN_FLAGS | (os.O_CREAT if create else 0), operation)
        if lock is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_PAUSE_S)
        elif lock.owns_path():
            return lock
        else:
            lock.release()  # it was removed or replaced between opening and locking: look again
            lost_races += 1
    return None


def lock_new(path: Path) -> FileLock | None:
    """Make `path` and lock it; None if a sweep took it for a dead file before it was locked.

    :raises OSError: if the file exists or cannot be made.
    """
    lock = _lock_opened(path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL)
    if lock is None or lock.owns_path():
        return lock
    lock.release()
    return None


def is_locked(path: Path) -> bool:
    """True if a process holds the lock on `path`; False if none does or there is no such file.

    Asks with a shared lock, so that two who ask at the same time do not take each other for the owner.
    """
    try:
        lock = _lock_opened(path, _OPEN_FLAGS, fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    if lock is None:
        return True
    lock.release()
    return False


def _lock_opened(path: Path, flags: int, operation: int = fcntl.LOCK_EX) -> FileLock | None:
    lock = FileLock(path, FileIO(os.open(path, flags, _MODE), "r+"))
    try:
        fcntl.flock(lock.fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.release()
        return None
    return lock


def _close_inherited() -> None:
    for lock in list(_HELD):
        lock.release()


os.register_at_fork(after_in_child=_close_inherited)
