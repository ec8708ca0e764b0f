"""How far values may move when 16-bit KV is kept as 8-bit floats, and what happens to those that are no numbers."""

import numpy as np
import pytest
import torch

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import DamagedChunkError
from lmcache_ray.layout import RankLayout, ShardSpec
from lmcache_ray.storage.serde import make_serde
from lmcache_ray.torch_dtypes import to_torch_dtype

ROUNDED = (KVDtype.FLOAT16, KVDtype.BFLOAT16)
NUM_PLANES, CHUNK, HIDDEN = 4, 8, 16


def layout_of(dtype: KVDtype) -> RankLayout:
    return RankLayout(CHUNK, (ShardSpec(layers=(0, 1), heads=range(2), head_size=HIDDEN // 2, dtype=dtype),))


def through_fp8(values: torch.Tensor, dtype: KVDtype, num_tokens: int = CHUNK) -> torch.Tensor:
    """Float32 ``[planes, tokens, hidden]`` as the cache gives it back."""
    layout, serde = layout_of(dtype), make_serde("fp8")
    shard = values.to(to_torch_dtype(dtype)).contiguous().view(torch.uint8).reshape(-1).numpy()
    back = np.zeros(layout.slot_nbytes, np.uint8)
    serde.decode(serde.encode(shard, layout, num_tokens), back, layout)
    return torch.from_numpy(back).view(to_torch_dtype(dtype)).float().reshape(NUM_PLANES, CHUNK, HIDDEN)


def random_values(scale: float, dtype: KVDtype) -> torch.Tensor:
    """Normal values over several magnitudes, as `dtype` holds them."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(NUM_PLANES, CHUNK, HIDDEN, generator=generator)
    spread = 10.0 ** torch.randint(-4, 1, (NUM_PLANES, CHUNK, HIDDEN), generator=generator)
    return (normal * spread * scale).to(to_torch_dtype(dtype)).float()


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 5e3])
def test_the_error_is_within_the_promised_bound(dtype: KVDtype, scale: float) -> None:
    values = random_values(scale, dtype)
    back = through_fp8(values, dtype)
    scales = values.abs().amax(dim=(1, 2), keepdim=True) / 448
    own_rounding = torch.finfo(to_torch_dtype(dtype)).eps * values.abs() + torch.finfo(to_torch_dtype(dtype)).tiny
    bound = torch.maximum(values.abs() / 16, scales / 1024) + own_rounding
    assert ((back - values).abs() <= bound).all()
    assert (back.sign() * values.sign() >= 0).all()


@pytest.mark.parametrize("dtype", ROUNDED)
def test_planes_do_not_share_a_scale(dtype: KVDtype) -> None:
    values = torch.ones(NUM_PLANES, CHUNK, HIDDEN) * torch.tensor([1e-3, 1.0, 100.0, 3e4])[:, None, None]
    back = through_fp8(values, dtype)
    assert torch.allclose(back, values, rtol=1e-2)


@pytest.mark.parametrize("dtype", ROUNDED)
def test_the_largest_values_of_the_dtype_stay_finite(dtype: KVDtype) -> None:
    largest = torch.finfo(to_torch_dtype(dtype)).max
    values = torch.full((NUM_PLANES, CHUNK, HIDDEN), largest)
    values[:, ::2] = -largest
    assert torch.equal(through_fp8(values, dtype), values)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40])
def test_planes_of_almost_nothing(dtype: KVDtype, value: float) -> None:
    values = torch.full((NUM_PLANES, CHUNK, HIDDEN), value)
    back = through_fp8(values, dtype)
    assert back.isfinite().all() and (back.abs() <= 1e-39).all()
    assert torch.equal(back.signbit(), values.signbit())


@pytest.mark.parametrize("dtype", ROUNDED)
def test_what_is_no_number(dtype: KVDtype) -> None:
    values = torch.ones(NUM_PLANES, CHUNK, HIDDEN)
    values[0, 0, :3] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    values[1] = float("nan")
    values[2] = float("-inf")
    back = through_fp8(values, dtype)
    assert back[0, 0, 0].isnan()
    assert back[0, 0, 1:3].tolist() == [1.0, -1.0]
    assert (back[0, 1:] == 1.0).all() and (back[3] == 1.0).all()
    assert back[1].isnan().all()
    assert back[2].isfinite().all() and (back[2] <= 0).all()


def test_what_a_slot_held_before_does_not_spoil_the_scale() -> None:
    values = torch.ones(NUM_PLANES, CHUNK, HIDDEN)
    values[:, 5:] = 1e30
    back = through_fp8(values, KVDtype.BFLOAT16, num_tokens=5)
    assert (back[:, :5] == 1.0).all()
    assert not back[:, 5:].any()


def test_half_the_bytes_and_other_dtypes_as_they_are() -> None:
    specs = [
        ShardSpec(layers=(number,), heads=range(1), head_size=7, dtype=dtype)
        for number, dtype in enumerate((KVDtype.UINT8, KVDtype.FLOAT16, KVDtype.FLOAT32, KVDtype.FLOAT8_E5M2))
    ]
    layout, serde = RankLayout(3, tuple(specs)), make_serde("fp8")
    shard = np.random.default_rng(0).integers(0, 256, layout.slot_nbytes, dtype=np.uint8)
    encoded, back = serde.encode(shard, layout, 3), np.zeros(layout.slot_nbytes, np.uint8)
    assert memoryview(encoded).nbytes == 2 * 4 + 2 * 3 * 7 * (1 + 1 + 4 + 1)
    serde.decode(encoded, back, layout)
    for place in (0, 2, 3):
        group, offset = layout.groups[place], layout.group_offsets[place]
        end = offset + group.token_nbytes * 3
        assert np.array_equal(back[offset:end], shard[offset:end])


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_none_can_be_is_damage(scale: float) -> None:
    layout, serde = layout_of(KVDtype.BFLOAT16), make_serde("fp8")
    encoded = np.frombuffer(serde.encode(np.zeros(layout.slot_nbytes, np.uint8), layout, CHUNK), np.uint8).copy()
    encoded[:4].view(np.float32)[0] = scale
    with pytest.raises(DamagedChunkError, match="scale"):
        serde.decode(encoded.data, np.zeros(layout.slot_nbytes, np.uint8), layout)
