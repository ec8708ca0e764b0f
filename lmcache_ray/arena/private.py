"""An arena that only this process can see: anonymous memory with the slots of any other.

For worlds whose ranks all live in one process. Without a file there is nothing to lock, to sweep or to leave behind,
however the process ends; pages are taken when they are first written, and given back at `close`.
"""

import mmap

from lmcache_ray.arena.slots import ArenaSlots
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.errors import CapacityError


class PrivateArena:
    """Slots in anonymous memory, all FREE at first."""

    def __init__(self, geometry: ArenaGeometry) -> None:
        """:raises CapacityError: the system refuses that much memory."""
        try:
            self._mapping = mmap.mmap(-1, geometry.file_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise CapacityError(f"an arena of {geometry.file_nbytes} bytes cannot be mapped: {error}") from error
        self._slots = ArenaSlots(memoryview(self._mapping), geometry)

    @property
    def slots(self) -> ArenaSlots:
        """The slots. After `close` all read as FREE, so a thread that is late finds nothing and harms nobody."""
        return self._slots

    def close(self) -> None:
        """Give the memory back now, even while somebody still holds `slots`. Idempotent."""
        self._mapping.madvise(mmap.MADV_DONTNEED)
