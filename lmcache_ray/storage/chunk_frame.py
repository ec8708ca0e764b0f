"""The frame around a stored chunk: lengths and checksums, whatever its header says. Pure.

Apart from `chunk_format`, which draws the whole and gives the header its meaning, so that what is believed of foreign
bytes, and in which order, can be read on one page. No length is believed before it is bounded and agrees with the size
of the file or object.
"""

import struct
from typing import Final, NamedTuple

import xxhash
from typing_extensions import Buffer

from lmcache_ray.errors import DamagedChunkError, LayoutError

FORMAT_VERSION: Final = 1
ALIGNMENT: Final = 64
"""The head's length is a multiple of it, so that the data begins on a cache line of whatever holds the file."""
MAX_HEADER_NBYTES: Final = 64 * 1024
MAX_HEAD_NBYTES: Final = MAX_HEADER_NBYTES + 2 * ALIGNMENT
"""So many leading bytes of a file or object always hold its head."""

_MAGIC: Final = b"LMCRAYC\n"
_PREFIX: Final = struct.Struct("<8sIIQ16s")  # magic, version, header length, data length, data checksum
_DIGEST_NBYTES: Final = 16


class Frame(NamedTuple):
    """What stands around the data: the header's text, and how much of what bytes must follow the head."""

    text: bytes
    head_nbytes: int
    data_nbytes: int
    data_digest: bytes


def head_nbytes_of(text_nbytes: int) -> int:
    """Length of the head around a header of so many bytes."""
    return -(-(_PREFIX.size + text_nbytes + _DIGEST_NBYTES) // ALIGNMENT) * ALIGNMENT


def pack_frame(text: bytes, data: Buffer) -> bytes:
    """The head: all that stands before `data`, which is read once.

    :raises LayoutError: the header is too long to be read again.
    """
    if len(text) > MAX_HEADER_NBYTES:
        raise LayoutError(f"a chunk's header has at most {MAX_HEADER_NBYTES} bytes; this one needs {len(text)}")
    checksum = DataChecksum()
    checksum.add(memoryview(data))
    return make_head(text, checksum)


def make_head(text: bytes, checksum: "DataChecksum") -> bytes:
    """The head of a header's text and of data whose checksum was taken."""
    prefix = _PREFIX.pack(_MAGIC, FORMAT_VERSION, len(text), checksum.nbytes, checksum.digest())
    covered = (prefix + text).ljust(head_nbytes_of(len(text)) - _DIGEST_NBYTES, b"\0")
    return covered + xxhash.xxh3_128_digest(covered)


def open_frame(leading: Buffer, file_nbytes: int) -> Frame:
    """Read the frame of a file of `file_nbytes` bytes; `leading` are its first bytes, at least all of its head.

    :raises DamagedChunkError: saying what is wrong.
    """
    view = memoryview(leading)
    if view.nbytes < _PREFIX.size:
        raise DamagedChunkError(f"{view.nbytes} bytes are too few for a chunk's head")
    magic, version, text_nbytes, data_nbytes, data_digest = _PREFIX.unpack_from(view)
    if magic != _MAGIC:
        raise DamagedChunkError("not a stored chunk (wrong magic bytes)")
    if version != FORMAT_VERSION:
        raise DamagedChunkError(f"chunk format version {version}; this program reads version {FORMAT_VERSION}")
    if text_nbytes > MAX_HEADER_NBYTES:
        raise DamagedChunkError(f"a header of {text_nbytes} bytes; at most {MAX_HEADER_NBYTES} are read")
    head_nbytes = head_nbytes_of(text_nbytes)
    if head_nbytes + data_nbytes != file_nbytes:
        raise DamagedChunkError(f"{file_nbytes} bytes, where head and data have {head_nbytes} + {data_nbytes}")
    if view.nbytes < head_nbytes:
        raise DamagedChunkError(f"only {view.nbytes} bytes of a head of {head_nbytes}")
    end = head_nbytes - _DIGEST_NBYTES
    if xxhash.xxh3_128_digest(view[:end]) != view[end:head_nbytes]:
        raise DamagedChunkError("the head is damaged (wrong checksum)")
    return Frame(bytes(view[_PREFIX.size : _PREFIX.size + text_nbytes]), head_nbytes, data_nbytes, data_digest)


class DataChecksum:
    """The checksum of data that comes in pieces. `nbytes` have come."""

    __slots__ = ("_hash", "nbytes")

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.nbytes = 0

    def add(self, piece: memoryview) -> None:
        """The next bytes."""
        self._hash.update(piece)
        self.nbytes += piece.nbytes

    def digest(self) -> bytes:
        """Of all bytes so far."""
        return self._hash.digest()

    def check(self, nbytes: int, digest: bytes) -> None:
        """Compare with what a head says.

        :raises DamagedChunkError: there were more or fewer bytes, or others.
        """
        if self.nbytes != nbytes:
            raise DamagedChunkError(f"{self.nbytes} bytes of data, where the head says {nbytes}")
        if self.digest() != digest:
            raise DamagedChunkError("the data is damaged (wrong checksum)")
