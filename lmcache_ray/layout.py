"""Where each byte of a chunk lies, on every rank, and the fingerprint that names such a layout. Pure.

A *shard* is one rank's part of one chunk. Its bytes are the rank's layer groups one after the other, each a dense
``[kv_size, num_layers, chunk_size, hidden_dim]`` array that starts on a 64-byte border::

    | group 0: kv 0 [layer 0: row 0 .. row C-1][layer 1: ...] kv 1 [...] | pad | group 1 ... | pad |
    ^ 0                                                                        ^ group_offsets[1]  ^ slot_nbytes

A partial chunk (fewer tokens than C) keeps these offsets and fills only the first rows, so a row's place never
depends on how many tokens were stored.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import LayoutError

ALIGNMENT: Final = 64  # bytes: a cache line, so that two slots never share one
LAYOUT_VERSION: Final = 1


class Placement(Enum):
    """Which ranks hold a chunk's bytes."""

    PER_RANK = "per_rank"
    """Every rank holds its own shard."""
    FIRST_RANK = "first_rank"
    """All ranks' KV is equal (MLA): rank 0 holds the one copy."""


class Encoding(Enum):
    """How a shard's bytes are arranged."""

    TOKENS = "tokens"
    """Rows per token, in a layout this project knows: any slice of tokens can be read."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One rank's part of one layer group.

    `layers` are the model's layer numbers, ascending, need not be adjacent. `heads` is the half-open range of KV heads
    that the rank holds (MLA: ``range(0, 1)`` with the latent width as `head_size`). `replica` counts the ranks
    before this one that hold the very same heads (KV heads replicated over tensor parallelism).
    """

    layers: tuple[int, ...]
    heads: range
    head_size: int
    dtype: KVDtype
    kv_size: int = 2
    replica: int = 0
    encoding: Encoding = Encoding.TOKENS

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "dtype", KVDtype(self.dtype))
        object.__setattr__(self, "encoding", Encoding(self.encoding))
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise LayoutError(f"ShardSpec.layers must be distinct, ascending and at least 0; got {self.layers}")
        if not isinstance(self.heads, range):
            raise LayoutError(f"ShardSpec.heads must be a range; got {self.heads!r}")
        if self.heads.step != 1 or not self.heads or self.heads.start < 0:
            raise LayoutError(f"ShardSpec.heads must be a non-empty range of step 1; got {self.heads!r}")
        if self.head_size < 1:
            raise LayoutError(f"ShardSpec.head_size must be at least 1; got {self.head_size}")
        if self.kv_size not in (1, 2):
            raise LayoutError(f"ShardSpec.kv_size must be 1 (MLA) or 2 (keys and values); got {self.kv_size}")
        if self.replica < 0:
            raise LayoutError(f"ShardSpec.replica must be at least 0; got {self.replica}")

    @property
    def num_layers(self) -> int:
        """Layers of the group on this rank."""
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """KV heads of the group on this rank."""
        return len(self.heads)

    @property
    def hidden_dim(self) -> int:
        """Elements of one row: heads times head size."""
        return self.num_heads * self.head_size

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token in one layer, keys or values."""
        return self.hidden_dim * self.dtype.itemsize

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token over the group's layers, keys and values."""
        return self.kv_size * self.num_layers * self.row_nbytes

    def describe(self) -> dict[str, object]:
        """Every field that changes the meaning of a byte, JSON-ready."""
        return {
            "layers": list(self.layers),
            "heads": [self.heads.start, self.heads.stop],
            "head_size": self.head_size,
            "dtype": self.dtype.value,
            "kv_size": self.kv_size,
            "replica": self.replica,
            "encoding": self.encoding.value,
        }


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The shard of one rank: its groups and where each begins. `group_offsets` are bytes from the slot's start."""

    chunk_size: int
    groups: tuple[ShardSpec, ...]
    group_offsets: tuple[int, ...] = field(init=False)
    slot_nbytes: int = field(init=False)
    """Bytes between two slots of the arena: the shard, padded to `ALIGNMENT`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if self.chunk_size < 1:
            raise LayoutError(f"chunk_size must be at least 1; got {self.chunk_size}")
        if not self.groups:
            raise LayoutError("a rank's layout needs at least one layer group")
        layers = [layer for group in self.groups for layer in group.layers]
        if len(layers) != len(set(layers)):
            raise LayoutError(f"a layer stands in two groups of one rank: {sorted(layers)}")
        offsets, end = [], 0
        for group in self.groups:
            offsets.append(end)
            end += _align(group.token_nbytes * self.chunk_size)
        object.__setattr__(self, "group_offsets", tuple(offsets))
        object.__setattr__(self, "slot_nbytes", end)

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token over all groups."""
        return sum(group.token_nbytes for group in self.groups)

    @property
    def chunk_nbytes(self) -> int:
        """Payload bytes of one full chunk, padding not counted."""
        return self.token_nbytes * self.chunk_size

    @property
    def num_layers(self) -> int:
        """Layers of all groups: the length of the rank's `kvcaches` list."""
        return sum(group.num_layers for group in self.groups)

    def layer_positions(self) -> tuple[tuple[int, ...], ...]:
        """Per group, the index in the rank's `kvcaches` list of each of its layers.

        `kvcaches` has one tensor per layer that the rank holds, in ascending layer number.
        """
        order = sorted(layer for group in self.groups for layer in group.layers)
        place = {layer: position for position, layer in enumerate(order)}
        return tuple(tuple(place[layer] for layer in group.layers) for group in self.groups)


@dataclass(frozen=True, slots=True)
class WorldLayout:
    """The layout of every rank of a world, in rank order."""

    ranks: tuple[RankLayout, ...]
    placement: Placement
    fingerprint: bytes = field(init=False)
    """SHA-256 over everything that gives a stored byte its meaning (not over model names: keys hold those)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        if not self.ranks:
            raise LayoutError("a world needs at least one rank")
        if len({rank.chunk_size for rank in self.ranks}) != 1:
            raise LayoutError(f"ranks disagree on chunk_size: {[rank.chunk_size for rank in self.ranks]}")
        if self.placement is Placement.FIRST_RANK and len({rank.groups for rank in self.ranks}) != 1:
            raise LayoutError("first-rank placement (MLA) needs the same layer groups on every rank")
        object.__setattr__(self, "fingerprint", hashlib.sha256(json.dumps(self.describe()).encode()).digest())

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def chunk_size(self) -> int:
        """Tokens of one chunk."""
        return self.ranks[0].chunk_size

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold bytes: all of them, or rank 0 alone."""
        return (0,) if self.placement is Placement.FIRST_RANK else tuple(range(self.world_size))

    def holder_of(self, rank: int) -> int:
        """The rank whose arena holds what `rank` needs."""
        return 0 if self.placement is Placement.FIRST_RANK else rank

    @property
    def has_receivers(self) -> bool:
        """True if there are ranks that hold no bytes and need rank 0's."""
        return len(self.holders) < self.world_size

    def describe(self) -> dict[str, object]:
        """What the fingerprint covers, JSON-ready. MLA worlds of any size share one layout: one copy is kept."""
        held = [self.ranks[holder] for holder in self.holders]
        return {
            "version": LAYOUT_VERSION,
            "chunk_size": self.chunk_size,
            "placement": self.placement.value,
            "ranks": [[group.describe() for group in rank.groups] for rank in held],
        }


def uniform_world(
    groups: Iterable[ShardSpec], *, chunk_size: int, world_size: int, placement: Placement
) -> WorldLayout:
    """The world in which every rank holds groups of the same shape: heads split evenly, or one copy with MLA.

    `groups` describe rank 0. Rank r's heads follow those of rank r-1; with first-rank placement all are equal.
    """
    first = tuple(groups)

    def of_rank(rank: int) -> RankLayout:
        shift = 0 if placement is Placement.FIRST_RANK else rank
        return RankLayout(chunk_size, tuple(_shift_heads(group, shift * group.num_heads) for group in first))

    return WorldLayout(tuple(of_rank(rank) for rank in range(world_size)), placement)


def _shift_heads(group: ShardSpec, by: int) -> ShardSpec:
    heads = range(group.heads.start + by, group.heads.stop + by)
    return replace(group, heads=heads)


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
