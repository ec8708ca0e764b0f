"""The fixed pattern that stands in for a model's KV where no model runs.

Each element is a fixed function of (layer, keys-or-values plane, row, byte), equal in every process and on every
machine, and finite in every dtype, so that what comes out of the cache can be checked against what must have gone in.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.layout import RankLayout
from lmcache_ray.torch_dtypes import to_torch_dtype

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_ROWS_AT_ONCE: Final = 1 << 14  # bounds the scratch memory of a fill

# Clearing the highest exponent bit of a random pattern leaves no infinity and no NaN.
_FINITE_MASKS: Final = {
    KVDtype.FLOAT16: 0xBFFF_BFFF_BFFF_BFFF,
    KVDtype.BFLOAT16: 0xBFFF_BFFF_BFFF_BFFF,
    KVDtype.FLOAT32: 0xBFFF_FFFF_BFFF_FFFF,
    KVDtype.FLOAT8_E4M3FN: 0xBFBF_BFBF_BFBF_BFBF,
    KVDtype.FLOAT8_E5M2: 0xBFBF_BFBF_BFBF_BFBF,
    KVDtype.UINT8: 0xFFFF_FFFF_FFFF_FFFF,
    KVDtype.INT8: 0xFFFF_FFFF_FFFF_FFFF,
}


def mix64(words: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al., 2014) on each uint64: a bijection whose output looks random."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def pattern_rows(layer: int, kv: int, rows: np.ndarray, *, row_nbytes: int, dtype: KVDtype) -> np.ndarray:
    """The pattern's bytes for `rows` of one plane: uint8 ``[len(rows), row_nbytes]``."""
    words_per_row = -(-row_nbytes // 8)
    plane = mix64(np.array([(layer << 1 | kv) + 1], dtype=np.uint64))
    seeds = mix64(rows.astype(np.uint64) * _GOLDEN + plane)
    steps = np.arange(words_per_row, dtype=np.uint64) * _GOLDEN
    words = mix64(seeds[:, None] + steps[None, :]) & np.uint64(_FINITE_MASKS[dtype])
    return words.view(np.uint8)[:, :row_nbytes]


def allocate_kv_caches(layout: RankLayout, *, num_blocks: Sequence[int], block_size: int) -> list[torch.Tensor]:
    """Zeroed paged KV on the CPU, one tensor ``[kv_size, num_blocks, block_size, heads, head_size]`` per layer.

    `num_blocks` has one entry per layer group.
    """
    caches: list[tuple[int, torch.Tensor]] = []
    for group, blocks in zip(layout.groups, num_blocks, strict=True):
        shape = (group.kv_size, blocks, block_size, group.num_heads, group.head_size)
        caches += [(layer, torch.zeros(shape, dtype=to_torch_dtype(group.dtype))) for layer in group.layers]
    return [cache for _, cache in sorted(caches, key=lambda pair: pair[0])]


def fill_fixed_pattern(layout: RankLayout, kv_caches: Sequence[torch.Tensor]) -> None:
    """Write the pattern into every row of the paged KV of one rank (in place)."""
    for group, positions in zip(layout.groups, layout.layer_positions(), strict=True):
        for layer, position in zip(group.layers, positions, strict=True):
            raw = kv_caches[position].view(torch.uint8).reshape(group.kv_size, -1, group.row_nbytes).numpy()
            for kv in range(group.kv_size):
                for start in range(0, raw.shape[1], _ROWS_AT_ONCE):
                    rows = np.arange(start, min(start + _ROWS_AT_ONCE, raw.shape[1]))
                    raw[kv, rows[0] : rows[-1] + 1] = pattern_rows(
                        layer, kv, rows, row_nbytes=group.row_nbytes, dtype=group.dtype
                    )
