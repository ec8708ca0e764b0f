"""What a chunk's file says of itself, and whether it is whole: for a person who has a file, and maybe no cluster.

Apart from the tiers, which know what a file must be and read it into a slot. Here nothing is expected of the file: the
head is believed as far as `chunk_format` believes it, and the data passes through in pieces, so that memory is bounded
whatever the file claims or is.
"""

import os
import stat
from dataclasses import dataclass
from enum import Enum
from io import BufferedReader
from typing import Final

import xxhash

from lmcache_ray.errors import DamagedChunkError, StorageError
from lmcache_ray.storage.chunk_format import ChunkHead, parse_head
from lmcache_ray.storage.chunk_frame import MAX_HEAD_NBYTES

_PIECE_NBYTES: Final = 2**20
_UNCHANGED: Final = "naive"  # the serde that writes a shard's bytes as they are
_KINDS: Final = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class FileState(Enum):
    """What came of an inspection."""

    SOUND = "sound"
    """A stored chunk: all lengths agree, and all checksums hold."""
    DAMAGED = "damaged"
    """A file, but no whole chunk: cut short, extended, changed, or never one."""
    UNREADABLE = "unreadable"
    """No file, or one whose bytes cannot be had: nothing is known about them."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found at `path`. `problem` says why it is not sound, and is empty where it is.

    `head` is None where none could be believed; where it is given it is whole, also if the data after it is not.
    `file_nbytes` is None for what is unreadable.
    """

    path: str
    state: FileState
    problem: str = ""
    file_nbytes: int | None = None
    head: ChunkHead | None = None


def inspect_file(path: str) -> Inspection:
    """Read the file at `path` to its last byte and compare it with what its head says.

    Links are followed. Nothing but a regular file is opened, nothing in it is executed, and 1 MiB of memory is enough.
    """
    try:
        with _open_file(path) as file:
            return _judge(path, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        return Inspection(path, FileState.UNREADABLE, f"cannot be read: {error.strerror or error}")


def _open_file(path: str) -> BufferedReader:
    try:
        mode = os.stat(path).st_mode  # before it is opened: that alone may set a device or a pipe going
    except ValueError as error:
        raise StorageError(f"no file can be called so ({error})") from error
    for is_kind, kind in _KINDS:
        if is_kind(mode):
            raise StorageError(f"it is {kind}")
    return open(path, "rb", opener=_opener)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe may have taken the file's place meanwhile


def _judge(path: str, file: BufferedReader, file_nbytes: int) -> Inspection:
    head = None
    try:
        head = parse_head(file.read(min(MAX_HEAD_NBYTES, file_nbytes)), file_nbytes)
        _check_length(head)
        _check_data(head, file)
    except DamagedChunkError as error:
        return Inspection(path, FileState.DAMAGED, str(error), file_nbytes, head)
    return Inspection(path, FileState.SOUND, "", file_nbytes, head)


def _check_length(head: ChunkHead) -> None:
    """The one length that agrees with the file's in every head, and yet may contradict the header."""
    raw_nbytes = head.header.raw_nbytes
    if head.header.serde == _UNCHANGED and head.data_nbytes != raw_nbytes:
        raise DamagedChunkError(
            f"{head.data_nbytes} bytes of data, where the header says {raw_nbytes}, written as they are"
        )


def _check_data(head: ChunkHead, file: BufferedReader) -> None:
    """As `chunk_format.check_data`, for data that may be larger than memory."""
    file.seek(head.head_nbytes)
    digest, piece, remaining = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_NBYTES)), head.data_nbytes
    while remaining:
        count = file.readinto(piece[:remaining])
        if not count:
            raise DamagedChunkError(f"cut short while it was read: {remaining} bytes of its data are gone")
        digest.update(piece[:count])
        remaining -= count
    if digest.digest() != head.data_digest:
        raise DamagedChunkError("the data is damaged (wrong checksum)")
