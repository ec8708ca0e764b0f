"""Where a rank's paged KV comes from."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cluster.kv_source import KVSpec, layer_groups_of, make_kv_caches, resolve_function
from cluster.rank_metadata import rank_metadata
from cluster.topology import RankPlace
from cluster.world import WorldSpec
from cluster.world_spec import world_spec
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.errors import ConfigError, LayoutError
from lmcache_ray.kv_pattern import pattern_rows
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import LayerGroupSpec, parse_kvcache_shape_spec

SPEC = "(2,2,6,2,4):float16:2;(1,2,6,1,3):int8:1"


@pytest.fixture
def world() -> WorldSpec:
    return world_spec(
        LMCacheEngineConfig(chunk_size=4, capacity_chunks=2, block_size=8),
        model_name="m",
        layer_groups=parse_kvcache_shape_spec(SPEC),
        kv_shape=None,
        kv_dtype=None,
        rank_layouts=None,
        world_size=4,
        use_mla=False,
        name=None,
        namespace=None,
    )


@pytest.fixture
def metadata(world: WorldSpec) -> LMCacheMetadata:
    return rank_metadata(world, RankPlace(2, 0, 2, "node"), 6)


def test_metadata_has_the_place_and_the_ranks_groups(metadata: LMCacheMetadata) -> None:
    assert (metadata.worker_id, metadata.local_worker_id) == (2, 0)
    assert (metadata.world_size, metadata.local_world_size) == (4, 2)
    groups = metadata.kv_layer_groups_manager.kv_layer_groups
    assert [(group.layer_indices, tuple(group.shape), group.dtype) for group in groups] == [
        ([0, 1], (2, 6, 8, 2, 4), torch.float16),
        ([2], (2, 6, 8, 1, 3), torch.int8),
    ]
    assert groups[1].layer_names == ["model.layers.2"]


def test_layer_groups_say_what_the_layout_says(world: WorldSpec) -> None:
    assert layer_groups_of(world.layout.ranks[3], 6) == parse_kvcache_shape_spec(SPEC)


def test_the_default_is_the_fixed_pattern(world: WorldSpec, metadata: LMCacheMetadata) -> None:
    layout = world.layout.ranks[2]
    caches = make_kv_caches(KVSpec(None, 6, 8), metadata, layout)
    assert [tuple(cache.shape) for cache in caches] == [(2, 6, 8, 2, 4), (2, 6, 8, 2, 4), (2, 6, 8, 1, 3)]
    rows = caches[1].view(torch.uint8).numpy().reshape(2, 48, 16)
    expected = pattern_rows(1, 1, np.arange(48), row_nbytes=16, dtype=layout.groups[0].dtype)
    assert np.array_equal(rows[1], expected)


def test_a_function_is_called_with_metadata_groups_and_blocks(world: WorldSpec, metadata: LMCacheMetadata) -> None:
    calls = []

    def source(
        given: LMCacheMetadata, groups: Sequence[LayerGroupSpec], num_blocks: int
    ) -> tuple[torch.Tensor, ...]:
        calls.append((given, list(groups), num_blocks))
        first = torch.zeros(2, 5, 8, 2, 4, dtype=torch.float16)
        return first, first.clone(), torch.zeros(2, 5, 8, 1, 3, dtype=torch.int8)

    caches = make_kv_caches(KVSpec(source, 6, 8), metadata, world.layout.ranks[2])
    assert isinstance(caches, list) and len(caches) == 3
    assert calls == [(metadata, parse_kvcache_shape_spec(SPEC), 6)]


def test_what_a_function_makes_must_fit_the_layout(world: WorldSpec, metadata: LMCacheMetadata) -> None:
    with pytest.raises(LayoutError, match="kvcaches has 0 layers; this rank's layout has 3"):
        make_kv_caches(KVSpec(lambda *_: [], 6, 8), metadata, world.layout.ranks[2])


def test_a_named_function_is_found() -> None:
    assert resolve_function("os.path:join", what="kv_source")("a", "b") == "a/b"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("os.path", 'must name a function as "module:function"'),
        (":join", 'must name a function as "module:function"'),
        ("os.path:", 'must name a function as "module:function"'),
        ("no_such_module:f", "module 'no_such_module' cannot be imported"),
        ("os.path:no_such", "module 'os.path' has no function 'no_such'"),
        ("os.path:sep", "module 'os.path' has no function 'sep'"),
    ],
)
def test_a_function_that_is_not_there_is_named_by_half(path: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_source '{path}'.*{named}"):
        resolve_function(path, what="kv_source")
