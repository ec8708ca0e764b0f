"""One cluster per disk directory, one process per rank's part of it: two locks that say whose the files are.

All ranks of a cluster hold the lock of the root together. The lock file's text names the cluster. It counts only while
somebody holds the lock, and is written only by one who has it alone: the first rank, which then shares it with the
others. `kill -9` ends it as any end does. Below the root each rank locks its own part for itself, so that a rank that
was restarted does not write beside its predecessor.
"""

import errno
import json
import os
import time
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from lmcache_ray.arena.lock import OWNER_PATIENCE_S, FileLock, lock_existing
from lmcache_ray.errors import ClosedError, DirectoryTakenError, StorageError
from lmcache_ray.storage.disk_names import LOCK_NAME

_PAUSE_S: Final = 0.005
PREDECESSOR_PATIENCE_S: Final = 2.0
"""How long a process of the same rank that is just ending is waited for."""
FIRST_RANK_PATIENCE_S: Final = 10.0
"""How long whoever has the root's lock alone is waited for: it only writes its name, but a machine may be busy."""
_MAX_RECORD_NBYTES: Final = 4096


class _Obstacle(Enum):
    """Why the root's lock could not be shared just now."""

    FIRST_RANK = "somebody has it alone, who is about to share it"
    OTHERS = "those who share it are not ours, or only look, which takes an instant"


@dataclass(frozen=True, slots=True)
class DirectoryOwner:
    """A cluster that uses a directory. `life` is random text, new for each life and equal for all ranks."""

    namespace: str
    name: str
    life: str


class DirectoryHold:
    """Both locks of one rank, on the root and on `directory` below it. Not thread-safe.

    The directories may be removed at any time, and the locks with them: `take` makes and locks them anew.
    """

    def __init__(
        self, root: Path, directory: Path, owner: DirectoryOwner, *, patience_s: float = PREDECESSOR_PATIENCE_S
    ) -> None:
        self.root = root
        self.directory = directory
        self._owner = owner
        self._patience_s = patience_s
        self._cluster: FileLock | None = None
        self._rank: FileLock | None = None
        self._is_released = False

    def take(self) -> bool:
        """Make the directories that are missing and hold both locks; True if the rank's part was not held before.

        :raises DirectoryTakenError: the directory belongs to another living cluster.
        :raises StorageError: another living process has the rank's part.
        :raises OSError: the filesystem refuses.
        """
        if self._is_released:
            raise ClosedError(f"disk directory {self.directory} was closed")
        if self.root.exists() and not self.root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self.root))
        self.root.mkdir(parents=True, exist_ok=True)
        if self._cluster is None or not self._cluster.owns_path():
            _release(self._cluster)
            self._cluster = lock_directory(self.root, self._owner)
        self.directory.parent.mkdir(exist_ok=True)
        self.directory.mkdir(mode=0o700, exist_ok=True)
        if self._rank is not None and self._rank.owns_path():
            return False
        _release(self._rank)
        self._rank = lock_existing(self.directory / LOCK_NAME, create=True, patience_s=self._patience_s)
        if self._rank is None:
            raise StorageError(f"disk directory {self.directory} is in use by another process of this cluster")
        return True

    def release(self) -> None:
        """Give both locks up. Idempotent."""
        self._is_released = True
        _release(self._rank)
        _release(self._cluster)


def lock_directory(root: Path, owner: DirectoryOwner, *, patience_s: float = OWNER_PATIENCE_S) -> FileLock:
    """Take part in the lock on `root`, which exists, for a rank of `owner`. Held until it is released.

    :raises DirectoryTakenError: another living cluster has the directory.
    :raises OSError: the lock file cannot be made or written.
    """
    path = root / LOCK_NAME
    patience = {_Obstacle.OTHERS: patience_s, _Obstacle.FIRST_RANK: FIRST_RANK_PATIENCE_S}
    since, last = time.monotonic(), None
    while True:
        found = _attempt(path, owner)
        if isinstance(found, FileLock):
            return found
        if found is not last:
            since, last = time.monotonic(), found
        if time.monotonic() - since >= patience[found]:
            raise DirectoryTakenError(_refusal(root, path))
        time.sleep(_PAUSE_S)


def _release(lock: FileLock | None) -> None:
    if lock is not None:
        lock.release()


def _attempt(path: Path, owner: DirectoryOwner) -> FileLock | _Obstacle:
    lock = lock_existing(path, create=True)
    if lock is not None:
        _write_record(lock, owner)
        if not lock.share():
            return _Obstacle.FIRST_RANK
    else:
        lock = lock_existing(path, create=True, is_shared=True)
        if lock is None:
            return _Obstacle.FIRST_RANK
    # Also after sharing one's own: between the two locks another cluster may have been here.
    if _read_record(lock.fd).get("life") == owner.life:
        return lock
    lock.release()
    return _Obstacle.OTHERS


def _write_record(lock: FileLock, owner: DirectoryOwner) -> None:
    record = json.dumps(asdict(owner) | {"pid": os.getpid()}).encode() + b"\n"
    try:
        # Over the old text, then cut: on a full disk a file that has a block already can still be written.
        os.pwrite(lock.fd, record, 0)
        os.ftruncate(lock.fd, len(record))
    except OSError:
        lock.release()
        raise


def _read_record(fd: int) -> dict[str, object]:
    """What the lock file says; empty if it is not what we write."""
    try:
        record = json.loads(os.pread(fd, _MAX_RECORD_NBYTES, 0))
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _refusal(root: Path, path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        record = _read_record(fd)
    finally:
        os.close(fd)
    name = "{}/{}".format(record.get("namespace", "?"), record.get("name", "?"))
    return (
        f"disk directory {root} belongs to the living cluster {name!r} (process {record.get('pid', '?')} came first): "
        "give each cluster a local_disk of its own"
    )
