"""The composition root: which of several statements wins, what is refused, and how large arenas become."""

import logging
from pathlib import Path

import pytest
import torch

from lmcache_ray.build import arena_spec, build_engine, build_world, hasher_of, num_slots_of, resolve
from lmcache_ray.connector.paged import PagedConnector
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import CapacityError, ConfigError, MetadataError, ShapeSpecError
from lmcache_ray.layout import Placement
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.unit.engine_builders import make_config, make_kv, make_metadata, make_world, random_rows

TWO_GROUPS = parse_kvcache_shape_spec("(2,2,8,2,4):float16:2;(1,2,8,3,5):int8:1")
MIB = 2**20


def test_the_configuration_decides_the_chunk_size(tmp_path: Path) -> None:
    metadata, layout = resolve(make_config(tmp_path, chunk_size=32), make_metadata(), None)
    assert (metadata.chunk_size, layout.chunk_size) == (32, 32)
    assert metadata.get_shapes() == [torch.Size((2, 2, 32, 8))]


def test_layer_groups_decide_the_layout_and_reach_the_metadata(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        metadata, layout = resolve(make_config(tmp_path), make_metadata(2), TWO_GROUPS)
    assert "kv_shape" in caplog.text and "ignored" in caplog.text
    assert metadata.get_num_groups() == 2 and metadata.get_dtypes() == [torch.float16, torch.int8]
    assert metadata.get_shapes(5) == [torch.Size((2, 2, 5, 8)), torch.Size((2, 1, 5, 15))]
    groups = layout.ranks[1].groups
    assert [(group.layers, group.heads, group.dtype) for group in groups] == [
        ((0, 1), range(2, 4), KVDtype.FLOAT16),
        ((2,), range(3, 6), KVDtype.INT8),
    ]


def test_groups_that_agree_with_the_shape_are_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        resolve(make_config(tmp_path), make_metadata(), parse_kvcache_shape_spec("(2,2,99,2,4):float16:2"))
    assert caplog.text == ""


def test_mla_decides_the_placement(tmp_path: Path) -> None:
    _, layout = resolve(make_config(tmp_path), make_metadata(3, use_mla=True), None)
    assert (layout.placement, layout.holders) == (Placement.FIRST_RANK, (0,))


def test_an_engine_shows_the_name_of_its_instance(tmp_path: Path) -> None:
    engine = build_engine(make_config(tmp_path, lmcache_instance_id="blue"), make_metadata())
    assert repr(engine) == "<LMCacheEngine 'blue' rank 0 of 1, open>"
    engine.close()


def test_a_world_has_one_engine_per_rank(tmp_path: Path) -> None:
    engines = build_world(make_config(tmp_path), make_metadata(3), layer_groups=TWO_GROUPS)
    places = [
        (m.worker_id, m.local_worker_id, m.world_size, m.local_world_size)
        for m in (engine.metadata for engine in engines)
    ]
    assert places == [(0, 0, 3, 3), (1, 1, 3, 3), (2, 2, 3, 3)]
    assert repr(engines[2]) == "<LMCacheEngine rank 2 of 3, open>"
    for engine in engines:
        engine.close()


def test_engines_built_alone_share_nothing(tmp_path: Path) -> None:
    engines = [build_engine(make_config(tmp_path), make_metadata(2, rank)) for rank in range(2)]
    kv, rows = make_kv(engines[0]._parts.layout.ranks[0], 64, seed=0), random_rows(8)
    assert engines[1].store(range(8), kvcaches=kv, slot_mapping=rows) == 8
    assert [engine.lookup(range(8)) for engine in engines] == [0, 8]
    for engine in engines:
        engine.close()


def test_a_connector_of_the_caller_serves_calls_without_kvcaches(tmp_path: Path) -> None:
    metadata, layout = resolve(make_config(tmp_path), make_metadata(), None)
    kv = make_kv(layout.ranks[0], 64, seed=0)
    engine = build_engine(make_config(tmp_path), metadata, connector=PagedConnector(layout.ranks[0], kv))
    assert engine.store(range(8), slot_mapping=random_rows(8)) == 8
    assert int(engine.retrieve(range(8), slot_mapping=random_rows(8)).sum()) == 8
    engine.close()


def test_ranks_of_a_first_rank_world_built_alone_need_the_functions(tmp_path: Path) -> None:
    metadata = make_metadata(2, 1, use_mla=True)
    with pytest.raises(ConfigError, match=r"rank 1 of an MLA world of 2 .*build_world"):
        build_engine(make_config(tmp_path), metadata)
    with pytest.raises(ConfigError, match="go together"):
        build_engine(make_config(tmp_path), metadata, broadcast_fn=lambda tensor, src: None)
    alone = build_engine(make_config(tmp_path), make_metadata(1, use_mla=True))
    alone.close()


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with pytest.raises(ShapeSpecError, match="kv_dim 2 with MLA"):
        build_engine(config, make_metadata(use_mla=True), layer_groups=TWO_GROUPS)
    with pytest.raises(ShapeSpecError, match="no layer group"):
        build_engine(config, make_metadata(), layer_groups=[])
    mla_with_two = make_metadata(use_mla=True)
    mla_with_two.__dict__["kv_shape"] = (2, 2, 4, 1, 16)
    with pytest.raises(MetadataError, match="kv_dim 2 with MLA"):
        build_engine(config, mla_with_two)


def test_the_number_of_slots_follows_from_the_size_or_is_given(tmp_path: Path) -> None:
    _, layout = resolve(make_config(tmp_path), make_metadata(2), None)
    slot_nbytes = layout.ranks[0].slot_nbytes
    assert slot_nbytes == 4 * 2 * 2 * 16
    by_size = make_config(tmp_path, capacity_chunks=None, max_local_cpu_size=1 / 1024)
    assert num_slots_of(by_size, layout) == MIB // slot_nbytes
    assert num_slots_of(make_config(tmp_path, capacity_chunks=7, max_local_cpu_size=1), layout) == 7
    spec = arena_spec(layout, 1, num_slots=7, namespace="ns", name="n")
    assert (spec.rank, spec.world_size, spec.fingerprint) == (1, 2, layout.fingerprint)
    assert (spec.geometry.num_slots, spec.geometry.slot_nbytes) == (7, slot_nbytes)


def test_a_chunk_larger_than_the_arena_is_refused_with_both_sizes(tmp_path: Path) -> None:
    config = make_config(tmp_path, capacity_chunks=None, max_local_cpu_size=1 / 1024, chunk_size=20000)
    with pytest.raises(CapacityError, match=rf"{20000 * 64} bytes.*{MIB} bytes"):
        build_engine(config, make_metadata())
    assert list(tmp_path.iterdir()) == []


def test_arenas_that_do_not_fit_together_are_refused_before_any_is_made(tmp_path: Path) -> None:
    config = make_config(tmp_path, capacity_chunks=10**9)
    with pytest.raises(CapacityError, match=r"rank 0: \d+, rank 1: \d+"):
        build_world(config, make_metadata(2))
    assert list(tmp_path.iterdir()) == []


def test_a_first_rank_world_reserves_memory_once(tmp_path: Path) -> None:
    with make_world(tmp_path, 4, use_mla=True) as world:
        assert [engine._parts.shard is None for engine in world.engines] == [False, True, True, True]


def test_keys_are_of_model_revision_and_chunk_size(tmp_path: Path) -> None:
    configs = [
        make_config(tmp_path),
        make_config(tmp_path, model_revision="r"),
        make_config(tmp_path, chunk_size=2),
    ]
    keys = {hasher_of(config, model).keys(range(4))[0] for config in configs for model in ("m", "n")}
    assert len(keys) == 6
    assert hasher_of(make_config(tmp_path, save_unfull_chunk=True), "m").spans(3) == [(0, 3)]
