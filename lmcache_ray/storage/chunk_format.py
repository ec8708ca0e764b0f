"""The format of a stored chunk, on disk and in remote stores: a header that says everything, then the bytes. Pure.

One file or object holds one rank's shard of a chunk.

::

    0       8  magic            b"LMCRAYC\\n"
    8       4  format version   1
    12      4  header length    H, at most 65,536
    16      8  data length      D
    24     16  data checksum    XXH3-128 of the data
    40      H  header           JSON in UTF-8
    40 + H     zeros
    N - 16 16  head checksum    XXH3-128 of the bytes 0 .. N - 16
    N       D  data             the shard's slot (`layout.py` says where each row lies), as the serde encoded it

Numbers are little-endian; N is the smallest multiple of 64 with room for what stands before it. H, D and the size of
the file must agree exactly, so a file that is cut short or goes on is damaged, as is one in which any bit has changed.
Nothing in it is ever executed, and it is read with nothing but this page. The header::

    {"key": "<64 hex digits>", "generation": "<16 hex digits>", "num_tokens": 256,
     "fingerprint": "<64 hex digits>", "world_size": 2, "rank": 0, "placement": "per_rank", "chunk_size": 256,
     "groups": [{"shape": [2, 32, 256, 256], "dtype": "bfloat16", "offset": 0}],
     "raw_nbytes": 8388608, "serde": "naive", "is_lossy": false, "origin": ""}

`key` names the tokens and the model, `generation` this writing of them, `fingerprint` the layout of the whole world.
A group's `shape` is [kv_size, num_layers, chunk_size, hidden_dim]; a chunk of fewer tokens fills only the first rows,
and what stands in the others means nothing. `raw_nbytes` are the bytes of the slot before the serde. `num_tokens` is
written as wide as `chunk_size` (with blanks), so that all heads of one rank have the same length.
"""

import json
from dataclasses import dataclass, replace
from typing import Final

from typing_extensions import Buffer

from lmcache_ray.errors import DamagedChunkError, LayoutError
from lmcache_ray.layout import WorldLayout
from lmcache_ray.storage.chunk_frame import DataChecksum, Frame, head_nbytes_of, make_head, open_frame, pack_frame
from lmcache_ray.storage.header_fields import HeaderFields

DIGEST_NBYTES: Final = 32
"""Of a key, and of a layout's fingerprint."""
MAX_GENERATION: Final = 2**64 - 1
_GROUP_RANK: Final = 4  # dimensions of a group's shape


@dataclass(frozen=True, slots=True)
class GroupShape:
    """One layer group of the shard.

    `shape` is ``[kv_size, num_layers, chunk_size, hidden_dim]``, `dtype` a `KVDtype` value, `offset` in bytes from the
    slot's start.
    """

    shape: tuple[int, int, int, int]
    dtype: str
    offset: int


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """All that a stored shard says about itself. `placement` is a `Placement` value.

    `raw_nbytes` are the bytes of the slot before the serde; `origin` is the id of the cluster that wrote a remote
    object, and empty on disk. Values that no chunk can have are a `LayoutError`.
    """

    key: bytes
    generation: int
    fingerprint: bytes
    world_size: int
    rank: int
    placement: str
    chunk_size: int
    num_tokens: int
    groups: tuple[GroupShape, ...]
    raw_nbytes: int
    serde: str = "naive"
    is_lossy: bool = False
    origin: str = ""

    def __post_init__(self) -> None:
        for name, digest in (("key", self.key), ("fingerprint", self.fingerprint)):
            if len(digest) != DIGEST_NBYTES:
                raise LayoutError(f"a stored chunk's {name} has {DIGEST_NBYTES} bytes; got {len(digest)}")
        if not 0 <= self.rank < self.world_size:
            raise LayoutError(f"a stored chunk's rank must be one of {self.world_size}; got {self.rank}")
        _check_use(self.generation, self.num_tokens, self.chunk_size)


@dataclass(frozen=True, slots=True)
class ChunkHead:
    """A head that was read and believed: the data follows `head_nbytes` bytes after the start."""

    header: ChunkHeader
    head_nbytes: int
    data_nbytes: int
    data_digest: bytes


def header_of(
    layout: WorldLayout,
    rank: int,
    *,
    key: bytes,
    generation: int,
    num_tokens: int,
    serde: str = "naive",
    is_lossy: bool = False,
    origin: str = "",
) -> ChunkHeader:
    """The header of one chunk's shard on `rank`."""
    shard = layout.ranks[rank]
    groups = (
        GroupShape((group.kv_size, group.num_layers, shard.chunk_size, group.hidden_dim), group.dtype.value, offset)
        for group, offset in zip(shard.groups, shard.group_offsets, strict=True)
    )
    return ChunkHeader(
        key=key,
        generation=generation,
        fingerprint=layout.fingerprint,
        world_size=layout.world_size,
        rank=rank,
        placement=layout.placement.value,
        chunk_size=layout.chunk_size,
        num_tokens=num_tokens,
        groups=tuple(groups),
        raw_nbytes=shard.slot_nbytes,
        serde=serde,
        is_lossy=is_lossy,
        origin=origin,
    )


def pack_head(header: ChunkHeader, data: Buffer) -> bytes:
    """Everything that stands before `data` (contiguous bytes), its checksums included; a multiple of 64 bytes.

    :raises LayoutError: the header would have more than 64 KiB.
    """
    return pack_frame(_encode(header), data)


def parse_head(leading: Buffer, file_nbytes: int) -> ChunkHead:
    """Read the head of a file or object of `file_nbytes` bytes, believing nothing.

    `leading` are its first bytes: all of them, or at least `MAX_HEAD_NBYTES`, or the head. The data is not looked at.

    :raises DamagedChunkError: saying what is wrong.
    """
    frame = open_frame(leading, file_nbytes)
    return ChunkHead(_decode(frame.text), frame.head_nbytes, frame.data_nbytes, frame.data_digest)


def check_data(head: ChunkHead, data: Buffer) -> None:
    """Compare the bytes after the head with its checksum.

    :raises DamagedChunkError: they are others, or of another number.
    """
    checksum = DataChecksum()
    checksum.add(memoryview(data))
    checksum.check(head.data_nbytes, head.data_digest)


class RankHeads:
    """The heads of one rank's files. Their headers differ in key, generation and token count only, so are made once."""

    def __init__(self, layout: WorldLayout, rank: int) -> None:
        self._any = header_of(layout, rank, key=bytes(DIGEST_NBYTES), generation=0, num_tokens=layout.chunk_size)
        self._constant = _constant_fields(self._any)
        self.nbytes = head_nbytes_of(len(_encode(self._any)))
        """Length of every head of this rank."""

    def pack(self, key: bytes, generation: int, num_tokens: int, data: Buffer) -> bytes:
        """`pack_head` of that chunk. LayoutError for a generation or a token count that no chunk can have."""
        _check_use(generation, num_tokens, self._any.chunk_size)
        return pack_frame(self._text(key, generation, num_tokens), data)

    def num_tokens_of(self, head: bytearray, key: bytes, generation: int, file_nbytes: int, data: DataChecksum) -> int:
        """The token count in the head of a file of so many bytes: this rank's, of that chunk, and with that data.

        :raises DamagedChunkError: it is not, or says so of other data.
        """
        chunk_size, whole_nbytes = self._any.chunk_size, self.nbytes + data.nbytes
        if file_nbytes == whole_nbytes and head == make_head(self._text(key, generation, chunk_size), data):
            return chunk_size  # a full chunk's head is known once its data is; nothing had to be parsed
        frame = open_frame(head, file_nbytes)
        num_tokens = self.check_frame(frame, key, generation)
        data.check(frame.data_nbytes, frame.data_digest)
        return num_tokens

    def check_frame(self, frame: Frame, key: bytes, generation: int) -> int:
        """The token count in a header that must be this rank's, of that chunk.

        :raises DamagedChunkError: it is another one's.
        """
        found = _decode(frame.text)
        expected = replace(
            self._any,
            key=key,
            generation=generation,
            num_tokens=found.num_tokens,
            world_size=found.world_size,  # the fingerprint decides: with one copy for all ranks (MLA) any size will do
        )
        if found != expected:
            names = [name for name in ChunkHeader.__slots__ if getattr(found, name) != getattr(expected, name)]
            raise DamagedChunkError(f"another chunk's header: it differs in {', '.join(names)}")
        if frame.data_nbytes != found.raw_nbytes:
            raise DamagedChunkError(f"{frame.data_nbytes} bytes of data, where the slot has {found.raw_nbytes}")
        return found.num_tokens

    def _text(self, key: bytes, generation: int, num_tokens: int) -> bytes:
        return _joined(key, generation, num_tokens, self._any.chunk_size, self._constant)


def _check_use(generation: int, num_tokens: int, chunk_size: int) -> None:
    if not 0 <= generation <= MAX_GENERATION:
        raise LayoutError(f"a stored chunk's generation is a number of 64 bits; got {generation}")
    if not 1 <= num_tokens <= chunk_size:
        raise LayoutError(f"a stored chunk has 1 to {chunk_size} tokens; got {num_tokens}")


def _encode(header: ChunkHeader) -> bytes:
    constant = _constant_fields(header)
    return _joined(header.key, header.generation, header.num_tokens, header.chunk_size, constant)


def _joined(key: bytes, generation: int, num_tokens: int, chunk_size: int, constant: str) -> bytes:
    count = str(num_tokens).rjust(len(str(chunk_size)))
    return f'{{"key":"{key.hex()}","generation":"{generation:016x}","num_tokens":{count},{constant}'.encode()


def _constant_fields(header: ChunkHeader) -> str:
    """The part of the header's JSON that all chunks of its rank share, with the closing brace."""
    groups = [{"shape": group.shape, "dtype": group.dtype, "offset": group.offset} for group in header.groups]
    fields = {
        "fingerprint": header.fingerprint.hex(),
        "world_size": header.world_size,
        "rank": header.rank,
        "placement": header.placement,
        "chunk_size": header.chunk_size,
        "groups": groups,
        "raw_nbytes": header.raw_nbytes,
        "serde": header.serde,
        "is_lossy": header.is_lossy,
        "origin": header.origin,
    }
    return json.dumps(fields, separators=(",", ":"))[1:]


def _decode(text: bytes) -> ChunkHeader:
    fields = HeaderFields.parse(text)
    try:
        return ChunkHeader(
            key=fields.hexadecimal("key"),
            generation=int.from_bytes(fields.hexadecimal("generation"), "big"),
            fingerprint=fields.hexadecimal("fingerprint"),
            world_size=fields.integer("world_size"),
            rank=fields.integer("rank"),
            placement=fields.text("placement"),
            chunk_size=fields.integer("chunk_size"),
            num_tokens=fields.integer("num_tokens"),
            groups=tuple(_decode_group(group) for group in fields.objects("groups")),
            raw_nbytes=fields.integer("raw_nbytes"),
            serde=fields.text("serde"),
            is_lossy=fields.flag("is_lossy"),
            origin=fields.text("origin"),
        )
    except LayoutError as error:
        raise DamagedChunkError(f"the header cannot be meant: {error}") from error


def _decode_group(fields: HeaderFields) -> GroupShape:
    shape = fields.integers("shape")
    if len(shape) != _GROUP_RANK:
        raise DamagedChunkError(f"a group's shape has {_GROUP_RANK} dimensions; got {list(shape)}")
    return GroupShape((shape[0], shape[1], shape[2], shape[3]), fields.text("dtype"), fields.integer("offset"))
