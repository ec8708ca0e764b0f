"""Layouts and shards with known bytes, for tests of what is stored below memory."""

import numpy as np

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.layout import Placement, RankLayout, ShardSpec, WorldLayout, uniform_world

CHUNK_SIZE = 4

TWO_GROUPS = (
    ShardSpec(layers=(0, 2), heads=range(2), head_size=4, dtype=KVDtype.BFLOAT16),
    ShardSpec(layers=(1,), heads=range(1), head_size=3, dtype=KVDtype.FLOAT16),
)
LATENT = (ShardSpec(layers=(0, 1), heads=range(1), head_size=6, dtype=KVDtype.BFLOAT16, kv_size=1),)


def world(size: int = 2, *, is_mla: bool = False) -> WorldLayout:
    """Two layer groups a rank, or one first-rank (MLA) group."""
    placement = Placement.FIRST_RANK if is_mla else Placement.PER_RANK
    return uniform_world(
        LATENT if is_mla else TWO_GROUPS, chunk_size=CHUNK_SIZE, world_size=size, placement=placement
    )


def random_shard(layout: RankLayout, seed: int = 0) -> np.ndarray:
    """Any bytes, the gaps between groups too."""
    return np.random.default_rng(seed).integers(0, 256, layout.slot_nbytes, dtype=np.uint8)


def meant(shard: np.ndarray, layout: RankLayout, num_tokens: int) -> list[bytes]:
    """The bytes that mean something: the first rows of every plane, in order."""
    found = []
    for group, offset in zip(layout.groups, layout.group_offsets, strict=True):
        plane_nbytes = layout.chunk_size * group.row_nbytes
        for plane in range(group.kv_size * group.num_layers):
            start = offset + plane * plane_nbytes
            found.append(shard[start : start + num_tokens * group.row_nbytes].tobytes())
    return found


def key_of(number: int) -> bytes:
    """A chunk key."""
    return number.to_bytes(32, "big")
