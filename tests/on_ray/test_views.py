"""`get(views=True)` on a real cluster: the bytes, the lease and its ends, the cap, and keys in place of tokens."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from cluster.client import CacheCluster, Request
from cluster.coordinator_client import CoordinatorClient
from cluster.messages import LoadItem, pack_keys
from cluster.views import CachedViews
from lmcache_ray.errors import InvalidRequestError, UnknownClientError
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray.conftest import NAMESPACE, StartCluster
from tests.on_ray.kv_bytes import assert_same, odd_shards, shard_bytes

C = 4
CAPACITY = 16
MOST_VIEWED = CAPACITY * 3 // 4
TOKENS = list(range(3 * C))
_PROGRAM = Path(__file__).with_name("view_program.py")
_SOON_S = 20.0


@pytest.fixture(scope="module")
def shared(start_cluster: StartCluster, ray_nodes: list[str]) -> CacheCluster:
    """Two ranks on the driver's node. All timed leases are short."""
    return start_cluster(
        {"chunk_size": C, "capacity_chunks": CAPACITY, "lease_timeout_s": 1, "call_timeout_s": 10},
        layer_groups=parse_kvcache_shape_spec("(2,2,8,1,4):float16:2;(1,2,8,2,3):bfloat16:1"),
        world_size=2,
        nodes=[ray_nodes[0]] * 2,
        num_blocks=64,
    )


@pytest.fixture
def cluster(shared: CacheCluster) -> Iterator[CacheCluster]:
    """`shared`, empty before and without a lease after each test."""
    shared.clear()
    yield shared
    gc.collect()
    shared.lookup([])  # takes abandoned leases along
    wait_until(lambda: shared.status().leases == 0, "no lease is left")
    shared.check_integrity()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {_SOON_S:g} s: {what}"
        time.sleep(0.05)


def joined(found: CachedViews) -> list[list[torch.Tensor]]:
    """The chunks side by side: what a copy would be."""
    return [[torch.cat(chunks, dim=2) for chunks in shard] for shard in found.shards]


def assert_rows(found: CachedViews, shards: Sequence[Sequence[torch.Tensor]], rows: slice) -> None:
    assert_same(shard_bytes(joined(found)), shard_bytes(shards), rows)


@pytest.mark.parametrize("start", [0, 1, C, 2 * C + 3])
def test_views_show_what_copies_have(cluster: CacheCluster, start: int) -> None:
    shards = odd_shards(cluster.link.world.layout, len(TOKENS), seed=1)
    assert cluster.put(TOKENS, shards) == len(TOKENS)
    with cluster.get([*TOKENS, 7], start, views=True) as found:
        num_tokens, viewed = found
        assert (num_tokens, found.num_tokens, found.copied_ranks) == (len(TOKENS), len(TOKENS), ())
        assert [chunk.shape[2] for chunk in viewed[1][0]] == [C - start % C, *[C] * (2 - start // C)]
        assert_same(shard_bytes(joined(found)), shard_bytes(cluster.get(TOKENS, start)[1]))
        assert_rows(found, shards, slice(start, None))
        assert found.is_intact()
        status = cluster.status()
        assert (status.leases, status.view_leases, status.viewed_slots) == (1, 1, 3 - start // C)
    assert cluster.status().leases == 0


def test_nothing_cached_is_an_empty_answer_without_a_lease(cluster: CacheCluster) -> None:
    cluster.put(TOKENS, odd_shards(cluster.link.world.layout, len(TOKENS), seed=1))
    for tokens, start in (([9] * 8, 0), (TOKENS, len(TOKENS)), ([], 0), ([9] * 8, 5)):
        found = cluster.get(tokens, start, views=True)
        assert tuple(found) == (0, [[[], []], [[], []]])
        assert cluster.status().leases == 0


def test_viewed_chunks_outlast_time_eviction_and_clear(cluster: CacheCluster) -> None:
    shards = odd_shards(cluster.link.world.layout, len(TOKENS), seed=2)
    cluster.put(TOKENS, shards)
    with cluster.get(TOKENS, views=True) as found:
        time.sleep(1.5)  # longer than any lease that ends by time
        for number in range(1, 6):
            other = list(range(1000 * number, 1000 * number + MOST_VIEWED * C))
            cluster.put(other, odd_shards(cluster.link.world.layout, len(other), seed=3))
        cleared = cluster.clear()
        assert cleared.num_kept == 3 and cluster.lookup(TOKENS) == len(TOKENS)
        assert found.is_intact()
        assert_rows(found, shards, slice(None))
    assert cluster.clear().num_removed == 3


def test_past_the_cap_chunks_are_copied(cluster: CacheCluster) -> None:
    layout = cluster.link.world.layout
    prompts = [list(range(100 * number, 100 * number + MOST_VIEWED * C // 2)) for number in range(1, 4)]
    shards = [odd_shards(layout, len(prompt), seed=number) for number, prompt in enumerate(prompts)]
    for prompt, own in zip(prompts[:2], shards, strict=False):
        cluster.put(prompt, own)
    with cluster.get(prompts[0], views=True) as first, cluster.get(prompts[1], views=True) as second:
        assert not first.is_copied and not second.is_copied
        assert cluster.status().viewed_slots == MOST_VIEWED
        with cluster.get(prompts[0], views=True) as again:
            assert not again.is_copied, "these slots are held already"
        assert cluster.put(prompts[2], shards[2]) == (CAPACITY - MOST_VIEWED) * C, "stores still find room"
        with cluster.get(prompts[2], views=True) as third:
            assert (third.copied_ranks, third.num_tokens) == ((0, 1), (CAPACITY - MOST_VIEWED) * C)
            assert [chunk.shape for chunk in third.shards[0][0]] == [(2, 2, C, 4)] * (CAPACITY - MOST_VIEWED)
            assert_rows(third, shards[2], slice(0, third.num_tokens))
            assert cluster.status().leases == 2
            cluster.clear()
            assert third.is_intact()
            assert_rows(third, shards[2], slice(0, third.num_tokens))


def test_views_that_were_let_go_end_with_the_next_call(cluster: CacheCluster) -> None:
    cluster.put(TOKENS, odd_shards(cluster.link.world.layout, len(TOKENS), seed=4))
    _, shards = cluster.get(TOKENS, views=True)
    gc.collect()
    assert cluster.status().view_leases == 1, "its tensors are still there"
    with pytest.warns(ResourceWarning, match=r"without close"):
        del shards
        gc.collect()
    assert cluster.lookup(TOKENS) == len(TOKENS)
    wait_until(lambda: cluster.status().leases == 0, "the lease has ended")
    assert cluster.clear().num_removed == 3


def test_a_write_into_a_view_changes_no_cached_byte(cluster: CacheCluster) -> None:
    shards = odd_shards(cluster.link.world.layout, len(TOKENS), seed=5)
    cluster.put(TOKENS, shards)
    with cluster.get(TOKENS, views=True) as found:
        for shard in found.shards:
            for group in shard:
                for chunk in group:
                    chunk.zero_()
        with cluster.get(TOKENS, views=True) as other:
            assert_rows(other, shards, slice(None))
        assert_same(shard_bytes(cluster.get(TOKENS)[1]), shard_bytes(shards))


def test_a_killed_driver_lets_its_views_go(cluster: CacheCluster, ray_nodes: list[str]) -> None:
    cluster.put(TOKENS, odd_shards(cluster.link.world.layout, len(TOKENS), seed=6))
    name = cluster.link.world.name
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, _PROGRAM, name, NAMESPACE, str(len(TOKENS))]
    driver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == f"holding {len(TOKENS)}\n"
        assert cluster.clear().num_kept == 3
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        wait_until(lambda: cluster.status().view_leases == 0, "the dead driver's lease has ended")
        assert cluster.clear().num_removed == 3
    finally:
        driver.kill()
        driver.communicate()


def test_nothing_is_kept_for_a_client_that_is_not_known(cluster: CacheCluster) -> None:
    """Its lease would never end."""
    cluster.put(TOKENS, odd_shards(cluster.link.world.layout, len(TOKENS), seed=11))
    nobody = CoordinatorClient(cluster.link.coordinator.actor, "nobody", timeout_s=10)
    asked = LoadItem(pack_keys(cluster.prompt(TOKENS).keys), 0, ("of-nobody",), keep=True)
    with pytest.raises(UnknownClientError, match="client 'nobody' is not registered"):
        nobody.prepare_loads([asked])
    assert (cluster.status().view_leases, cluster.status().leases) == (0, 0)


def test_a_batch_of_views_keeps_its_order_and_each_item_fails_alone(cluster: CacheCluster) -> None:
    shards = odd_shards(cluster.link.world.layout, len(TOKENS), seed=7)
    cluster.put(TOKENS, shards)
    asked = [Request(TOKENS, start=5), Request(TOKENS, start=99), Request([9] * C), Request(TOKENS[:C])]
    late, wrong, nothing, early = cluster.get_many(asked, views=True)
    assert isinstance(wrong, InvalidRequestError)
    assert isinstance(late, CachedViews) and isinstance(early, CachedViews) and isinstance(nothing, CachedViews)
    assert (late.num_tokens, nothing.num_tokens, early.num_tokens) == (3 * C, 0, C)
    assert cluster.status().view_leases == 2
    with late, early:
        assert_rows(late, shards, slice(5, None))
        assert_rows(early, shards, slice(0, C))


@pytest.mark.parametrize("views", ["no", 1, None])
def test_views_are_asked_for_by_true_or_false(cluster: CacheCluster, views: object) -> None:
    for call in (partial(cluster.get, TOKENS), partial(cluster.get_many, [Request(TOKENS)])):
        with pytest.raises(InvalidRequestError, match=r"views is .*; accepted: True or False"):
            call(views=views)


@pytest.mark.parametrize("shards", [5, iter(())])
def test_shards_that_are_no_list_are_named(cluster: CacheCluster, shards: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"shards must be one list .*; got .* \((int|tuple_iterator)\)"):
        cluster.put(TOKENS, shards)  # type: ignore[arg-type]


def test_tensors_outlive_their_connection(cluster: CacheCluster) -> None:
    shards = odd_shards(cluster.link.world.layout, len(TOKENS), seed=8)
    cluster.put(TOKENS, shards)
    with CacheCluster.connect(cluster.link.world.name, namespace=NAMESPACE) as other:
        found = other.get(TOKENS, views=True)
        assert cluster.status().view_leases == 1
    assert cluster.status().view_leases == 0
    found.close()
    assert_rows(found, shards, slice(None))
    assert found.is_intact()


def test_keys_name_a_prompt_as_well_as_its_tokens(cluster: CacheCluster) -> None:
    layout, hasher = cluster.link.world.layout, cluster.link.hasher
    assert cluster.lookup(cluster.prompt(TOKENS)) == 0
    keys, lengths, rows = hasher.keys(TOKENS), [C] * 3, np.arange(3 * C)
    shards = odd_shards(layout, len(TOKENS), seed=9)
    assert cluster.put(None, shards, hashes=keys, offsets=lengths) == len(TOKENS)
    assert cluster.lookup(hashes=keys, offsets=lengths) == cluster.lookup(TOKENS) == len(TOKENS)
    assert cluster.lookup(None, keys[:2], lengths[:2], ["cpu"], "id", True) == 2 * C
    assert cluster.status().leases == 1
    assert cluster.lookup(TOKENS, search_range=["disk"]) == 0
    cluster.lookup_unpin("id")
    assert_same(shard_bytes(cluster.get(hashes=keys, offsets=lengths)[1]), shard_bytes(shards))
    assert_same(shard_bytes(cluster.get(cluster.prompt(TOKENS))[1]), shard_bytes(shards))
    with cluster.get(hashes=keys[:1], offsets=[C], views=True) as found:
        assert_rows(found, shards, slice(0, C))
    assert cluster.retrieve(None, rows, hashes=keys, offsets=lengths).all()
    cluster.clear()
    assert cluster.store(None, rows, hashes=keys, offsets=lengths) == len(TOKENS)
    assert cluster.lookup_many([Request(hashes=keys, offsets=lengths), Request(TOKENS[:C])]) == [3 * C, C]
    with pytest.raises(InvalidRequestError, match="exactly one of the two"):
        cluster.lookup(TOKENS, hashes=keys, offsets=lengths)


def test_ranks_of_other_nodes_are_copied(start_cluster: StartCluster, ray_nodes: list[str]) -> None:
    with start_cluster({"chunk_size": C}, kv_shape=(1, 2, 4, 1, 4), kv_dtype=torch.float16, world_size=2,
                       nodes=ray_nodes[::-1]) as apart:
        shards = odd_shards(apart.link.world.layout, len(TOKENS), seed=10)
        apart.put(TOKENS, shards)
        with apart.get(TOKENS, 2, views=True) as found:
            assert (found.copied_ranks, found.is_copied, apart.status().view_leases) == ((0,), True, 1)
            assert_rows(found, shards, slice(2, None))
