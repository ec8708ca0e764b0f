"""Bytes with every kind of bit pattern, and the shards of a driver made of them. Used here and inside ranks."""

from collections.abc import Sequence

import numpy as np
import torch

from lmcache_ray.connector.dense import empty_shard
from lmcache_ray.layout import WorldLayout

GroupBytes = list[np.ndarray]
"""One rank's rows: per layer group uint8 ``[kv_size, num_layers, num_rows, row_nbytes]``."""


def fill_odd_bytes(raw: np.ndarray, itemsize: int, *, seed: Sequence[int]) -> None:
    """Random bytes into the flat uint8 `raw`; of each five elements one is -0.0 and one a NaN with a payload."""
    rng = np.random.default_rng(seed)
    raw[:] = rng.integers(0, 256, raw.size, dtype=np.uint8)
    elements = raw.reshape(-1, itemsize)
    elements[::5] = [0] * (itemsize - 1) + [0x80]
    elements[1::5, -1] |= 0x7F
    if itemsize > 1:
        elements[1::5, -2] |= 0xC1


def odd_shards(layout: WorldLayout, num_tokens: int, *, seed: int) -> list[list[torch.Tensor]]:
    """``shards[holder][group]`` as `put` takes them; no two ranks and groups have the same bytes."""
    shards = [empty_shard(layout.ranks[rank], num_tokens) for rank in layout.holders]
    for rank, shard in enumerate(shards):
        for group, tensor in enumerate(shard):
            raw = tensor.view(torch.uint8).numpy().reshape(-1)
            fill_odd_bytes(raw, tensor.itemsize, seed=(seed, rank, group))
    return shards


def shard_bytes(shards: Sequence[Sequence[torch.Tensor]]) -> list[GroupBytes]:
    """Shards as bytes."""
    return [[tensor.contiguous().view(torch.uint8).numpy() for tensor in shard] for shard in shards]


def assert_same(found: Sequence[GroupBytes], expected: Sequence[GroupBytes], rows: slice = slice(None)) -> None:
    """Every byte of `rows` is as expected on every rank; `found` has those rows alone or all."""
    assert len(found) == len(expected)
    for rank, (found_groups, expected_groups) in enumerate(zip(found, expected, strict=True)):
        for group, (have, want) in enumerate(zip(found_groups, expected_groups, strict=True)):
            wanted = want[:, :, rows]
            had = have if have.shape == wanted.shape else have[:, :, rows]
            assert had.shape == wanted.shape, f"rank {rank}, group {group}"
            assert np.array_equal(had, wanted), f"rank {rank}, group {group}: bytes differ"


def repeated(shards: Sequence[GroupBytes], world_size: int) -> list[GroupBytes]:
    """What each rank must hold: its own shard, or the one there is (MLA)."""
    return list(shards) if len(shards) == world_size else [shards[0]] * world_size
