"""What single calls and batches promise: counts, rows that stay untouched, errors that name arguments, pins, clear."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from cluster.client import CacheCluster, Request
from lmcache_ray.errors import InvalidRequestError, LayoutError
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray import rank_functions
from tests.on_ray.conftest import StartCluster
from tests.on_ray.kv_bytes import assert_same, odd_shards, shard_bytes

C = 4
LENGTHS = [0, 1, C - 1, C, C + 1, 2 * C - 1, 129 * C]
NUM_ROWS = 130 * C


@pytest.fixture(scope="module")
def shared(start_cluster: StartCluster, ray_nodes: list[str]) -> CacheCluster:
    """Two ranks, placed by hand: rank 0 on the other node, rank 1 on the driver's. KV by a named function."""
    return start_cluster(
        {"chunk_size": C, "capacity_chunks": 140, "lease_timeout_s": 60},
        layer_groups=parse_kvcache_shape_spec(f"(1,2,{NUM_ROWS // C},1,4):float16:1;(1,2,{NUM_ROWS // C},2,3):int8:1"),
        world_size=2,
        nodes=ray_nodes[::-1],
        kv_source="cluster.replay_rank:zeroed_kv",
    )


@pytest.fixture
def cluster(shared: CacheCluster) -> Iterator[CacheCluster]:
    """`shared`, empty before and sound after each test."""
    shared.clear()
    yield shared
    shared.check_integrity()
    status = shared.status()
    assert (status.leases, status.problems) == (0, ())
    memory = status.tiers["cpu"]
    assert (memory.writing, memory.quarantined) == (0, 0)
    assert memory.ready + memory.free == memory.capacity == 140


def test_ranks_are_placed_by_hand(cluster: CacheCluster, ray_nodes: list[str]) -> None:
    assert [rank.node_id for rank in cluster.status().ranks] == ray_nodes[::-1]
    assert [rank.local_world_size for rank in cluster.status().ranks] == [1, 1]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_lookup_store_and_retrieve_count_alike(cluster: CacheCluster, num_tokens: int) -> None:
    tokens, rows = list(range(num_tokens)), np.random.default_rng(1).permutation(NUM_ROWS)[:num_tokens]
    full = num_tokens // C * C
    assert cluster.lookup(tokens) == 0
    assert cluster.store(tokens, rows) == full
    assert cluster.lookup(tokens) == full
    assert cluster.store(tokens, rows) == full
    mask = cluster.retrieve(tokens, rows)
    assert mask.dtype == torch.bool and mask.tolist() == [True] * full + [False] * (num_tokens - full)
    assert cluster.get(tokens)[0] == full
    assert cluster.status().tiers["cpu"].ready == full // C


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_put_and_get_count_alike(cluster: CacheCluster, num_tokens: int) -> None:
    tokens, full = list(range(num_tokens)), num_tokens // C * C
    shards = odd_shards(cluster.link.world.layout, num_tokens, seed=2)
    assert cluster.put(tokens, shards) == full
    found, copies = cluster.get(tokens)
    assert found == full
    assert_same(shard_bytes(copies), shard_bytes(shards), slice(0, full))


@pytest.mark.parametrize("start", [0, 1, C - 1, C, 2 * C + 1, 3 * C])
def test_rows_below_the_start_are_never_touched(cluster: CacheCluster, start: int) -> None:
    tokens, rows = list(range(3 * C)), np.arange(3 * C)[::-1] + 7
    cluster.run_on_ranks(rank_functions.fill, start)
    stored = cluster.run_on_ranks(rank_functions.read_rows, rows)
    cluster.store(tokens, rows)
    cluster.run_on_ranks(rank_functions.poison)
    mask = cluster.retrieve(tokens, rows, mask=[False] * start + [True] * (3 * C - start))
    assert mask.tolist() == [False] * start + [True] * (3 * C - start)
    assert_same(cluster.run_on_ranks(rank_functions.read_rows, rows[start:]), stored, slice(start, None))
    for touched in cluster.run_on_ranks(rank_functions.touched_rows):
        assert set(touched) <= set(rows[start:].tolist())


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        ([True] * C + [False] * C, r"mask\[4\] is False after mask\[0\]"),
        ([False, True] * C, "mask"),
        ([True] * (2 * C - 1), r"mask has shape \(7,\)"),
        ([1] * 2 * C, r"mask\[0\]"),
    ],
)
def test_a_wrong_mask_is_an_error_that_names_it(cluster: CacheCluster, mask: list[bool], named: str) -> None:
    tokens, rows = list(range(2 * C)), range(2 * C)
    for call in (cluster.store, cluster.retrieve):
        with pytest.raises(InvalidRequestError, match=named):
            call(tokens, list(rows), mask=mask)
    assert cluster.lookup(tokens) == 0


def test_a_store_mask_is_aligned_to_chunks(cluster: CacheCluster) -> None:
    tokens, rows = list(range(3 * C)), list(range(3 * C))
    with pytest.raises(InvalidRequestError, match="multiple of chunk_size=4"):
        cluster.store(tokens, rows, mask=[False] * 3 + [True] * 9)
    assert cluster.store(tokens, rows, mask=[False] * C + [True] * 2 * C) == 0, "what stands before it is not cached"
    assert cluster.store(tokens[:C], rows[:C]) == C
    assert cluster.store(tokens, rows, mask=[False] * C + [True] * 2 * C) == 3 * C


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([0] * C, r"slot_mapping\[1\] is 0"),
        ([0, 1, 2, NUM_ROWS], rf"slot_mapping\[3\] is {NUM_ROWS}"),
        ([-1, 1, 2, 3], r"slot_mapping\[0\] is -1"),
        ([0, 1, 2], "slot_mapping has 3 entries for 4 tokens"),
        (None, "slot_mapping is missing"),
    ],
)
def test_a_wrong_slot_mapping_is_an_error_that_names_it(
    cluster: CacheCluster, rows: list[int] | None, named: str
) -> None:
    for call in (cluster.store, cluster.retrieve):
        with pytest.raises(InvalidRequestError, match=named):
            call(list(range(C)), rows)  # type: ignore[arg-type]


def test_a_batch_keeps_its_order_and_each_item_fails_alone(cluster: CacheCluster) -> None:
    good = [list(range(100 * number, 100 * number + 2 * C)) for number in range(4)]
    rows = [np.arange(2 * C) + 2 * C * number for number in range(4)]
    cluster.run_on_ranks(rank_functions.fill, 9)
    stored = [cluster.run_on_ranks(rank_functions.read_rows, own) for own in rows]
    wrong = Request([1, -2], [0, 1])
    results = cluster.store_many([Request(good[0], rows[0]), wrong, *map(Request, good[1:], rows[1:])])
    assert [result for result in results if not isinstance(result, Exception)] == [2 * C] * 4
    assert isinstance(results[1], InvalidRequestError)
    assert cluster.lookup_many([Request(good[3]), wrong, Request([7] * C)])[::2] == [2 * C, 0]
    cluster.run_on_ranks(rank_functions.poison)
    masks = cluster.retrieve_many([Request(good[3], rows[0]), Request(good[0], [0]), Request(good[2], rows[1])])
    assert isinstance(masks[1], InvalidRequestError)
    assert [int(masks[index].sum()) for index in (0, 2)] == [2 * C] * 2  # type: ignore[union-attr]
    for own, number in ((rows[0], 3), (rows[1], 2)):
        assert_same(cluster.run_on_ranks(rank_functions.read_rows, own), stored[number])


def test_batched_put_and_get_equal_single_ones(cluster: CacheCluster) -> None:
    prompts = [list(range(100 * number, 100 * number + 3 * C)) for number in range(3)]
    shards = [odd_shards(cluster.link.world.layout, 3 * C, seed=number) for number in range(3)]
    requests = [Request(tokens, shards=own) for tokens, own in zip(prompts, shards, strict=True)]
    too_short = Request(prompts[0], shards=[[tensor[:, :, 1:] for tensor in shard] for shard in shards[0]])
    results = cluster.put_many([requests[0], too_short, Request(prompts[0]), *requests[1:]])
    assert [results[index] for index in (0, 3, 4)] == [3 * C] * 3
    assert isinstance(results[1], LayoutError) and isinstance(results[2], InvalidRequestError)
    answers = cluster.get_many([Request(prompts[2]), Request(prompts[1], start=5), Request(prompts[0], start=99)])
    assert isinstance(answers[2], InvalidRequestError)
    for answer, number, start in ((answers[0], 2, 0), (answers[1], 1, 5)):
        assert not isinstance(answer, Exception)
        single = cluster.get(prompts[number], start)
        assert answer[0] == single[0] == 3 * C
        assert_same(shard_bytes(answer[1]), shard_bytes(single[1]))
        assert_same(shard_bytes(answer[1]), shard_bytes(shards[number]), slice(start, None))


def test_put_goes_on_only_where_its_head_is_cached(cluster: CacheCluster) -> None:
    tokens = list(range(3 * C))
    shards = odd_shards(cluster.link.world.layout, 3 * C, seed=4)
    tail = [[tensor[:, :, C:] for tensor in shard] for shard in shards]
    assert cluster.put(tokens, tail, C) == 0
    head = [[tensor[:, :, :C] for tensor in shard] for shard in shards]
    assert cluster.put(tokens[:C], head) == C
    assert cluster.put(tokens, tail, C) == 3 * C
    assert_same(shard_bytes(cluster.get(tokens)[1]), shard_bytes(shards))
    with pytest.raises(InvalidRequestError, match="start must be a multiple of chunk_size 4"):
        cluster.put(tokens, tail, 3)


def test_a_pin_keeps_chunks_through_clear_until_it_ends(cluster: CacheCluster) -> None:
    tokens, rows = list(range(3 * C)), list(range(3 * C))
    cluster.store(tokens, rows)
    assert cluster.lookup(tokens[: 2 * C], lookup_id="a", pin=True) == 2 * C
    assert cluster.lookup(tokens[: 2 * C], lookup_id="a", pin=True) == 2 * C, "asking again renews"
    assert cluster.lookup(tokens[:C], lookup_id="b", pin=True) == C
    assert cluster.status().leases == 2
    cleared = cluster.clear()
    assert (cleared.num_removed, cleared.num_kept) == (1, 2)
    assert (cleared.removed, cleared.kept) == ({"cpu": [1, 1]}, {"cpu": [2, 2]})
    cluster.lookup_unpin("a")
    cluster.lookup_unpin("a")
    assert cluster.clear(tokens).num_kept == 1
    cluster.lookup_unpin("b")
    assert cluster.lookup(tokens) == C
    assert cluster.clear(tokens).num_removed == 1
    with pytest.raises(InvalidRequestError, match="lookup_id"):
        cluster.lookup(tokens, pin=True)


def test_clear_is_of_a_prompt_a_tier_or_all(cluster: CacheCluster) -> None:
    one, other = list(range(2 * C)), list(range(50, 50 + 2 * C))
    for tokens in (one, other):
        cluster.store(tokens, list(range(2 * C)))
    assert cluster.clear(locations=["disk", "RemoteBackend"]).num_removed == 0
    assert cluster.clear(one, request_configs={"cache_salt": "s"}).num_removed == 0
    assert cluster.clear(one, locations=["LocalCPUBackend"]).num_removed == 2
    assert (cluster.lookup(one), cluster.lookup(other)) == (0, 2 * C)
    with pytest.raises(InvalidRequestError, match="no tokens were given"):
        cluster.clear(request_configs={"cache_salt": "s"})
    with pytest.raises(InvalidRequestError, match="'tape'"):
        cluster.clear(locations=["tape"])
    assert cluster.clear().num_removed == 2


def test_salt_lora_and_media_keep_requests_apart(cluster: CacheCluster) -> None:
    tokens, rows = list(range(2 * C)), list(range(2 * C))
    configs = [{}, {"cache_salt": "s"}, {"lora_id": 1}, {"lora_id": "1"}, {"media": [(0, 2, "cat")]}]
    for count, own in enumerate(configs):
        assert cluster.lookup(tokens, request_configs=own) == 0
        assert cluster.store(tokens, rows, request_configs=own) == 2 * C
        assert cluster.status().tiers["cpu"].ready == 2 * (count + 1)
    assert all(cluster.retrieve(tokens, rows, request_configs=own).all() for own in configs)


def test_list_array_and_tensor_are_the_same_prompt(cluster: CacheCluster) -> None:
    tokens = list(range(2 * C))
    cluster.store(np.array(tokens), torch.arange(2 * C))
    same = (tokens, np.array(tokens, dtype=np.int32), torch.tensor(tokens))
    assert [cluster.lookup(prompt) for prompt in same] == [2 * C] * 3


@pytest.mark.parametrize("load", ["retrieve", "get", "views"])
def test_what_a_call_has_loaded_is_free_for_the_next_call(cluster: CacheCluster, load: str) -> None:
    """Leases of loads end without being waited for, and yet before anything that the same client asks afterwards."""
    tokens, rows = list(range(2 * C)), np.arange(2 * C)
    for _ in range(25):
        assert cluster.store(tokens, rows) == 2 * C
        if load == "retrieve":
            assert cluster.retrieve(tokens, rows).all()
        elif load == "get":
            assert cluster.get(tokens)[0] == 2 * C
        else:
            with cluster.get(tokens, views=True) as (num_tokens, _):
                assert num_tokens == 2 * C
        cleared = cluster.clear()
        assert (cleared.num_removed, cleared.num_kept) == (2, 0)
