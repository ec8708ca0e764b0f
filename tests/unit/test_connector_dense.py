"""Shards as tensors: the same bytes as the paged KV that they were taken from."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lmcache_ray.connector.dense import DenseConnector, empty_shard
from lmcache_ray.connector.paged import PagedConnector
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import LayoutError
from lmcache_ray.layout import RankLayout, ShardSpec
from tests.unit.engine_builders import make_kv, random_rows
from tests.unit.odd_tensors import memory_given_back

LAYOUT = RankLayout(
    8,
    (
        ShardSpec((1, 2), range(0, 2), 4, KVDtype.BFLOAT16),
        ShardSpec((0,), range(0, 3), 5, KVDtype.FLOAT8_E5M2),
    ),
)


def dense_from_paged(num_tokens: int) -> tuple[list[torch.Tensor], np.ndarray]:
    """Shard tensors made with torch alone, and the chunk's bytes as the paged connector gathers them."""
    kv, rows = make_kv(LAYOUT, 32, seed=5), random_rows(num_tokens, 32)
    index = torch.from_numpy(rows)
    tensors = []
    for group, positions in zip(LAYOUT.groups, LAYOUT.layer_positions(), strict=True):
        layers = [kv[position].view(torch.uint8).reshape(2, 32, -1)[:, index] for position in positions]
        tensors.append(torch.stack(layers, dim=1).view(kv[positions[0]].dtype))
        assert tensors[-1].shape == (2, group.num_layers, num_tokens, group.hidden_dim)
    shard = np.zeros(LAYOUT.slot_nbytes, dtype=np.uint8)
    PagedConnector(LAYOUT, kv).gather(shard, rows)
    return tensors, shard


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("num_tokens", [1, 5, 8])
def test_gather_makes_the_chunk_that_paged_kv_makes(num_tokens: int) -> None:
    tensors, expected = dense_from_paged(num_tokens)
    shard = np.zeros(LAYOUT.slot_nbytes, dtype=np.uint8)
    DenseConnector(LAYOUT, tensors, num_tokens, name="shards[0]").gather(shard, np.arange(num_tokens))
    assert shard.tobytes() == expected.tobytes()


@pytest.mark.parametrize("first_row", [0, 3])
def test_scatter_fills_exactly_the_named_rows(first_row: int) -> None:
    tensors, shard = dense_from_paged(8)
    target = empty_shard(LAYOUT, 20)
    for tensor in target:
        tensor.view(torch.uint8).fill_(9)
    rows = np.arange(4, 4 + 8 - first_row)
    DenseConnector(LAYOUT, target, 20, name="shard").scatter(shard, rows, first_row)
    for tensor, source in zip(target, tensors, strict=True):
        assert same_bytes(tensor[:, :, 4 : 12 - first_row], source[:, :, first_row:])
        assert set(tensor[:, :, :4].contiguous().view(torch.uint8).flatten().tolist()) == {9}
        assert set(tensor[:, :, 12 - first_row :].contiguous().view(torch.uint8).flatten().tolist()) == {9}


def test_slices_are_read_and_written_in_place() -> None:
    """What `get` returns is such a slice, and it may be put again."""
    tensors, shard = dense_from_paged(8)
    wide = empty_shard(LAYOUT, 12)
    for tensor in wide:
        tensor.view(torch.uint8).fill_(9)
    middle = [tensor[:, :, 2:10] for tensor in wide]
    connector = DenseConnector(LAYOUT, middle, 8, name="shard")
    connector.scatter(shard, np.arange(8), 0)
    assert all(same_bytes(tensor[:, :, 2:10], source) for tensor, source in zip(wide, tensors, strict=True))
    again = np.zeros_like(shard)
    connector.gather(again, np.arange(8))
    assert again.tobytes() == shard.tobytes()


def test_rows_that_do_not_lie_in_one_piece_can_be_read_but_not_written() -> None:
    tensors, shard = dense_from_paged(8)
    torn = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in tensors]
    connector = DenseConnector(LAYOUT, torn, 8, name="shards[1]")
    again = np.zeros_like(shard)
    connector.gather(again, np.arange(8))
    assert again.tobytes() == shard.tobytes()
    with pytest.raises(LayoutError, match=r"shards\[1\]\[0\] cannot be written"):
        connector.scatter(shard, np.arange(8), 0)


def test_no_tokens_is_a_shard_too() -> None:
    connector = DenseConnector(LAYOUT, empty_shard(LAYOUT, 0), 0, name="shard")
    assert connector.num_slots == 0
    connector.gather(np.zeros(LAYOUT.slot_nbytes, dtype=np.uint8), np.arange(0))


def only_a_shape() -> torch.Tensor:
    """A tensor as compilers use them."""
    with FakeTensorMode():
        return torch.zeros(2, 2, 8, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ([], "one tensor for each of 2 layer groups"),
        (empty_shard(LAYOUT, 8)[0], "one tensor for each"),
        ([*empty_shard(LAYOUT, 8), torch.zeros(1)], "one tensor for each"),
        ([empty_shard(LAYOUT, 8)[0], np.zeros(3)], r"shards\[0\]\[1\] is a ndarray"),
        (empty_shard(LAYOUT, 7), r"shards\[0\]\[0\] is torch.bfloat16 \[2, 2, 7, 8\]; .* bfloat16 \[2, 2, 8, 8\]"),
        ([tensor.to(torch.float32) for tensor in empty_shard(LAYOUT, 8)], r"shards\[0\]\[0\] is torch.float32"),
        ([tensor.to("meta") for tensor in empty_shard(LAYOUT, 8)], r"shards\[0\]\[0\] is on meta"),
        ([empty_shard(LAYOUT, 8)[0].to_sparse(), empty_shard(LAYOUT, 8)[1]], r"\[0\] is a torch.sparse_coo tensor"),
        ([torch.nested.nested_tensor([torch.zeros(4)], layout=torch.jagged)] * 2, r"\[0\] is a nested tensor"),
        ([memory_given_back(tensor) for tensor in empty_shard(LAYOUT, 8)], r"\[0\] has .* not all of its memory"),
        ([memory_given_back(tensor, nbytes_left=99) for tensor in empty_shard(LAYOUT, 8)], "not all of its memory"),
        ([only_a_shape(), empty_shard(LAYOUT, 8)[1]], r"shards\[0\]\[0\] cannot be read as plain memory"),
    ],
)
def test_tensors_that_do_not_fit_name_the_group(tensors: object, named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        DenseConnector(LAYOUT, tensors, 8, name="shards[0]")  # type: ignore[arg-type]
