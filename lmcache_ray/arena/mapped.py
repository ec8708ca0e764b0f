"""An arena file mapped into this process: what owners and clients have in common.

A mapping stays valid after its file was unlinked and after `close`, for as long as anyone holds its `ArenaSlots` or a
view of its data; so a thread that is late with a copy never touches memory that is gone.
"""

import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Final

from lmcache_ray.arena.copy_on_write import CopyOnWriteMap
from lmcache_ray.arena.header import HEARTBEAT_OFFSET, ArenaHeader, ArenaOwner, heartbeat_word, unpack_header
from lmcache_ray.arena.slots import ArenaSlots
from lmcache_ray.arena.spec import HEADER_NBYTES, ArenaSpec
from lmcache_ray.errors import ArenaError, ClosedError

# Linux 5.14: make pages present and writable without changing a byte. Not named in Python's mmap module.
_MADV_POPULATE_WRITE: Final = 23
_PREFAULT_STEP_NBYTES: Final = 16 * 2**20


class ArenaMap:
    """An arena that another process owns: read under a lease, written only in slots of a live plan of one's own."""

    def __init__(self, path: Path, mapping: mmap.mmap, header: ArenaHeader, identity: os.stat_result) -> None:
        """Use `open`, which checks that these belong together."""
        self.path = path
        self._header = header
        self._identity = identity
        self._mapping: mmap.mmap | None = mapping
        self._slots = ArenaSlots(memoryview(mapping), header.spec.geometry)

    @classmethod
    def open(cls, path: str | Path, *, expected_fingerprint: bytes) -> "ArenaMap":
        """Map the arena published as `path`.

        :raises ArenaError: there is none, it cannot be trusted, or its world layout is not `expected_fingerprint`.
        """
        path = Path(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaError(f"cannot open arena {path}: {error.strerror}") from error
        try:
            header = read_header(fd, path)
            if header.spec.fingerprint != expected_fingerprint:
                raise ArenaError(
                    f"arena {path} has the layout {header.spec.fingerprint.hex()}, not {expected_fingerprint.hex()}"
                )
            # The mapping keeps a duplicate of this descriptor, never of a locked one: a forked child inherits it.
            mapping = mmap.mmap(fd, header.spec.geometry.file_nbytes)
            return cls(path, mapping, header, os.fstat(fd))
        except ArenaError:
            raise
        except OSError as error:
            raise ArenaError(f"cannot map arena {path}: {error}") from error
        finally:
            os.close(fd)

    @property
    def spec(self) -> ArenaSpec:
        """What the arena is."""
        return self._header.spec

    @property
    def owner(self) -> ArenaOwner:
        """The process that owned the arena when it was mapped, and its node."""
        return self._header.owner

    @property
    def slots(self) -> ArenaSlots:
        """The slots.

        :raises ClosedError: after `close`.
        """
        self._open_mapping()
        return self._slots

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._mapping is None

    def is_published(self) -> bool:
        """False once `path` names another file or none: this mapping is then an arena of the past."""
        try:
            return os.path.samestat(self._identity, os.stat(self.path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def copy_on_write(self) -> CopyOnWriteMap:
        """A mapping of the same file for one reader; writes into it change nothing that others see.

        :raises ArenaError: the arena is not published any more, or the kernel does not give a mapping.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaError(f"cannot open arena {self.path}: {error.strerror}") from error
        try:
            if not os.path.samestat(self._identity, os.fstat(fd)):
                raise ArenaError(f"{self.path} is another arena than the one that was mapped")
            return CopyOnWriteMap(fd, self.spec.geometry.file_nbytes)
        finally:
            os.close(fd)

    def beat(self, now: float) -> None:
        """Store `now` (seconds since the Unix epoch) as the owner's heartbeat, by one 8-byte store."""
        with memoryview(self._open_mapping()) as page:
            page[HEARTBEAT_OFFSET:HEADER_NBYTES].cast("Q")[0] = heartbeat_word(now)

    def prefault(self) -> bool:
        """Make every page present, so that no first write to a slot waits for the kernel. Changes no byte.

        May run in a thread beside readers and writers. False where the kernel (before Linux 5.14) cannot do it; then
        pages come when they are touched.
        """
        mapping = self._open_mapping()
        # In steps, because Python holds its lock during each.
        for start in range(0, len(mapping), _PREFAULT_STEP_NBYTES):
            try:
                mapping.madvise(_MADV_POPULATE_WRITE, start, min(_PREFAULT_STEP_NBYTES, len(mapping) - start))
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Let the mapping go; the memory is unmapped when the last view of it is gone. Idempotent."""
        if self._mapping is not None:
            self._mapping = None
            del self._slots

    def __enter__(self) -> "ArenaMap":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_mapping(self) -> mmap.mmap:
        mapping = self._mapping
        if mapping is None:
            raise ClosedError(f"arena {self.path} was closed")
        return mapping


def read_header(fd: int, path: Path) -> ArenaHeader:
    """The header of the arena file open as `fd`; `path` is for the message.

    :raises ArenaError: it is not an arena's, or damaged.
    """
    return unpack_header(os.pread(fd, HEADER_NBYTES, 0), os.fstat(fd).st_size, f"arena {path}")
