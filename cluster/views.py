"""What `get(views=True)` answers: tensors over the arenas' own memory, and the lease that keeps it as it is.

The lease ends by `close`, or when the object and all its tensors are gone, or with this process; never by time. Tensors
stay readable after that, only not what they were. They lie in a mapping that nobody else has, so who writes into one
changes it for himself alone (see `arena/copy_on_write.py`).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from lmcache_ray.arena.copy_on_write import CopyOnWriteMaps
from lmcache_ray.arena.slots import ArenaSlots
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.layout import RankLayout
from lmcache_ray.shard import leading
from lmcache_ray.torch_dtypes import to_torch_dtype

ViewedShard = list[list[torch.Tensor]]
"""One rank's chunks: ``shard[group][chunk]`` is ``[kv_size, num_layers, tokens of the chunk, hidden_dim]``."""


class ViewLease:
    """The lease of one answer, released once: by `close`, or `abandon`\\ ed when nothing refers to it any more."""

    def __init__(self, lease_id: str, *, release: Callable[[str], None], abandon: Callable[[str], None]) -> None:
        """``release(id)`` may call the cluster; ``abandon(id)`` may not, as it is called by the garbage collector."""
        self._lease_id: str | None = lease_id
        self._release = release
        self._abandon = abandon

    def close(self) -> None:
        """Release it. Idempotent."""
        lease_id, self._lease_id = self._lease_id, None
        if lease_id is not None:
            self._release(lease_id)

    def __del__(self) -> None:
        if self._lease_id is not None:
            self._abandon(self._lease_id)
            warnings.warn(
                f"cached views ({self._lease_id}) were dropped without close(): until the next call of their cluster "
                "their chunks cannot be evicted",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )


@dataclass(frozen=True, slots=True)
class ViewedChunks:
    """Chunks of one arena that are looked at."""

    slots: ArenaSlots
    refs: Sequence[ChunkRef]

    def num_good(self) -> int:
        """How many leading chunks are there at this moment."""
        return leading([self.slots.holds(ref.slot, ref.generation, ref.key) for ref in self.refs])

    def first(self, count: int) -> "ViewedChunks":
        """The first `count` of them."""
        return ViewedChunks(self.slots, self.refs[:count])

    def are_intact(self) -> bool:
        """True if every byte has been that of its chunk until now."""
        return all(self.slots.is_committed(ref.slot, ref.generation) for ref in self.refs)


class CachedViews(tuple[int, list[ViewedShard]]):
    """``(num_tokens, shards)`` of `get(views=True)`: a tuple, and a context manager that ends the lease.

    ``shards[rank][group]`` is a list of tensors, one per chunk, ``[kv_size, num_layers, tokens of the chunk,
    hidden_dim]``; joined along dimension 2 they are the rows ``[start, num_tokens)``. They are not to be written: a
    write does no harm to the cache, but is seen in the tensors of this object. After `close` the chunks may be
    replaced by others: copy what you want to keep before, and ask `is_intact` if in doubt.
    """

    copied_ranks: tuple[int, ...]
    """Ranks (numbers of the world) whose tensors are copies: they run on other nodes, or views hold their share of the
    arena already, or this process has as many of it as it may. Copies stay what they are."""
    _viewed: tuple[ViewedChunks, ...]
    _lease: ViewLease | None

    def __new__(
        cls,
        num_tokens: int,
        shards: list[ViewedShard],
        *,
        copied_ranks: Sequence[int] = (),
        viewed: Sequence[ViewedChunks] = (),
        lease: ViewLease | None = None,
    ) -> "CachedViews":
        """`lease` is held by the tensors over the `viewed` chunks too."""
        made = super().__new__(cls, (num_tokens, shards))
        made.copied_ranks = tuple(copied_ranks)
        made._viewed = tuple(viewed)
        made._lease = lease
        return made

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt up to the last row that is here, counted from 0."""
        return self[0]

    @property
    def shards(self) -> list[ViewedShard]:
        """``shards[rank][group][chunk]``."""
        return self[1]

    @property
    def is_copied(self) -> bool:
        """True if any rank's tensors are copies."""
        return bool(self.copied_ranks)

    def is_intact(self) -> bool:
        """True if the cache has kept every viewed byte until now, also after `close`. Look after the last read."""
        return all(chunks.are_intact() for chunks in self._viewed)

    def close(self) -> None:
        """End the lease. Idempotent; the tensors stay readable, but may show other chunks from now on."""
        if self._lease is not None:
            self._lease.close()

    def __enter__(self) -> "CachedViews":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        copied = f", copies of ranks {list(self.copied_ranks)}" if self.copied_ranks else ""
        return f"<CachedViews of {self.num_tokens} tokens of {len(self.shards)} ranks{copied}>"


def view_chunks(
    maps: CopyOnWriteMaps,
    geometry: ArenaGeometry,
    slots: Sequence[int],
    layout: RankLayout,
    rows: Sequence[range],
    lease: ViewLease,
) -> ViewedShard:
    """Tensors over the named rows of the chunks in these slots. Raises `ArenaError` if they cannot be mapped."""
    starts = [geometry.data_offset + slot * geometry.slot_nbytes for slot in slots]
    memory = np.asarray(_LeasedMemory(maps, [range(at, at + geometry.slot_nbytes) for at in starts], lease))
    shard = []
    for group, group_offset in zip(layout.groups, layout.group_offsets, strict=True):
        shape = (group.kv_size, group.num_layers, layout.chunk_size, group.hidden_dim)
        dtype, count = to_torch_dtype(group.dtype), math.prod(shape)
        chunks = [
            torch.frombuffer(memory, dtype=dtype, count=count, offset=start + group_offset).view(shape)
            for start in starts
        ]
        shard.append(list(_cut(chunks, rows, layout.chunk_size)))
    return shard


def split_chunks(shard: Sequence[torch.Tensor], rows: Sequence[range]) -> ViewedShard:
    """One rank's dense tensors in the shape of views; `rows` are those of each chunk that they have."""
    sizes = [len(part) for part in rows]
    return [list(tensor[:, :, : sum(sizes)].split(sizes, dim=2)) if sizes else [] for tensor in shard]


def _cut(chunks: Sequence[torch.Tensor], rows: Sequence[range], chunk_size: int) -> Iterator[torch.Tensor]:
    for chunk, part in zip(chunks, rows, strict=True):
        yield chunk if len(part) == chunk_size else chunk[:, :, part.start : part.stop]


class _LeasedMemory:
    """A mapping as NumPy sees it. Arrays and tensors over it keep this alive, and this its lease; then it goes back."""

    def __init__(self, maps: CopyOnWriteMaps, parts: Sequence[range], lease: ViewLease) -> None:
        """`parts` are the bytes that tensors reach."""
        self._mapping = maps.take()
        self._maps = maps
        self._parts = parts
        self._lease = lease
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (self._mapping.nbytes,),
            "data": (self._mapping.address, False),
        }

    def __del__(self) -> None:
        if hasattr(self, "_lease"):  # else there was nothing to take
            self._maps.give_back(self._mapping, self._parts)
