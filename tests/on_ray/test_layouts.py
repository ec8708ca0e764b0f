"""TP 2 x PP 2: stages with different layers, groups and dtypes, so that no two ranks' shards are alike."""

from collections.abc import Iterator

import numpy as np
import pytest

from cluster.client import CacheCluster
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import ConfigError, LayoutError
from lmcache_ray.layout import ShardSpec
from tests.on_ray import rank_functions
from tests.on_ray.conftest import StartCluster
from tests.on_ray.kv_bytes import assert_same, odd_shards, shard_bytes

NUM_TOKENS = 12


def stage_0(tensor_rank: int) -> list[ShardSpec]:
    """Layers 0, 1, 2; the second group's layer lies between those of the first."""
    return [
        ShardSpec((0, 2), range(2 * tensor_rank, 2 * tensor_rank + 2), 4, KVDtype.FLOAT16),
        ShardSpec((1,), range(0, 1), 6, KVDtype.FLOAT8_E4M3FN, replica=tensor_rank),
    ]


def stage_1(tensor_rank: int) -> list[ShardSpec]:
    """Layers 3 to 9, with one dtype each."""
    heads = range(3 * tensor_rank, 3 * tensor_rank + 3)
    dtypes = [dtype for dtype in KVDtype if dtype is not KVDtype.FLOAT16]
    return [ShardSpec((3 + number,), heads, 1 + number, dtype) for number, dtype in enumerate(dtypes)]


RANK_LAYOUTS = [stage_0(0), stage_0(1), stage_1(0), stage_1(1)]


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> Iterator[CacheCluster]:
    with start_cluster(rank_layouts=RANK_LAYOUTS, world_size=4, num_blocks=8) as cluster:
        yield cluster
        cluster.check_integrity()


def test_every_dtype_is_there() -> None:
    assert {spec.dtype for layout in RANK_LAYOUTS for spec in layout} == set(KVDtype)
    assert len(KVDtype) == 7


def test_each_stage_stores_and_loads_its_own_layers(cluster: CacheCluster) -> None:
    tokens, rows = list(range(NUM_TOKENS)), np.arange(31, 31 - NUM_TOKENS, -1)
    cluster.run_on_ranks(rank_functions.fill, 1)
    stored = cluster.run_on_ranks(rank_functions.read_rows, rows)
    assert cluster.store(tokens, rows) == NUM_TOKENS
    cluster.run_on_ranks(rank_functions.poison)
    assert cluster.retrieve(tokens, np.arange(NUM_TOKENS)).all()
    assert_same(cluster.run_on_ranks(rank_functions.read_rows, np.arange(NUM_TOKENS)), stored)
    num_tokens, shards = cluster.get(tokens)
    assert num_tokens == NUM_TOKENS
    assert_same(shard_bytes(shards), stored)
    assert [len(shard) for shard in shards] == [2, 2, 6, 6]


def test_what_the_driver_puts_reaches_each_stage(cluster: CacheCluster) -> None:
    tokens, rows = list(range(100, 100 + NUM_TOKENS)), np.arange(NUM_TOKENS)
    shards = odd_shards(cluster.link.world.layout, NUM_TOKENS, seed=5)
    assert cluster.put(tokens, shards) == NUM_TOKENS
    cluster.run_on_ranks(rank_functions.poison)
    counts = cluster.run_on_ranks(rank_functions.retrieve, tokens, rows)
    assert counts == [[True] * NUM_TOKENS] * 4
    assert_same(cluster.run_on_ranks(rank_functions.read_rows, rows), shard_bytes(shards))


def test_a_shard_that_does_not_fit_its_rank_is_named(cluster: CacheCluster) -> None:
    shards = odd_shards(cluster.link.world.layout, NUM_TOKENS, seed=6)
    swapped = [shards[2], shards[1], shards[0], shards[3]]
    with pytest.raises(LayoutError, match=r"shards\[0\]"):
        cluster.put(list(range(200, 200 + NUM_TOKENS)), swapped)
    assert cluster.lookup(list(range(200, 200 + NUM_TOKENS))) == 0


def test_a_layout_for_each_rank_is_needed(start_cluster: StartCluster) -> None:
    with pytest.raises(ConfigError, match="rank_layouts describes 4 ranks; world_size is 3"):
        start_cluster(rank_layouts=RANK_LAYOUTS, world_size=3)
