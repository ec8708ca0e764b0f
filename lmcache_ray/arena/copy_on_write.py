"""Mappings of an arena for one reader each: they show the arena's own memory, and what is written into one stays in it.

They are what views for a user's hands are made of. Two others would also keep a stray write out of the arena: a
read-only mapping ends the process that writes, and a private one that all readers of a process share shows them what
one of them wrote as if it were cached. A private mapping for each reader does neither: a page that is written becomes
that mapping's own copy, and nobody else ever sees it.

Pages come into a new mapping as they are first read, which takes as long as copying them. So a mapping whose reader is
gone serves the next one, once the kernel's page table has said that no page of it was written.

By libc itself, because Python's `mmap` keeps a descriptor per mapping, of which a process has few, and counts the whole
file as memory that might be written.
"""

import ctypes
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from lmcache_ray.errors import ArenaError

MAX_IDLE_MAPS: Final = 2
MAX_MAPS: Final = 4096
"""Of one file. The kernel gives a process some 65,000 mappings; one that has them all cannot even start a thread."""
_MAP_NORESERVE: Final = 0x4000  # Linux on x86-64; not named by Python's mmap before 3.13
_FAILED: Final = ctypes.c_void_p(-1).value

_ENTRY_NBYTES: Final = 8  # of /proc/self/pagemap, one entry a page
_OF_FILE: Final = np.uint64(1 << 61)
_SWAPPED: Final = np.uint64(1 << 62)
_PRESENT: Final = np.uint64(1 << 63)

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


class CopyOnWriteMap:
    """The first `nbytes` bytes of a file, mapped at `address` for as long as this object lives."""

    def __init__(self, fd: int, nbytes: int) -> None:
        """`fd` need not stay open. Raises `ArenaError` if the kernel does not give a mapping."""
        self.nbytes = nbytes
        protection, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
        address: int | None = _LIBC.mmap(None, nbytes, protection, kind, fd, 0)
        if address is None or address == _FAILED:
            raise ArenaError(f"cannot map {nbytes} bytes of an arena: {os.strerror(ctypes.get_errno())}")
        self.address = address

    def is_written(self, parts: Sequence[range]) -> bool:
        """Whether any page of these bytes was written through this mapping; True as well if that cannot be told."""
        try:
            page_table = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            return any(self._is_written(page_table, part) for part in _joined(parts))
        except OSError:
            return True
        finally:
            os.close(page_table)

    def _is_written(self, page_table: int, part: range) -> bool:
        """A page that is there, and is not the file's, is a copy."""
        first, last = ((self.address + offset) // mmap.PAGESIZE for offset in (part.start, part.stop - 1))
        nbytes = (last - first + 1) * _ENTRY_NBYTES
        packed = os.pread(page_table, nbytes, first * _ENTRY_NBYTES)
        kinds = np.frombuffer(packed, dtype=np.uint64) & (_OF_FILE | _SWAPPED | _PRESENT)
        return len(packed) < nbytes or bool(((kinds == _PRESENT) | (kinds == _SWAPPED)).any())

    def __del__(self, unmap: Callable[[int, int], int] = _LIBC.munmap) -> None:
        if hasattr(self, "address"):
            unmap(self.address, self.nbytes)


class CopyOnWriteMaps:
    """The mappings of one file, made by `make`; each is in one reader's hands at a time. Thread-safe without locks.

    Readers have about `max_maps` of them at most.
    """

    def __init__(self, make: Callable[[], CopyOnWriteMap], *, max_maps: int = MAX_MAPS) -> None:
        self._make = make
        self._max_maps = max_maps
        self._living: weakref.WeakSet[CopyOnWriteMap] = weakref.WeakSet()
        self._idle: deque[CopyOnWriteMap] = deque(maxlen=MAX_IDLE_MAPS)

    def take(self) -> CopyOnWriteMap:
        """A mapping that shows the file and nothing else. Raises `ArenaError` if there is none and none can be made."""
        with suppress(IndexError):
            return self._idle.popleft()
        if len(self._living) >= self._max_maps:
            raise ArenaError(f"{self._max_maps} mappings of an arena are in readers' hands already")
        mapping = self._make()
        self._living.add(mapping)
        return mapping

    def give_back(self, mapping: CopyOnWriteMap, parts: Sequence[range]) -> None:
        """Its reader, who could write these bytes, is gone. Finalizers may call this."""
        if not mapping.is_written(parts):
            self._idle.append(mapping)


def _joined(parts: Sequence[range]) -> list[range]:
    """The same bytes in ascending order, adjacent parts as one."""
    joined: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        if joined and part.start <= joined[-1].stop:
            joined[-1] = range(joined[-1].start, max(part.stop, joined[-1].stop))
        else:
            joined.append(part)
    return joined
