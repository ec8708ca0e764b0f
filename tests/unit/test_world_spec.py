"""From the arguments of a start to the world all its processes agree on."""

import pytest
import torch

from cluster.world_spec import kv_spec, world_spec
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import CapacityError, ConfigError, LayoutError, LMCacheRayError, ShapeSpecError
from lmcache_ray.layout import Placement, ShardSpec
from lmcache_ray.shape_spec import parse_kvcache_shape_spec

CONFIG = LMCacheEngineConfig(chunk_size=4, capacity_chunks=10, block_size=4)
GROUPS = parse_kvcache_shape_spec("(2,2,9,4,8):float16:2;(1,2,9,1,8):int8:1")
ARGUMENTS: dict[str, object] = {
    "model_name": "m",
    "layer_groups": None,
    "kv_shape": None,
    "kv_dtype": None,
    "rank_layouts": None,
    "world_size": 2,
    "use_mla": False,
    "name": None,
    "namespace": None,
}


def test_layer_groups_are_those_of_one_rank_and_heads_go_on_from_rank_to_rank() -> None:
    world = world_spec(CONFIG, **{**ARGUMENTS, "layer_groups": GROUPS})
    assert world.layout.placement is Placement.PER_RANK
    assert [[group.heads for group in rank.groups] for rank in world.layout.ranks] == [
        [range(0, 4), range(0, 1)],
        [range(4, 8), range(1, 2)],
    ]
    assert (world.num_slots, world.block_size, world.layout.chunk_size) == (10, 4, 4)
    assert (world.name, world.namespace) == ("default", "lmcache_ray")


def test_a_legacy_shape_makes_one_group() -> None:
    world = world_spec(CONFIG, **{**ARGUMENTS, "kv_shape": (3, 2, 4, 2, 8), "kv_dtype": torch.bfloat16})
    (group,) = world.layout.ranks[0].groups
    assert (group.num_layers, group.num_heads, group.head_size, group.dtype) == (3, 2, 8, KVDtype.BFLOAT16)


def test_mla_keeps_one_copy() -> None:
    groups = parse_kvcache_shape_spec("(2,9,16):bfloat16:2")
    world = world_spec(CONFIG, **{**ARGUMENTS, "layer_groups": groups, "use_mla": True, "world_size": 3})
    assert (world.layout.holders, world.layout.world_size) == ((0,), 3)


def test_layouts_of_ranks_are_taken_as_they_are() -> None:
    stages = [[ShardSpec((0,), range(2), 8, KVDtype.FLOAT16)], [ShardSpec((1, 2), range(2), 8, KVDtype.FLOAT16)]]
    world = world_spec(CONFIG, **{**ARGUMENTS, "rank_layouts": stages})
    assert [list(rank.groups) for rank in world.layout.ranks] == stages


def test_names_of_the_call_win_over_the_configuration() -> None:
    config = LMCacheEngineConfig(cluster_name="a", cluster_namespace="b", capacity_chunks=1)
    given = {**ARGUMENTS, "layer_groups": GROUPS}
    assert [getattr(world_spec(config, **given), key) for key in ("name", "namespace")] == ["a", "b"]
    given.update(name="c", namespace="d")
    assert [getattr(world_spec(config, **given), key) for key in ("name", "namespace")] == ["c", "d"]
    assert (config.cluster_name, config.cluster_namespace) == ("a", "b")


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({}, ConfigError, "the KV is not described"),
        ({"kv_shape": (1, 2, 4, 1, 8)}, ConfigError, "both or neither"),
        ({"kv_dtype": torch.float16}, ConfigError, "both or neither"),
        ({"rank_layouts": [[]]}, ConfigError, "describes 1 ranks; world_size is 2"),
        ({"rank_layouts": [[], []]}, LayoutError, "at least one layer group"),
        ({"layer_groups": GROUPS, "use_mla": True}, ShapeSpecError, "group 1 .*kv_dim 2 with MLA"),
        ({"layer_groups": []}, ShapeSpecError, "no layer group"),
        ({"layer_groups": GROUPS, "world_size": 0}, LMCacheRayError, "world_size"),
        ({"layer_groups": GROUPS, "name": "a:b"}, ConfigError, "a:b"),
    ],
)
def test_what_cannot_be_meant_is_named(
    arguments: dict[str, object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        world_spec(CONFIG, **{**ARGUMENTS, **arguments})


def test_the_smallest_rank_decides_the_number_of_slots() -> None:
    config = LMCacheEngineConfig(chunk_size=4, max_local_cpu_size=0.001)
    wide, narrow = (ShardSpec((layer,), range(heads), 64, KVDtype.FLOAT32) for layer, heads in enumerate((8, 1)))
    world = world_spec(config, **{**ARGUMENTS, "rank_layouts": [[wide], [narrow]]})
    assert world.num_slots == int(0.001 * 2**30) // world.layout.ranks[0].slot_nbytes
    with pytest.raises(CapacityError, match="larger than the arena"):
        world_spec(LMCacheEngineConfig(chunk_size=4, max_local_cpu_size=1e-6), **{**ARGUMENTS, "layer_groups": GROUPS})


@pytest.mark.parametrize(
    ("spec", "given", "num_blocks"),
    [("(2,2,9,4,8):float16:2", None, 9), ("(2,7,16):float16:2", None, 7), (None, None, 256), (None, 3, 3)],
)
def test_blocks_of_the_paged_kv(spec: str | None, given: int | None, num_blocks: int) -> None:
    groups = None if spec is None else parse_kvcache_shape_spec(spec)
    kv = kv_spec(CONFIG, groups, "module:function", given)
    assert (kv.num_blocks, kv.block_size, kv.source) == (num_blocks, 4, "module:function")


@pytest.mark.parametrize("num_blocks", [0, -1, True, 2.0])
def test_a_number_of_blocks_that_cannot_be_is_refused(num_blocks: object) -> None:
    with pytest.raises(ConfigError, match="num_blocks must be a whole number"):
        kv_spec(CONFIG, None, None, num_blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [0, -1, 10**9, True, 2.0])
def test_a_world_size_that_cannot_be_meant_is_refused_before_anything_is_built(world_size: object) -> None:
    with pytest.raises(ConfigError, match="world_size must be a whole number from 1 to 4096"):
        world_spec(CONFIG, **{**ARGUMENTS, "layer_groups": GROUPS, "world_size": world_size})  # type: ignore[arg-type]
