"""One more mapping of an arena, for one reader alone: it shows the arena's own memory, and a write into it stays here.

It is what views for a user's hands are made of. Two other mappings would also keep a stray write out of the arena: a
read-only one ends the process that writes, and a private one that all readers of a process share shows them what one
of them wrote as if it were cached. A private mapping for each reader does neither: a page that is written becomes that
mapping's own copy, and nobody else ever sees it. The price is that each mapping brings its pages in as they are first
read (about a fifth on top of that read), for which no byte is copied.

Apart from `mapped.py` and by libc itself, because Python's `mmap` keeps a descriptor per mapping, of which a process
has few, and counts the whole file as memory that might be written.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Final

from lmcache_ray.errors import ArenaError

_MAP_NORESERVE: Final = 0x4000  # Linux on x86-64; not named by Python's mmap before 3.13
_FAILED: Final = ctypes.c_void_p(-1).value

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

    def __del__(self, unmap: Callable[[int, int], int] = _LIBC.munmap) -> None:
        if hasattr(self, "address"):
            unmap(self.address, self.nbytes)
