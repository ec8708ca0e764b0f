"""Every byte that comes back is the byte that was stored: dtypes, layer groups, placements, world sizes."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_ray.build import build_engine
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.kv_layer_groups import KVLayerGroupsManager
from lmcache_ray.metadata import LMCacheMetadata
from tests.unit.engine_builders import World, make_config, make_world, poison, random_rows, rows_of

TWO_GROUPS = "(2,2,8,2,4):{}:2;(1,2,8,3,5):{}:1"
THREE_GROUPS = "(2,2,8,1,3):{}:2;(1,2,8,4,2):{}:1;(3,2,8,2,7):{}:3"
MLA_GROUPS = "(2,1,8,1,9):{}:2;(1,8,5):{}:1"
DTYPES = [dtype.value for dtype in KVDtype]


def check_round_trip(world: World) -> None:
    """Store, poison, retrieve elsewhere: the bytes arrive where they should and nowhere else."""
    tokens = list(range(100, 127))
    source, target = random_rows(27, seed=1), random_rows(27, seed=2)
    originals = [copy.deepcopy(kv) for kv in world.kvs]
    assert world.store(tokens, source) == 24
    for kv in world.kvs:
        poison(kv)
    blank = copy.deepcopy(world.kvs)
    assert world.retrieve(tokens, target) == list(range(24))
    untouched = np.setdiff1d(np.arange(64), target[:24])
    for rank, (kv, original) in enumerate(zip(world.kvs, originals, strict=True)):
        assert rows_of(kv, target[:24]) == rows_of(original, source[:24]), f"rank {rank}"
        assert rows_of(kv, untouched) == rows_of(blank[rank], untouched), f"rank {rank}"
    world.check_idle()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("template", "use_mla"), [(TWO_GROUPS, False), (THREE_GROUPS, False), (MLA_GROUPS, True)])
def test_groups_of_different_heads_and_head_sizes(
    tmp_path: Path, world_size: int, template: str, use_mla: bool
) -> None:
    spec = template.format("bfloat16", "float8_e5m2", "float32")
    with make_world(tmp_path, world_size, spec=spec, use_mla=use_mla) as world:
        check_round_trip(world)


@pytest.mark.parametrize("use_mla", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_beside_another(tmp_path: Path, dtype: str, use_mla: bool) -> None:
    other = DTYPES[DTYPES.index(dtype) - 1]
    spec = (MLA_GROUPS if use_mla else TWO_GROUPS).format(dtype, other)
    with make_world(tmp_path, 2, spec=spec, use_mla=use_mla) as world:
        kv = world.kvs[0]
        if kv[0].is_floating_point():
            values = kv[0].to(torch.float32)
            assert values.isnan().any() and (torch.signbit(values) & (values == 0)).any(), "the test tests nothing"
        check_round_trip(world)


@pytest.mark.parametrize("use_mla", [False, True])
def test_a_kv_shape_without_groups(tmp_path: Path, use_mla: bool) -> None:
    with make_world(tmp_path, 2, use_mla=use_mla) as world:
        check_round_trip(world)


def test_a_first_rank_world_keeps_one_copy(tmp_path: Path) -> None:
    with make_world(tmp_path, 4, use_mla=True) as world:
        world.store(list(range(8)), random_rows(8))
        shards = [engine._parts.shard for engine in world.engines]
        assert [shard is not None for shard in shards] == [True, False, False, False]
        assert shards[0] is not None and shards[0].slots.num_committed == 2


def test_layers_of_a_group_need_not_be_adjacent(tmp_path: Path) -> None:
    wide, narrow = (2, 4, 4, 2, 8), (2, 4, 4, 1, 4)
    shapes = {"l0": wide, "l1": narrow, "l2": wide, "l3": narrow, "l4": narrow}
    kv = {name: torch.randn(shape).to(torch.float16) for name, shape in shapes.items()}
    manager = KVLayerGroupsManager()
    manager.build_kv_layer_groups(kv)
    assert [group.layer_indices for group in manager.kv_layer_groups] == [[0, 2], [1, 3, 4]]
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.float16, (5, 2, 4, 1, 4), kv_layer_groups_manager=manager)
    engine = build_engine(make_config(tmp_path), metadata)
    rows = random_rows(12, 16)
    originals = copy.deepcopy(list(kv.values()))
    assert engine.store(list(range(12)), kvcaches=kv, slot_mapping=rows) == 12
    poison(list(kv.values()))
    assert int(engine.retrieve(list(range(12)), kvcaches=kv, slot_mapping=rows).sum()) == 12
    for after, before in zip(kv.values(), originals, strict=True):
        assert rows_of([after], rows) == rows_of([before], rows)
    engine.close()


def test_three_dimensional_tensors_of_an_mla_rank(tmp_path: Path) -> None:
    with make_world(tmp_path, 1, use_mla=True) as world:
        flat = [tensor.reshape(16, 4, 16).clone() for tensor in world.kvs[0]]
        rows, engine = random_rows(8), world.engines[0]
        assert engine.store(list(range(8)), kvcaches=flat, slot_mapping=rows) == 8
        poison(world.kvs[0])
        assert int(engine.retrieve(list(range(8)), kvcaches=world.kvs[0], slot_mapping=rows).sum()) == 8
        assert rows_of(world.kvs[0], rows) == rows_of([tensor[None, :, :, None] for tensor in flat], rows)
