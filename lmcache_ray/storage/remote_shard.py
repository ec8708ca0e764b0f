"""One shard as an object of a remote store: the chunk format's head, then what the serde made of the bytes. No IO."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from typing_extensions import Buffer

from lmcache_ray.errors import DamagedChunkError
from lmcache_ray.layout import WorldLayout
from lmcache_ray.storage.chunk_format import ChunkHeader, check_data, header_of, pack_head, parse_head
from lmcache_ray.storage.remote_names import Writing
from lmcache_ray.storage.serde import Serde

_MAY_DIFFER: Final = frozenset(("num_tokens", "world_size"))  # with MLA worlds of all sizes share one shard


class ShardObjects:
    """Makes and reads the shard objects of one layout and serde."""

    def __init__(self, layout: WorldLayout, serde: Serde) -> None:
        self._layout = layout
        self._serde = serde

    def encode(self, rank: int, num_tokens: int, data: np.ndarray) -> Buffer:
        """What the serde makes of the shard, uint8 ``[slot_nbytes]``, in memory of its own."""
        return self._serde.encode(data, self._layout.ranks[rank], num_tokens)

    def pack(self, key: bytes, writing: Writing, rank: int, num_tokens: int, encoded: Buffer) -> Sequence[Buffer]:
        """The parts of the object."""
        return [pack_head(self._header(key, writing, rank, num_tokens), encoded), encoded]

    def unpack(self, stored: Buffer, key: bytes, writing: Writing, rank: int, data: np.ndarray) -> int:
        """Fill `data`, uint8 ``[slot_nbytes]``; how many tokens it holds.

        Raises `DamagedChunkError` if the object is not that shard, whole and unchanged; `data` is garbage then.
        """
        view = memoryview(stored)
        head = parse_head(view, view.nbytes)
        expected = self._header(key, writing, rank, self._layout.chunk_size)
        for name in ChunkHeader.__slots__:
            if name not in _MAY_DIFFER and getattr(head.header, name) != getattr(expected, name):
                raise DamagedChunkError(f"another shard's header: it differs in {name}")
        encoded = view[head.head_nbytes :]
        check_data(head, encoded)
        self._serde.decode(encoded, data, self._layout.ranks[rank])
        return head.header.num_tokens

    def _header(self, key: bytes, writing: Writing, rank: int, num_tokens: int) -> ChunkHeader:
        return header_of(
            self._layout,
            rank,
            key=key,
            generation=writing.generation,
            num_tokens=num_tokens,
            serde=self._serde.name,
            is_lossy=self._serde.is_lossy,
            origin=writing.origin,
        )
