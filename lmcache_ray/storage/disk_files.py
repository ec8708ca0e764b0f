"""Whole files with few system calls: written aside and named when complete, read straight into the caller's memory.

Apart from the directory's bookkeeping: here are only descriptors and bytes. Nothing is synced to the device, since a
file that a power cut leaves incomplete is found out by its checksums. `OSError` passes through, and
`storage_errors` translates it where it is known what the file means.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from typing_extensions import Buffer

from lmcache_ray.errors import StorageError

_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
# O_NONBLOCK: a pipe that somebody put in the place of a file must not keep us waiting for its other end.
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MODE: Final = 0o600
_LARGE_NBYTES: Final = 2**19  # of a file: as much is written faster into blocks that are given to it all at once
_CANNOT_GIVE: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # what filesystems without that say
_PIECE_NBYTES: Final = 2**20  # large for the kernel, small for the cache: hashing it again costs little


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Any OSError inside becomes a `StorageError`: `what` was tried, naming the place, and why it failed."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{what}: {error.strerror or error}") from error
    except UnicodeError as error:  # a name that the filesystem's encoding does not have
        raise StorageError(f"{what}: {error}") from error


def write_new(path: str, parts: Sequence[Buffer]) -> None:
    """Make the file `path` of these parts, one after the other; no file is left if that fails.

    :raises OSError: there is one already, or it cannot be written to the end.
    """
    fd = os.open(path, _WRITE_FLAGS, _MODE)
    is_complete = False
    try:
        _write_all(fd, parts)
        is_complete = True
    finally:
        try:
            os.close(fd)
        finally:
            if not is_complete:
                remove_quietly(path)


def read_start(path: str, part: Buffer) -> int:
    """Fill `part` from the start of a file; how many bytes there were for it.

    :raises OSError: the file cannot be opened or read.
    """
    fd = os.open(path, _READ_FLAGS)
    try:
        return os.preadv(fd, (part,), 0)
    finally:
        os.close(fd)


def read_whole(path: str, head: Buffer, data: memoryview, seen: Callable[[memoryview], object]) -> int:
    """Fill `head` and then `data` with a file; how many bytes it has, or one more than there is room for.

    Each piece of `data` is given to `seen` as soon as it is filled, while the processor still has it in its cache.

    :raises OSError: the file cannot be opened or read.
    """
    beyond = bytearray(1)
    nbytes, found = data.nbytes, 0
    fd = os.open(path, _READ_FLAGS)
    try:
        for start in range(0, nbytes, _PIECE_NBYTES):
            piece = data[start : start + _PIECE_NBYTES]
            before = (head,) if start == 0 else ()
            after = (beyond,) if start + _PIECE_NBYTES >= nbytes else ()
            found += os.preadv(fd, (*before, piece, *after), found)
            seen(piece)
        return found
    finally:
        os.close(fd)


def remove_quietly(path: str) -> None:
    """Remove a file that should not stay, while an error is under way that says more."""
    with suppress(OSError):
        os.unlink(path)


def _write_all(fd: int, parts: Sequence[Buffer]) -> None:
    remaining = sum(memoryview(part).nbytes for part in parts)
    if remaining >= _LARGE_NBYTES:
        _give_room(fd, remaining)
    while remaining:
        count = os.writev(fd, parts)
        remaining -= count
        if remaining:  # 2 GiB in one call at most, and less where a device is nearly full
            parts = _after(parts, count)


def _give_room(fd: int, nbytes: int) -> None:
    """Have the filesystem set so much room aside: a device that is full refuses before anything is written."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _CANNOT_GIVE:
            raise


def _after(parts: Sequence[Buffer], nbytes: int) -> list[memoryview]:
    """The same parts without their first `nbytes` bytes."""
    rest = []
    for part in parts:
        view = memoryview(part).cast("B")
        rest.append(view[nbytes:])
        nbytes = max(0, nbytes - view.nbytes)
    return [view for view in rest if view.nbytes]
