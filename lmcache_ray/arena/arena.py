"""The owner's side of an arena: making the file, taking it over, keeping it alive, removing it.

A file is made under a temporary name and becomes an arena by getting its published name, complete and locked. From
then on it is never truncated and only the holder of its lock unlinks it; so whoever opens the name gets a whole
arena, and whoever has mapped one keeps it.
"""

import errno
import os
import platform
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Final

from lmcache_ray.arena.header import OWNER_OFFSET, ArenaHeader, pack_header, pack_owner, unpack_owner
from lmcache_ray.arena.lock import OWNER_PATIENCE_S, FileLock, lock_existing, lock_new
from lmcache_ray.arena.mapped import ArenaMap, read_header
from lmcache_ray.arena.memory_order import warn_if_unordered
from lmcache_ray.arena.names import arena_path, temporary_path
from lmcache_ray.arena.process import boot_id, current_owner
from lmcache_ray.arena.slots import ArenaSlots
from lmcache_ray.arena.spec import HEADER_NBYTES, ArenaSpec
from lmcache_ray.errors import ArenaError, ArenaLockedError, CapacityError, ClosedError

_NO_SPACE: Final = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.ENOMEM)
_MAX_ATTEMPTS: Final = 100  # each lost to another process that swept or published in the same instant


class Arena:
    """One rank's arena, owned by this process: it holds the file's lock until `close` or its end.

    Keep it for as long as its slots are used: dropped unclosed, it gives its lock up with a ResourceWarning.
    `now` is everywhere the time of day in seconds since the Unix epoch.
    """

    def __init__(self, lock: FileLock, mapped: ArenaMap) -> None:
        """Use `create` or `attach`."""
        self._lock = lock
        self._mapped = mapped
        warn_if_unordered(platform.machine(), mapped.path)

    @classmethod
    def create(cls, spec: ArenaSpec, directory: str | Path, *, node_id: str, now: float) -> "Arena":
        """Make a new, empty arena and publish it. One of the same name whose owner is dead is replaced.

        All memory is reserved here: a sparse file would kill its users when the directory fills up.

        :raises ArenaLockedError: a living process owns the arena of that name.
        :raises CapacityError: the directory cannot hold it; the message names both sizes.
        :raises ArenaError: the directory cannot be used.
        """
        path = arena_path(directory, spec.namespace, spec.name, spec.rank)
        header = ArenaHeader(spec, boot_id(), current_owner(node_id), now)
        try:
            with ExitStack() as undo:
                _remove_dead(path)
                lock = _lock_temporary(path)
                undo.callback(lock.release)
                with ExitStack() as temporary:
                    temporary.callback(lock.unlink)
                    _reserve(lock, spec)
                    os.pwrite(lock.fd, pack_header(header), 0)
                    _publish(lock, path)
                    temporary.pop_all()
                undo.callback(lock.unlink)
                arena = cls(lock, ArenaMap.open(path, expected_fingerprint=spec.fingerprint))
                undo.pop_all()
                return arena
        except ArenaError:
            raise
        except OSError as error:
            raise ArenaError(f"cannot make arena {path}: {error}") from error

    @classmethod
    def attach(cls, spec: ArenaSpec, directory: str | Path, *, node_id: str, now: float) -> "Arena":
        """Take over the arena of a dead owner of this node, with every chunk that was committed in it.

        Slots with a damaged record become FREE and keep their generation. Unfinished writes stay as they are, since
        clients write, too.

        :raises ArenaLockedError: a living process owns it.
        :raises ArenaError: there is none, it cannot be trusted, it was made before the last boot or on another node, or
            it is not of this `spec`; the file is left as it was.
        """
        path = arena_path(directory, spec.namespace, spec.name, spec.rank)
        try:
            with ExitStack() as undo:
                lock = lock_existing(path, patience_s=OWNER_PATIENCE_S)
                if lock is None:
                    raise _locked_error(path)
                undo.callback(lock.release)
                _check_same(read_header(lock.fd, path), spec, path, node_id)
                mapped = ArenaMap.open(path, expected_fingerprint=spec.fingerprint)
                mapped.slots.free_damaged()
                os.pwrite(lock.fd, pack_owner(current_owner(node_id)), OWNER_OFFSET)
                mapped.beat(now)
                undo.pop_all()
                return cls(lock, mapped)
        except ArenaError:
            raise
        except OSError as error:
            raise ArenaError(f"cannot attach to arena {path}: {error}") from error

    @classmethod
    def attach_or_create(cls, spec: ArenaSpec, directory: str | Path, *, node_id: str, now: float) -> "Arena":
        """`attach` if there is an arena that can be taken over, else `create`, which replaces one that cannot.

        :raises ArenaLockedError: a living process owns the arena of that name.
        """
        try:
            return cls.attach(spec, directory, node_id=node_id, now=now)
        except ArenaLockedError:
            raise
        except ArenaError:
            return cls.create(spec, directory, node_id=node_id, now=now)

    @property
    def path(self) -> Path:
        """Where the arena is published."""
        return self._mapped.path

    @property
    def spec(self) -> ArenaSpec:
        """What the arena is."""
        return self._mapped.spec

    @property
    def slots(self) -> ArenaSlots:
        """The slots.

        :raises ClosedError: after `close`, and in a process forked from the owner.
        """
        return self._owned().slots

    @property
    def is_closed(self) -> bool:
        """True after `close`, and in a process forked from the owner."""
        return not self._lock.is_held

    def heartbeat(self, now: float) -> None:
        """Record that the owner lives: a restart may come within the restart window after the last one.

        :raises ClosedError: after `close`.
        """
        self._owned().beat(now)

    def prefault(self) -> bool:
        """Make every page present; see `ArenaMap.prefault`.

        :raises ClosedError: after `close`.
        """
        return self._owned().prefault()

    def close(self, *, unlink: bool = True) -> None:
        """Give the arena up, and unless `unlink` is False remove its file. Idempotent.

        To be called after the last writer has stopped: with ``unlink=False`` a successor may own the file next.
        In a process forked from the owner it only lets the mapping go.
        """
        if unlink:
            self._lock.unlink()
        self._mapped.close()
        self._lock.release()

    def __enter__(self) -> "Arena":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _owned(self) -> ArenaMap:
        if self.is_closed:
            raise ClosedError(f"arena {self.path} was closed, or is owned by the process that this one was forked from")
        return self._mapped


def _remove_dead(path: Path) -> None:
    """Unlink the arena called `path`, if there is one, unless a living process owns it."""
    try:
        lock = lock_existing(path, patience_s=OWNER_PATIENCE_S)
    except FileNotFoundError:
        return
    if lock is None:
        raise _locked_error(path)
    lock.unlink()
    lock.release()


def _lock_temporary(path: Path) -> FileLock:
    for _ in range(_MAX_ATTEMPTS):
        lock = lock_new(temporary_path(path, os.urandom(4)))
        if lock is not None:
            return lock
    raise ArenaError(f"cannot make arena {path}: its temporary file was removed {_MAX_ATTEMPTS} times")


def _reserve(lock: FileLock, spec: ArenaSpec) -> None:
    nbytes, directory = spec.geometry.file_nbytes, lock.path.parent
    disk = os.statvfs(directory)
    available = disk.f_bavail * disk.f_frsize
    try:
        os.posix_fallocate(lock.fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise CapacityError(
            f"the arena of rank {spec.rank} needs {nbytes} bytes, of which {directory} could not reserve all "
            f"({available} bytes were free): {error.strerror}"
        ) from error


def _publish(lock: FileLock, path: Path) -> None:
    # A link instead of a rename: of two that publish at once the second must fail, not replace the living first.
    for _ in range(_MAX_ATTEMPTS):
        try:
            os.link(lock.path, path)
        except FileExistsError:
            _remove_dead(path)
            continue
        lock.unlink()
        lock.path = path
        return
    raise ArenaError(f"cannot publish arena {path}: others did so {_MAX_ATTEMPTS} times and died")


def _check_same(header: ArenaHeader, spec: ArenaSpec, path: Path, node_id: str) -> None:
    differing = [
        f"{field.name} is {getattr(header.spec, field.name)!r}, not {getattr(spec, field.name)!r}"
        for field in fields(spec)
        if getattr(header.spec, field.name) != getattr(spec, field.name)
    ]
    if differing:
        raise ArenaError(f"arena {path} is another one than wanted: {'; '.join(differing)}")
    if header.owner.node_id != node_id:
        raise ArenaError(f"arena {path} is of node {header.owner.node_id!r}, not of {node_id!r}")
    if header.boot_id != boot_id():
        raise ArenaError(f"arena {path} was made before the last boot of this machine: its memory cannot be trusted")


def _locked_error(path: Path) -> ArenaLockedError:
    try:
        with path.open("rb") as file:
            owner = unpack_owner(file.read(HEADER_NBYTES), str(path))
    except OSError:
        return ArenaLockedError(f"arena {path} is owned by another living process")
    return ArenaLockedError(f"arena {path} is owned by process {owner.pid} on node {owner.node_id!r}, which lives")
