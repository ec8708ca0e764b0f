"""Layer groups as an engine's paged KV tensors tell them."""

import pytest
import torch

from lmcache_ray.errors import LayoutError
from lmcache_ray.kv_layer_groups import KVLayerGroupInfo, KVLayerGroupsManager

WIDE = torch.Size((2, 8, 16, 4, 32))
NARROW = torch.Size((2, 8, 16, 2, 8))


def kv(shape: torch.Size, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_groups_by_exact_shape_and_dtype_in_order_of_the_first_layer() -> None:
    manager = KVLayerGroupsManager()
    manager.build_kv_layer_groups(
        {"z": kv(NARROW), "a": kv(WIDE), "m": kv(NARROW), "b": kv(WIDE, torch.bfloat16), "c": kv(WIDE)}
    )
    assert manager.num_groups == 3
    assert [group.layer_names for group in manager.kv_layer_groups] == [["z", "m"], ["a", "c"], ["b"]]
    assert [group.layer_indices for group in manager.kv_layer_groups] == [[0, 2], [1, 4], [3]]
    assert [group.shape for group in manager.kv_layer_groups] == [NARROW, WIDE, WIDE]
    assert [group.dtype for group in manager.kv_layer_groups] == [torch.float16, torch.float16, torch.bfloat16]
    assert [group.hidden_dim_size for group in manager.kv_layer_groups] == [16, 128, 128]
    assert [group.num_layers for group in manager.kv_layer_groups] == [2, 2, 1]


def test_building_again_or_from_nothing_does_nothing() -> None:
    manager = KVLayerGroupsManager()
    manager.build_kv_layer_groups({})
    assert manager == KVLayerGroupsManager() and manager.num_groups == 0 and manager
    manager.build_kv_layer_groups({"a": kv(WIDE)})
    manager.build_kv_layer_groups({"b": kv(NARROW)})
    assert [group.layer_names for group in manager.kv_layer_groups] == [["a"]]


def test_lookups_answer_none_for_what_is_absent() -> None:
    manager = KVLayerGroupsManager()
    manager.build_kv_layer_groups({"a": kv(WIDE), "b": kv(NARROW, torch.uint8)})
    first, second = manager.kv_layer_groups
    assert manager.get_group_by_layer_idx(1) is second and manager.get_group_by_layer_name("a") is first
    assert (manager.get_layer_shape(1), manager.get_layer_dtype(1)) == (NARROW, torch.uint8)
    assert first.contains_layer(0) and not first.contains_layer(1)
    assert first.contains_layer_name("a") and not first.contains_layer_name("b")
    assert manager.get_group_by_layer_idx(2) is None and manager.get_group_by_layer_name("c") is None
    assert manager.get_layer_shape(2) is None and manager.get_layer_dtype(-1) is None


def test_hidden_dim_of_mla_and_of_unknown_shapes() -> None:
    assert KVLayerGroupInfo(["a"], [0], torch.Size((8, 16, 576)), torch.bfloat16).hidden_dim_size == 576
    odd = KVLayerGroupInfo(["odd"], [0], torch.Size((8, 16, 4, 32)), torch.bfloat16)
    with pytest.raises(LayoutError, match=r"'odd'.*\[8, 16, 4, 32\]"):
        _ = odd.hidden_dim_size


def test_what_is_no_layer_is_refused_and_nothing_is_built() -> None:
    manager = KVLayerGroupsManager()
    with pytest.raises(LayoutError, match="layer b must be a tensor; got list"):
        manager.build_kv_layer_groups({"a": kv(WIDE), "b": [1]})  # type: ignore[dict-item]
    assert manager.num_groups == 0
    with pytest.raises(LayoutError, match="1 names for 2 layers"):
        KVLayerGroupInfo(["a"], [0, 1], WIDE, torch.float16)
