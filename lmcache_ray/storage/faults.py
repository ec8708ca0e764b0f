"""What came of reading a stored chunk, from any tier. Pure, and apart because disk and remote answer with the same."""

from enum import Enum
from typing import NamedTuple


class ChunkFault(Enum):
    """Why a stored chunk could not be read. Each is a miss, counted, never an exception to who asked for the chunk."""

    MISSING = "missing"
    """There is none of that name, or not any more."""
    DAMAGED = "damaged"
    """It is not what it should be: short, extended, changed, or another chunk's."""
    UNREADABLE = "unreadable"
    """The place that holds it failed: an error of the filesystem, a remote that did not answer."""


class ReadResult(NamedTuple):
    """One chunk read into memory of the caller's. With a fault, `num_tokens` is 0 and that memory holds garbage."""

    num_tokens: int
    fault: ChunkFault | None = None
