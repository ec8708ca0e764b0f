"""The file by which a client of the cluster shows that it lives.

A client that owns no arena still leases chunks and writes slots. Its death has to be *proven* before a slot that it
was writing is given to another; a lock that the kernel drops with the process is such a proof on the client's node.
"""

import os
from pathlib import Path
from types import TracebackType

from lmcache_ray.arena.lock import OWNER_PATIENCE_S, FileLock, is_locked, lock_existing
from lmcache_ray.arena.names import liveness_path
from lmcache_ray.errors import ArenaError, ArenaLockedError


class LivenessFile:
    """A file that is locked from `create` until `close` or the end of this process."""

    def __init__(self, lock: FileLock) -> None:
        """Use `create`."""
        self._lock = lock

    @classmethod
    def create(cls, directory: str | Path, namespace: str, name: str, client_id: str) -> "LivenessFile":
        """Make and lock the file of `client_id`; a dead one of the same id is taken over.

        :raises ArenaLockedError: a living process has that client id.
        :raises ArenaError: the directory cannot be used.
        """
        path = liveness_path(directory, namespace, name, client_id)
        try:
            lock = lock_existing(path, create=True, patience_s=OWNER_PATIENCE_S)
            if lock is None:
                raise ArenaLockedError(f"client {client_id!r} of cluster {name!r} is already alive: {path} is locked")
            os.pwrite(lock.fd, f"pid {os.getpid()} client {client_id!r} cluster {name!r}\n".encode(), 0)
        except ArenaError:
            raise
        except OSError as error:
            raise ArenaError(f"cannot make liveness file {path}: {error}") from error
        return cls(lock)

    @staticmethod
    def is_alive(path: str | Path) -> bool:
        """True while the client that made `path` lives; False when it died or closed, also if the file is gone.

        :raises ArenaError: the file cannot be looked at, so nothing is proven.
        """
        try:
            return is_locked(Path(path))
        except OSError as error:
            raise ArenaError(f"cannot look at liveness file {path}: {error}") from error

    @property
    def path(self) -> Path:
        """Where others look for it."""
        return self._lock.path

    def close(self) -> None:
        """Remove the file. Idempotent; in a process forked from the client's it does nothing."""
        self._lock.unlink()
        self._lock.release()

    def __enter__(self) -> "LivenessFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
