"""Rows of paged KV into a shard's bytes and back, against a plain loop over the documented layout."""

import copy
import weakref
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lmcache_ray.connector.paged import PagedConnector, PagedConnectors
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import LayoutError
from lmcache_ray.layout import RankLayout, ShardSpec
from tests.unit.engine_builders import KV, make_kv, poison, random_rows, row_nbytes
from tests.unit.odd_tensors import memory_given_back

CHUNK = 8
LAYOUT = RankLayout(
    CHUNK,
    (
        ShardSpec((1, 3), range(0, 2), 4, KVDtype.FLOAT16),
        ShardSpec((0,), range(0, 3), 5, KVDtype.FLOAT8_E4M3FN),
        ShardSpec((2, 4), range(2, 3), 7, KVDtype.FLOAT32),
    ),
)
RUN = np.arange(9, 9 + CHUNK)
MAPPINGS = {
    "scattered": random_rows(CHUNK),
    "run": RUN,
    "reversed": RUN[::-1].copy(),
    "partial": random_rows(3),
    "one": np.array([5]),
    "ends look like a run": np.array([0, 2, 1, 3]),
}


def shard_by_loop(layout: RankLayout, kv: KV, rows: np.ndarray) -> bytes:
    """The shard's bytes as `layout.py` draws them; unused rows and padding are zero."""
    shard = bytearray(layout.slot_nbytes)
    for group, offset, positions in zip(layout.groups, layout.group_offsets, layout.layer_positions(), strict=True):
        for plane, (kv_index, position) in enumerate(
            (kv_index, position) for kv_index in range(2) for position in positions
        ):
            raw = kv[position].view(torch.uint8).reshape(2, -1, row_nbytes(kv[position]))
            for index, row in enumerate(rows):
                start = offset + (plane * layout.chunk_size + index) * group.row_nbytes
                shard[start : start + group.row_nbytes] = raw[kv_index, row].numpy().tobytes()
    return bytes(shard)


@pytest.mark.parametrize("name", MAPPINGS)
def test_gather_puts_every_row_where_the_layout_says(name: str) -> None:
    rows, kv = MAPPINGS[name], make_kv(LAYOUT, 64, seed=3)
    before = copy.deepcopy(kv)
    shard = np.zeros(LAYOUT.slot_nbytes, dtype=np.uint8)
    PagedConnector(LAYOUT, kv).gather(shard, rows)
    assert shard.tobytes() == shard_by_loop(LAYOUT, kv, rows)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(kv, before, strict=True))


@pytest.mark.parametrize("first_row", [0, 1, 5])
@pytest.mark.parametrize("name", MAPPINGS)
def test_scatter_is_the_inverse_and_touches_no_other_row(name: str, first_row: int) -> None:
    rows = MAPPINGS[name]
    target = rows[: max(0, CHUNK - first_row)]
    shard = np.random.default_rng(1).integers(0, 256, LAYOUT.slot_nbytes, dtype=np.uint8)
    kv = make_kv(LAYOUT, 64, seed=3)
    poison(kv)
    blank = copy.deepcopy(kv)
    PagedConnector(LAYOUT, kv).scatter(shard, target, first_row)
    others = np.setdiff1d(np.arange(64), target)
    for tensor, before in zip(kv, blank, strict=True):
        raw, old = (side.view(torch.uint8).reshape(2, 64, -1) for side in (tensor, before))
        assert torch.equal(raw[:, others], old[:, others])
    again = np.zeros(LAYOUT.slot_nbytes, dtype=np.uint8)
    PagedConnector(LAYOUT, kv).gather(again, target)
    for group, offset in zip(LAYOUT.groups, LAYOUT.group_offsets, strict=True):
        for plane in range(2 * group.num_layers):
            start = offset + plane * CHUNK * group.row_nbytes
            moved, end = start + first_row * group.row_nbytes, len(target) * group.row_nbytes
            assert again[start : start + end].tobytes() == shard[moved : moved + end].tobytes()


def test_no_rows_is_nothing_to_do() -> None:
    kv = make_kv(LAYOUT, 64, seed=3)
    shard = np.full(LAYOUT.slot_nbytes, 7, dtype=np.uint8)
    connector, none = PagedConnector(LAYOUT, kv), np.array([], dtype=np.int64)
    connector.gather(shard, none)
    connector.scatter(shard, none, 0)
    assert set(shard.tolist()) == {7}


def test_mappings_and_tuples_are_taken_in_their_order() -> None:
    kv = make_kv(LAYOUT, 64, seed=3)
    shards = []
    for form in (kv, tuple(kv), {f"z{9 - index}": tensor for index, tensor in enumerate(kv)}):
        shard = np.zeros(LAYOUT.slot_nbytes, dtype=np.uint8)
        PagedConnector(LAYOUT, form).gather(shard, RUN)
        shards.append(shard.tobytes())
    assert all(one == other for one, other in pairwise(shards))


def test_the_smallest_layer_bounds_the_rows() -> None:
    kv = [*make_kv(LAYOUT, 64, seed=3)[:4], *make_kv(LAYOUT, 32, seed=3)[4:]]
    assert PagedConnector(LAYOUT, kv).num_slots == 32


def test_a_tensor_that_is_being_trained_is_read_all_the_same() -> None:
    layout = RankLayout(CHUNK, (ShardSpec((0,), range(1), 4, KVDtype.FLOAT32),))
    (tensor,) = make_kv(layout, 16, seed=1)
    shard = np.zeros(layout.slot_nbytes, dtype=np.uint8)
    PagedConnector(layout, [tensor.requires_grad_()]).gather(shard, np.arange(3))
    assert shard[:48].tobytes() == tensor.detach().view(torch.uint8).numpy().tobytes()[:48]


ONE = RankLayout(CHUNK, (ShardSpec((0,), range(0, 2), 4, KVDtype.FLOAT16),))
MLA = RankLayout(CHUNK, (ShardSpec((0,), range(0, 1), 4, KVDtype.FLOAT16, kv_size=1),))


@pytest.mark.parametrize(
    ("layout", "kvcaches", "named"),
    [
        (ONE, [], "kvcaches has 0 layers; this rank's layout has 1"),
        (ONE, torch.zeros(1, 2, 4, 4, 2, 4), "list or mapping.*Tensor"),
        (ONE, None, "list or mapping.*NoneType"),
        (ONE, ["x"], r"kvcaches\[0\] is a str"),
        (ONE, [torch.zeros(2, 4, 4, 2, 4)], "dtype torch.float32; the layout says float16"),
        (
            ONE,
            [torch.zeros(2, 4, 4, 4, 2).half()],
            r"\[2, 4, 4, 4, 2\]; the layout needs \[2, num_blocks, block_size, 2, 4\]",
        ),
        (ONE, [torch.zeros(1, 4, 4, 2, 4).half()], r"the layout needs \[2"),
        (ONE, [torch.zeros(4, 4, 8).half()], r"shape \[4, 4, 8\]"),
        (ONE, [torch.zeros(2, 0, 4, 2, 4).half()], "no rows"),
        (ONE, [torch.zeros(4, 2, 4, 2, 4).half().transpose(0, 1)], "not contiguous"),
        (ONE, [torch.zeros(2, 4, 4, 2, 4, device="meta").half()], "is on meta"),
        (ONE, [torch.zeros(2, 4, 4, 2, 4).half().to_sparse()], r"kvcaches\[0\] is a torch.sparse_coo tensor"),
        (ONE, [torch.nested.nested_tensor([torch.zeros(4).half()], layout=torch.jagged)], "is a nested tensor"),
        (ONE, [torch._neg_view(torch.zeros(2, 4, 4, 2, 4).half())], r"kvcaches\[0\] cannot be read as plain memory"),
        (MLA, [torch.zeros(4, 4, 5).half()], r"or \[num_blocks, block_size, 4\]"),
    ],
)
def test_tensors_that_do_not_fit_name_the_layer(layout: RankLayout, kvcaches: object, named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        PagedConnector(layout, kvcaches)  # type: ignore[arg-type]


def test_tensors_without_memory_are_refused() -> None:
    with FakeTensorMode():
        only_a_shape = torch.zeros(2, 4, 4, 2, 4, dtype=torch.float16)
    with pytest.raises(LayoutError, match=r"kvcaches\[0\] cannot be read as plain memory"):
        PagedConnector(ONE, [only_a_shape])
    for nbytes_left in (0, 2 * 4 * 4 * 2 * 4 * 2 - 1):
        cut = memory_given_back(torch.zeros(2, 4, 4, 2, 4).half(), nbytes_left=nbytes_left)
        with pytest.raises(LayoutError, match=r"kvcaches\[0\] has shape \[2, 4, 4, 2, 4\] but not all of its memory"):
            PagedConnector(ONE, [cut])


def shard_of(connector: PagedConnector, layout: RankLayout = LAYOUT) -> bytes:
    shard = np.zeros(layout.slot_nbytes, dtype=np.uint8)
    connector.gather(shard, RUN)
    return shard.tobytes()


def test_the_same_tensors_in_the_same_memory_are_connected_once() -> None:
    kv, connectors = make_kv(LAYOUT, 64, seed=3), PagedConnectors(LAYOUT)
    first = connectors.of(kv)
    for form in (kv, list(kv), tuple(kv), {f"z{9 - index}": tensor for index, tensor in enumerate(kv)}):
        assert connectors.of(form) is first
    kv[1].zero_()
    assert shard_of(connectors.of(kv)) == shard_by_loop(LAYOUT, kv, RUN)


def other_tensor(kv: KV, other: torch.Tensor) -> None:
    kv[1] = other


def other_memory(kv: KV, other: torch.Tensor) -> None:
    kv[1].set_(other)


def other_data(kv: KV, other: torch.Tensor) -> None:
    kv[1].data = other


@pytest.mark.parametrize("change", [other_tensor, other_memory, other_data])
@pytest.mark.parametrize("num_rows", [64, 32])
def test_a_layer_in_other_memory_is_connected_anew(change: Callable[[KV, torch.Tensor], None], num_rows: int) -> None:
    kv, connectors = make_kv(LAYOUT, 64, seed=3), PagedConnectors(LAYOUT)
    connectors.of(kv)
    change(kv, make_kv(LAYOUT, num_rows, seed=4)[1])
    assert connectors.of(kv).num_slots == num_rows
    assert shard_of(connectors.of(kv)) == shard_by_loop(LAYOUT, kv, RUN)


def test_a_layer_that_does_not_fit_any_more_is_refused_and_the_others_are_not() -> None:
    (kept,), (kv,) = make_kv(ONE, 16, seed=3), make_kv(ONE, 16, seed=4)
    connectors = PagedConnectors(ONE)
    first = connectors.of([kept])
    for wrong in ([], [kept, kept], [kept.float()], ["x"], [kept[:1]]):
        with pytest.raises(LayoutError, match="kvcaches"):
            connectors.of(wrong)  # type: ignore[arg-type]
        assert connectors.of([kept]) is first
    connectors.of([kv])
    kv.transpose_(1, 2)  # of equal sizes: neither shape nor address tell
    with pytest.raises(LayoutError, match=r"kvcaches\[0\] is not contiguous"):
        connectors.of([kv])


@pytest.mark.parametrize("gone", [0, 4])
def test_connectors_keep_no_tensor_alive_and_go_with_the_first(gone: int) -> None:
    kv, connectors = make_kv(LAYOUT, 64, seed=3), PagedConnectors(LAYOUT)
    connector = weakref.ref(connectors.of(kv))
    tensor = weakref.ref(kv[gone])
    assert connector() is not None
    del kv[gone]
    assert tensor() is None and connector() is None


def test_a_connector_in_use_outlives_the_tensors_it_was_built_of() -> None:
    kv, connectors = make_kv(LAYOUT, 64, seed=3), PagedConnectors(LAYOUT)
    connector, expected = connectors.of(kv), shard_by_loop(LAYOUT, kv, RUN)
    kv.clear()
    assert shard_of(connector) == expected
