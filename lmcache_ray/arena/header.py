"""The first page of an arena file as bytes: what the file is, who owns it, when the owner last lived. Pure.

Four parts, written at different times::

    0     identity    written once, before the file is published; never changes
    2048  owner       rewritten by a successor that takes the file over
    4080  floor       one 8-byte word: writes of generations below it are refused; it only rises
    4088  heartbeat   one 8-byte word that the owner refreshes for as long as it lives

Identity and owner carry a CRC each, so a page that was half written, or is not ours, is named as such. The heartbeat
is wall-clock time (microseconds since the Unix epoch), not CLOCK_BOOTTIME: its only use is to say how long a *dead*
cluster's file has been waiting for a restart, next to files of which nothing but the modification time is known, and
after a reboot too. The living are protected by their locks, whatever a clock says.
"""

import struct
import zlib
from dataclasses import dataclass
from typing import Final

from lmcache_ray.arena.spec import HEADER_NBYTES, ArenaGeometry, ArenaSpec
from lmcache_ray.errors import ArenaError

FORMAT_VERSION: Final = 2
OWNER_OFFSET: Final = 2048
HEARTBEAT_OFFSET: Final = HEADER_NBYTES - 8

_MAGIC: Final = b"LMCRAYA\n"
# magic, version | rank, world_size, num_slots, slot_nbytes, three offsets, file size | fingerprint | three texts
_IDENTITY: Final = struct.Struct("<8sI8Q32sH255sH255sH255s")
# pid, start_ticks | node_id
_OWNER: Final = struct.Struct("<QQH255s")
_CRC: Final = struct.Struct("<I")
_HEARTBEAT: Final = struct.Struct("<Q")
_MAX_TEXT_NBYTES: Final = 255


@dataclass(frozen=True, slots=True)
class ArenaOwner:
    """The process that holds an arena's lock, or held it last.

    `start_ticks` (field 22 of ``/proc/<pid>/stat``) tells it from a later process with the same pid. `node_id` is Ray's
    id of the node, or any text that names it: locality goes by it, since two nodes may share one directory.
    """

    pid: int
    start_ticks: int
    node_id: str


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    """All that the first page says. `heartbeat` is in seconds since the Unix epoch."""

    spec: ArenaSpec
    boot_id: str
    owner: ArenaOwner
    heartbeat: float


def pack_header(header: ArenaHeader) -> bytes:
    """The first page, `HEADER_NBYTES` bytes."""
    spec, geometry = header.spec, header.spec.geometry
    identity = _IDENTITY.pack(
        _MAGIC,
        FORMAT_VERSION,
        spec.rank,
        spec.world_size,
        geometry.num_slots,
        geometry.slot_nbytes,
        geometry.words_offset,
        geometry.records_offset,
        geometry.data_offset,
        geometry.file_nbytes,
        spec.fingerprint,
        *_pack_text(spec.namespace),
        *_pack_text(spec.name),
        *_pack_text(header.boot_id),
    )
    page = bytearray(HEADER_NBYTES)
    page[: len(identity) + _CRC.size] = _with_crc(identity)
    owner = pack_owner(header.owner)
    page[OWNER_OFFSET : OWNER_OFFSET + len(owner)] = owner
    _HEARTBEAT.pack_into(page, HEARTBEAT_OFFSET, heartbeat_word(header.heartbeat))
    return bytes(page)


def pack_owner(owner: ArenaOwner) -> bytes:
    """The owner's part, which belongs at `OWNER_OFFSET`."""
    return _with_crc(_OWNER.pack(owner.pid, owner.start_ticks, *_pack_text(owner.node_id)))


def heartbeat_word(now: float) -> int:
    """`now` (seconds since the Unix epoch) as the word at `HEARTBEAT_OFFSET`."""
    return max(0, round(now * 1e6))


def unpack_header(page: bytes, file_nbytes: int, source: str) -> ArenaHeader:
    """Read the first page of a file of `file_nbytes` bytes, believing nothing.

    :raises ArenaError: naming `source` and what is wrong.
    """
    if len(page) < HEADER_NBYTES:
        raise ArenaError(f"{source}: {len(page)} bytes are too few for an arena's header of {HEADER_NBYTES}")
    if page[: len(_MAGIC)] != _MAGIC:
        raise ArenaError(f"{source}: not an arena file (wrong magic bytes)")
    version = int.from_bytes(page[len(_MAGIC) : len(_MAGIC) + 4], "little")
    if version != FORMAT_VERSION:
        raise ArenaError(f"{source}: arena format version {version}; this program reads version {FORMAT_VERSION}")
    spec, boot_id = _unpack_identity(page, file_nbytes, source)
    (word,) = _HEARTBEAT.unpack_from(page, HEARTBEAT_OFFSET)
    return ArenaHeader(spec, boot_id, unpack_owner(page, source), word / 1e6)


def unpack_owner(page: bytes, source: str) -> ArenaOwner:
    """Read only the owner's part of the first page.

    :raises ArenaError: naming `source`, when it is damaged.
    """
    if len(page) < HEADER_NBYTES:
        raise ArenaError(f"{source}: {len(page)} bytes are too few for an arena's header of {HEADER_NBYTES}")
    part = _checked(page, OWNER_OFFSET, _OWNER.size, f"{source}: the owner's part")
    pid, start_ticks, node_nbytes, node = _OWNER.unpack(part)
    return ArenaOwner(pid, start_ticks, _unpack_text(node_nbytes, node, f"{source}: node_id"))


def _unpack_identity(page: bytes, file_nbytes: int, source: str) -> tuple[ArenaSpec, str]:
    fields = _IDENTITY.unpack(_checked(page, 0, _IDENTITY.size, f"{source}: the identity"))
    rank, world_size, num_slots, slot_nbytes, words, records, data, size, fingerprint, *texts = fields[2:]
    namespace, name, boot_id = (
        _unpack_text(texts[2 * i], texts[2 * i + 1], f"{source}: {what}")
        for i, what in enumerate(("namespace", "name", "boot id"))
    )
    try:
        geometry = ArenaGeometry(num_slots, slot_nbytes)
        spec = ArenaSpec(namespace, name, rank, world_size, fingerprint, geometry)
    except ArenaError as error:
        raise ArenaError(f"{source}: {error}") from error
    expected = (geometry.words_offset, geometry.records_offset, geometry.data_offset, geometry.file_nbytes)
    if (words, records, data, size) != expected:
        raise ArenaError(
            f"{source}: offsets and size {(words, records, data, size)} do not fit {num_slots} slots of {slot_nbytes} "
            f"bytes, which need {expected}"
        )
    if file_nbytes != size:
        raise ArenaError(f"{source}: the file has {file_nbytes} bytes, its header says {size}")
    return spec, boot_id


def _with_crc(part: bytes) -> bytes:
    return part + _CRC.pack(zlib.crc32(part))


def _checked(page: bytes, offset: int, nbytes: int, what: str) -> bytes:
    part = page[offset : offset + nbytes]
    (crc,) = _CRC.unpack_from(page, offset + nbytes)
    if zlib.crc32(part) != crc:
        raise ArenaError(f"{what} is damaged (wrong checksum)")
    return part


def _pack_text(text: str) -> tuple[int, bytes]:
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) > _MAX_TEXT_NBYTES:
        raise ArenaError(f"an arena header holds texts of at most {_MAX_TEXT_NBYTES} bytes; got {text!r}")
    return len(encoded), encoded


def _unpack_text(nbytes: int, padded: bytes, what: str) -> str:
    if nbytes > len(padded):
        raise ArenaError(f"{what} claims {nbytes} bytes of at most {len(padded)}")
    try:
        return padded[:nbytes].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ArenaError(f"{what} is not UTF-8 text: {padded[:nbytes]!r}") from error
