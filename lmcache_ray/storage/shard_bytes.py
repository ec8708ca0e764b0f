"""A shard's bytes by layer group, and those of them that mean something. Pure; what every serde begins with."""

from collections.abc import Iterator

import numpy as np

from lmcache_ray.layout import RankLayout


def group_bytes(shard: np.ndarray, layout: RankLayout) -> Iterator[np.ndarray]:
    """Views of uint8 ``[slot_nbytes]``, one per layer group, without the gaps between groups."""
    for group, offset in zip(layout.groups, layout.group_offsets, strict=True):
        yield shard[offset : offset + group.token_nbytes * layout.chunk_size]


def meant_bytes(shard: np.ndarray, layout: RankLayout, num_tokens: int) -> np.ndarray:
    """A copy of the shard with zeros in the rows from `num_tokens` on, and in the gaps between groups."""
    meant = np.zeros_like(shard)
    pairs = zip(group_bytes(shard, layout), group_bytes(meant, layout), strict=True)
    for group, (source, target) in zip(layout.groups, pairs, strict=True):
        planes = (group.kv_size * group.num_layers, layout.chunk_size, group.row_nbytes)
        target.reshape(planes)[:, :num_tokens] = source.reshape(planes)[:, :num_tokens]
    return meant
