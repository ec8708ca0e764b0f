"""LMCacheMetadata: LMCache's signature, and values that cannot be."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch

from lmcache_ray.errors import MetadataError
from lmcache_ray.kv_layer_groups import KVLayerGroupsManager
from lmcache_ray.metadata import LMCacheMetadata, Placement

GOOD: dict[str, object] = {
    "model_name": "llama-7b",
    "world_size": 4,
    "local_world_size": 2,
    "worker_id": 3,
    "local_worker_id": 1,
    "kv_dtype": torch.float16,
    "kv_shape": (32, 2, 256, 8, 128),
}


def metadata(**changes: object) -> LMCacheMetadata:
    return LMCacheMetadata(**(GOOD | changes))  # type: ignore[arg-type]


def test_positional_and_keyword_forms_are_equal() -> None:
    manager = KVLayerGroupsManager()
    extra = {"a": 1}
    positional = LMCacheMetadata(
        "m", 4, 2, 3, 1, torch.float16, (2, 2, 256, 4, 16), True, "worker", "served", 64, manager, "e", extra
    )
    keyword = LMCacheMetadata(
        kv_connector_extra_config=extra, engine_id="e", kv_layer_groups_manager=manager, chunk_size=64, use_mla=True,
        served_model_name="served", role="worker", kv_shape=(2, 2, 256, 4, 16), kv_dtype=torch.float16,
        local_worker_id=1, worker_id=3, local_world_size=2, world_size=4, model_name="m",
    )  # fmt: skip
    assert positional == keyword
    assert dataclasses.astuple(positional)[:5] == ("m", 4, 2, 3, 1)
    assert [field.name for field in dataclasses.fields(LMCacheMetadata)] == [
        "model_name", "world_size", "local_world_size", "worker_id", "local_worker_id", "kv_dtype", "kv_shape",
        "use_mla", "role", "served_model_name", "chunk_size", "kv_layer_groups_manager", "engine_id",
        "kv_connector_extra_config",
    ]  # fmt: skip


def test_the_local_values_may_be_left_out() -> None:
    made = LMCacheMetadata(
        model_name="standalone_model", world_size=1, worker_id=0, kv_dtype=torch.float16, kv_shape=(2, 2, 256, 4, 16)
    )
    assert (made.local_world_size, made.local_worker_id, made.chunk_size) == (1, 0, 256)
    assert made.kv_layer_groups_manager == KVLayerGroupsManager()
    made = LMCacheMetadata("m", 4, worker_id=3, kv_dtype=torch.float16, kv_shape=(2, 2, 256, 4, 16))
    assert (made.local_world_size, made.local_worker_id) == (4, 3)


@pytest.mark.parametrize("missing", ["model_name", "world_size", "worker_id", "kv_dtype", "kv_shape"])
def test_a_missing_argument_is_a_type_error(missing: str) -> None:
    with pytest.raises(TypeError, match=missing):
        LMCacheMetadata(**{name: value for name, value in GOOD.items() if name != missing})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("world_size", value) for value in (0, -1, True, 1.0, "4", None)],
        *[("worker_id", value) for value in (-1, 4, 5, True, 0.0, "0")],
        *[("local_world_size", value) for value in (0, 5, True)],
        *[("local_worker_id", value) for value in (-1, 2, False)],
        *[("chunk_size", value) for value in (0, -3, True, 256.0, None)],
        *[("model_name", value) for value in ("", None, 5)],
        *[("use_mla", value) for value in (1, "true", None)],
        *[("kv_dtype", value) for value in ("float16", torch.float64, torch.complex64)],
        *[("kv_shape", value) for value in ((2, 2, 256, 4), (2, 2, 256, 4, 16, 1), "22222", 5)],
        ("role", 1),
        ("served_model_name", 1),
        ("engine_id", 1),
        ("kv_layer_groups_manager", []),
        ("kv_connector_extra_config", "{}"),
    ],
)
def test_an_impossible_value_names_the_field_and_itself(field: str, value: object) -> None:
    with pytest.raises((MetadataError, TypeError), match=field) as caught:
        metadata(**{field: value})
    if isinstance(caught.value, MetadataError):
        assert isinstance(caught.value, ValueError)
        assert f"LMCacheMetadata.{field} = {value!r} is not possible; accepted: " in str(caught.value)
    else:
        assert field in ("worker_id", "kv_dtype", "kv_shape") and value is None


@pytest.mark.parametrize(
    ("index", "name", "dim"),
    [
        (0, "num_layers", 0),
        (0, "num_layers", 10**9),
        (1, "kv_dim", 3),
        (1, "kv_dim", 0),
        (2, "chunk_size", -1),
        (3, "num_kv_heads", 0),
        (4, "head_size", 1.5),
        (4, "head_size", True),
        (4, "head_size", 2**31),
    ],
)
def test_an_impossible_dimension_is_named(index: int, name: str, dim: object) -> None:
    shape: list[object] = [2, 2, 256, 4, 16]
    shape[index] = dim
    with pytest.raises(MetadataError, match=rf"kv_shape\[{index}\] \({name}\) = {dim} is not possible"):
        metadata(kv_shape=shape)


def test_the_bound_says_where_it_comes_from() -> None:
    with pytest.raises(MetadataError, match=r"worker_id = 4 .* from 0 to 3, because world_size is 4"):
        metadata(worker_id=4)
    with pytest.raises(MetadataError, match=r"local_worker_id = 3 .* from 0 to 1, because local_world_size is 2"):
        LMCacheMetadata("m", 4, 2, 3, kv_dtype=torch.float16, kv_shape=(2, 2, 256, 4, 16))


def test_numpy_integers_and_lists_become_plain_values() -> None:
    made = metadata(world_size=np.int64(4), worker_id=np.int32(3), kv_shape=[np.int64(2), 2, 256, 4, 16])
    assert made == metadata(kv_shape=(2, 2, 256, 4, 16))
    assert type(made.world_size) is int and type(made.kv_shape) is tuple and type(made.kv_shape[0]) is int


def test_the_only_group_while_the_manager_is_empty() -> None:
    made = metadata()
    assert made.get_num_groups() == 1
    assert made.get_dtypes() == [torch.float16]
    assert made.get_shapes() == [torch.Size((2, 32, 256, 1024))]
    assert made.get_shapes(num_tokens=512) == [torch.Size((2, 32, 512, 1024))]
    assert made.get_shapes(0) == [torch.Size((2, 32, 0, 1024))]
    assert metadata(chunk_size=64).get_shapes() == [torch.Size((2, 32, 64, 1024))]
    for num_tokens in (-1, True, 1.5):
        with pytest.raises(MetadataError, match="num_tokens"):
            made.get_shapes(num_tokens)  # type: ignore[arg-type]


def test_the_managers_groups_come_first() -> None:
    manager = KVLayerGroupsManager()
    manager.build_kv_layer_groups(
        {
            "0": torch.empty(2, 3, 16, 4, 8, dtype=torch.bfloat16),
            "1": torch.empty(2, 3, 16, 2, 8, dtype=torch.uint8),
            "2": torch.empty(2, 3, 16, 4, 8, dtype=torch.bfloat16),
        }
    )
    made = metadata(kv_layer_groups_manager=manager)
    assert made.get_num_groups() == 2
    assert made.get_dtypes() == [torch.bfloat16, torch.uint8]
    assert made.get_shapes(5) == [torch.Size((2, 2, 5, 32)), torch.Size((2, 1, 5, 16))]


def test_groups_report_kv_size_1_with_mla_and_kv_shape_as_given() -> None:
    manager = KVLayerGroupsManager()
    manager.build_kv_layer_groups({"0": torch.empty(3, 16, 576, dtype=torch.bfloat16)})
    assert metadata(use_mla=True, kv_layer_groups_manager=manager).get_shapes() == [torch.Size((1, 1, 256, 576))]
    assert metadata(use_mla=True).get_shapes() == [torch.Size((2, 32, 256, 1024))]
    assert metadata(use_mla=True, kv_shape=(4, 1, 256, 1, 576)).get_shapes() == [torch.Size((1, 4, 256, 576))]


def test_rank_and_placement() -> None:
    assert metadata(worker_id=0).is_first_rank() and not metadata().is_first_rank()
    assert metadata().placement is Placement.PER_RANK
    assert metadata(use_mla=True).placement is Placement.FIRST_RANK


def test_it_behaves_like_a_frozen_dataclass() -> None:
    made = metadata()
    assert made != metadata(engine_id="e")
    changed = dataclasses.replace(made, chunk_size=64)
    assert changed == metadata(chunk_size=64) and made.chunk_size == 256
    assert "world_size=4, local_world_size=2, worker_id=3" in repr(made)
    with pytest.raises(MetadataError, match="world_size"):
        dataclasses.replace(made, world_size=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.worker_id = 9  # type: ignore[misc]
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    assert copy.deepcopy(made).kv_layer_groups_manager is not made.kv_layer_groups_manager


def test_managers_are_not_shared_by_default() -> None:
    one, other = metadata(), metadata()
    one.kv_layer_groups_manager.build_kv_layer_groups({"0": torch.empty(2, 3, 16, 4, 8)})
    assert (one.get_num_groups(), other.kv_layer_groups_manager.num_groups) == (1, 0)
