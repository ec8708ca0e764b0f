"""The fixed pattern: the same everywhere, different in every place, finite in every dtype."""

from hashlib import sha256

import numpy as np
import pytest
import torch

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.kv_pattern import allocate_kv_caches, fill_fixed_pattern, pattern_rows
from lmcache_ray.layout import RankLayout, ShardSpec
from lmcache_ray.torch_dtypes import to_torch_dtype

LAYOUT = RankLayout(4, (ShardSpec((0, 2), range(2), 4, KVDtype.FLOAT16), ShardSpec((1,), range(1), 3, KVDtype.INT8)))


def test_caches_have_the_shape_of_their_group_in_layer_order() -> None:
    caches = allocate_kv_caches(LAYOUT, num_blocks=[6, 3], block_size=4)
    assert [tuple(cache.shape) for cache in caches] == [(2, 6, 4, 2, 4), (2, 3, 4, 1, 3), (2, 6, 4, 2, 4)]
    assert [cache.dtype for cache in caches] == [torch.float16, torch.int8, torch.float16]
    assert not any(cache.view(torch.uint8).any() for cache in caches)


def test_a_fill_writes_every_row_as_the_function_says() -> None:
    caches = allocate_kv_caches(LAYOUT, num_blocks=[6, 3], block_size=4)
    fill_fixed_pattern(LAYOUT, caches)
    for layer, (cache, row_nbytes, dtype) in enumerate(
        [(caches[0], 16, KVDtype.FLOAT16), (caches[1], 3, KVDtype.INT8), (caches[2], 16, KVDtype.FLOAT16)]
    ):
        raw = cache.view(torch.uint8).reshape(2, -1, row_nbytes).numpy()
        for kv in range(2):
            expected = pattern_rows(layer, kv, np.arange(raw.shape[1]), row_nbytes=row_nbytes, dtype=dtype)
            assert raw[kv].tobytes() == expected.tobytes()


def test_a_long_fill_is_seamless() -> None:
    layout = RankLayout(4, (ShardSpec((0,), range(1), 1, KVDtype.UINT8),))
    (cache,) = allocate_kv_caches(layout, num_blocks=[5000], block_size=4)
    fill_fixed_pattern(layout, [cache])
    expected = pattern_rows(0, 1, np.arange(20000), row_nbytes=1, dtype=KVDtype.UINT8)
    assert cache[1].flatten().numpy().tobytes() == expected.tobytes()


def test_every_layer_plane_and_row_differs() -> None:
    rows = [
        row.tobytes()
        for layer in range(3)
        for kv in range(2)
        for row in pattern_rows(layer, kv, np.arange(50), row_nbytes=16, dtype=KVDtype.FLOAT16)
    ]
    assert len(set(rows)) == len(rows)


def test_any_rows_can_be_asked_for_in_any_order() -> None:
    whole = pattern_rows(1, 0, np.arange(10), row_nbytes=12, dtype=KVDtype.UINT8)
    some = pattern_rows(1, 0, np.array([7, 2, 2]), row_nbytes=12, dtype=KVDtype.UINT8)
    assert some.tobytes() == whole[[7, 2, 2]].tobytes()


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_every_value_is_finite(dtype: KVDtype) -> None:
    rows = pattern_rows(0, 0, np.arange(2000), row_nbytes=16, dtype=dtype)
    values = torch.from_numpy(rows.copy()).view(to_torch_dtype(dtype)).to(torch.float32)
    assert torch.isfinite(values).all()
    assert len(set(rows.flatten().tolist())) > 100, "it is a pattern, not a constant"


def test_it_is_the_same_in_every_process_and_version() -> None:
    rows = pattern_rows(3, 1, np.arange(5), row_nbytes=20, dtype=KVDtype.FLOAT32)
    assert sha256(rows.tobytes()).hexdigest() == "f8cd6374cd72ab2fb4e42d31266b0317d6932dc718b4d4978f215ae6f40b0844"
