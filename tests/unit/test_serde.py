"""The serdes that lose nothing, and what all of them share."""

import sys

import numpy as np
import pytest

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import ConfigError, DamagedChunkError
from lmcache_ray.layout import RankLayout, ShardSpec
from lmcache_ray.storage.serde import NAMES, Serde, make_serde
from tests.unit.shard_builders import CHUNK_SIZE, meant, random_shard, world

LAYOUT = world().ranks[0]
EXACT = ("naive", "zstd")


@pytest.fixture(params=NAMES)
def serde(request: pytest.FixtureRequest) -> Serde:
    return make_serde(request.param)


@pytest.fixture(params=EXACT)
def exact(request: pytest.FixtureRequest) -> Serde:
    return make_serde(request.param)


def layout_of(*dtypes: KVDtype) -> RankLayout:
    """One group per dtype, of odd sizes."""
    specs = (
        ShardSpec(layers=(number,), heads=range(1), head_size=5, dtype=dtype) for number, dtype in enumerate(dtypes)
    )
    return RankLayout(3, tuple(specs))


def garbage(layout: RankLayout) -> np.ndarray:
    return np.full(layout.slot_nbytes, 0xEE, np.uint8)


def test_names_and_losses() -> None:
    made = [make_serde(name) for name in NAMES]
    assert [each.name for each in made] == list(NAMES) == ["naive", "zstd", "fp8"]
    assert [each.is_lossy for each in made] == [False, False, True]


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"remote_serde 'cachegen'.*naive, zstd, fp8"):
        make_serde("cachegen")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"zstandard.*pip install 'lmcache-ray\[zstd\]'"):
        make_serde("zstd")


@pytest.mark.parametrize("num_tokens", range(1, CHUNK_SIZE + 1))
def test_exact_serdes_give_back_every_row(exact: Serde, num_tokens: int) -> None:
    shard, back = random_shard(LAYOUT), garbage(LAYOUT)
    exact.decode(exact.encode(shard, LAYOUT, num_tokens), back, LAYOUT)
    assert meant(back, LAYOUT, num_tokens) == meant(shard, LAYOUT, num_tokens)


@pytest.mark.parametrize("dtype", KVDtype)
def test_exact_serdes_take_any_dtype(exact: Serde, dtype: KVDtype) -> None:
    layout = layout_of(dtype, KVDtype.UINT8, dtype)
    shard, back = random_shard(layout), garbage(layout)
    exact.decode(exact.encode(shard, layout, 3), back, layout)
    assert meant(back, layout, 3) == meant(shard, layout, 3)


def test_rows_without_tokens_and_gaps_leave_nothing_behind(serde: Serde) -> None:
    """What a slot held before, of another prompt, is not stored: two such slots give the same bytes."""
    one, other = random_shard(LAYOUT, 1), random_shard(LAYOUT, 2)
    serde.decode(serde.encode(one, LAYOUT, 3), back := garbage(LAYOUT), LAYOUT)
    for group, offset in zip(LAYOUT.groups, LAYOUT.group_offsets, strict=True):
        end = offset + group.token_nbytes * CHUNK_SIZE
        other[offset:end] = one[offset:end]
        planes = (group.kv_size * group.num_layers, CHUNK_SIZE, group.row_nbytes)
        other[offset:end].reshape(planes)[:, 3:] = 0x55
        assert not back[offset:end].reshape(planes)[:, 3:].any()
    assert bytes(serde.encode(one, LAYOUT, 3)) == bytes(serde.encode(other, LAYOUT, 3))


def test_the_source_may_change_after_encode_and_may_be_read_only(serde: Serde) -> None:
    shard = random_shard(LAYOUT)
    shard.flags.writeable = False
    encoded = serde.encode(shard, LAYOUT, CHUNK_SIZE)
    before = bytes(encoded)
    shard.flags.writeable = True
    shard[:] = 0
    assert bytes(encoded) == before


def test_what_does_not_fit_is_damaged(serde: Serde) -> None:
    encoded = bytes(serde.encode(random_shard(LAYOUT), LAYOUT, CHUNK_SIZE))
    for wrong in (b"", encoded[:-1], encoded[: len(encoded) // 2], encoded + b"\0", b"\0" * 1000):
        with pytest.raises(DamagedChunkError):
            serde.decode(wrong, garbage(LAYOUT), LAYOUT)


def test_another_layouts_shard_is_damaged(serde: Serde) -> None:
    other = layout_of(KVDtype.FLOAT16)
    encoded = serde.encode(random_shard(other), other, 3)
    with pytest.raises(DamagedChunkError):
        serde.decode(encoded, garbage(LAYOUT), LAYOUT)


def test_a_zstd_frame_is_not_unpacked_beyond_the_shard() -> None:
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(2**28))
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**28))
    for frame in (bomb, silent):
        assert len(frame) < 100_000
        with pytest.raises(DamagedChunkError, match="bytes, where a shard of this layout has"):
            make_serde("zstd").decode(frame, garbage(LAYOUT), LAYOUT)


def test_zstd_makes_bfloat16_kv_smaller() -> None:
    layout = RankLayout(64, (ShardSpec((0,), range(4), 64, KVDtype.BFLOAT16),))
    values = np.random.default_rng(0).normal(size=layout.slot_nbytes // 2).astype("<f4")
    shard = values.view("<u2")[1::2].copy().view(np.uint8)
    encoded = make_serde("zstd").encode(shard, layout, 64)
    assert memoryview(encoded).nbytes < 0.8 * layout.slot_nbytes
