"""The fixed pattern that stands in for a model's KV where no model runs.

Each byte is a fixed function of (layer, keys-or-values plane, row, place in the row), equal in every process, and each
element is finite in every dtype; so what comes out of the cache can be checked against what must have gone in.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.layout import RankLayout
from lmcache_ray.splitmix import fold64, word_streams
from lmcache_ray.torch_dtypes import to_torch_dtype

_FILL_NBYTES: Final = 1 << 18  # written at once: stays in a core's cache, so a fill runs at the speed of memory

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


def pattern_rows(
    layer: int, kv: int, rows: NDArray[np.integer], *, row_nbytes: int, dtype: KVDtype
) -> NDArray[np.uint8]:
    """The pattern's bytes for `rows` of one plane: ``[len(rows), row_nbytes]``.

    A word is the row's random word XOR that of its place in the row: any two rows, of any layers, differ in every
    word, at the price of one operation a word.
    """
    mask = np.uint64(_FINITE_MASKS[dtype])
    row_words = fold64(layer, kv, rows.astype(np.uint64)) & mask
    places = word_streams(np.zeros(1, dtype=np.uint64), -(-row_nbytes // 8)) & mask
    pattern: NDArray[np.uint8] = (row_words[:, None] ^ places).view(np.uint8)
    return pattern[:, :row_nbytes]


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
        step = max(1, _FILL_NBYTES // group.row_nbytes)
        for layer, position in zip(group.layers, positions, strict=True):
            raw = kv_caches[position].view(torch.uint8).reshape(group.kv_size, -1, group.row_nbytes).numpy()
            for kv in range(group.kv_size):
                for start in range(0, raw.shape[1], step):
                    rows = np.arange(start, min(start + step, raw.shape[1]))
                    raw[kv, start : start + len(rows)] = pattern_rows(
                        layer, kv, rows, row_nbytes=group.row_nbytes, dtype=group.dtype
                    )
