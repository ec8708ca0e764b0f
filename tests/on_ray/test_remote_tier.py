"""Clusters on one remote store, a real server: they share hits, and go on by themselves while it is frozen or gone."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.__main__ import main
from cluster.client import CacheCluster, Request
from lmcache_ray.connector.dense import empty_shard
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray import rank_functions
from tests.on_ray.checked_calls import drop_local, flush, got, prompt, put, retrieved, store, wait_until
from tests.on_ray.conftest import NAMESPACE, StartCluster
from tests.on_ray.random_driver import C
from tests.redis_server import RedisServer, running_server

GROUPS = parse_kvcache_shape_spec("(2,2,16,1,8):float16:2;(1,2,16,2,3):int8:1")
NUM_BLOCKS = 32
WHOLE = 4 * C
CALL_TIMEOUT_S, LOOKUP_TIMEOUT_S, ANSWER_S = 6.0, 0.4, 0.3
GRACE_S = 1.0
"""How much later than its deadline a call may come back."""
BACK_S = 8.0
"""How soon a store that answers again is used again, on a busy machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One server for the module."""
    with running_server() as running:
        yield running


def config(server: RedisServer, **values: object) -> dict[str, object]:
    return {
        "capacity_chunks": 20,
        "remote_url": server.url,
        "blocking_timeout_secs": ANSWER_S,
        "call_timeout_s": CALL_TIMEOUT_S,
        "lookup_timeout_ms": int(1000 * LOOKUP_TIMEOUT_S),
        **values,
    }


@pytest.fixture(scope="module")
def cluster(server: RedisServer, start_cluster: StartCluster) -> CacheCluster:
    """Two ranks, one on each node, on the store to which a cluster that has ended has brought prompts 1 to 8."""
    arguments = {"layer_groups": GROUPS, "world_size": 2, "num_blocks": NUM_BLOCKS}
    with start_cluster(config(server, capacity_chunks=64), name="earlier", **arguments) as earlier:
        assert [put(earlier, prompt(number)) for number in range(1, 5)] == [WHOLE] * 4
        assert [store(earlier, prompt(number)) for number in range(5, 9)] == [WHOLE] * 4
    return start_cluster(config(server), name="later", **arguments)


def forget_all(cluster: CacheCluster) -> None:
    flush(cluster)
    drop_local(cluster)


def test_what_an_earlier_cluster_stored_is_a_hit(cluster: CacheCluster) -> None:
    """Put from the driver or stored from rows, got by the driver or retrieved to rows, the bytes are the same."""
    prompts = [prompt(number) for number in range(1, 9)]
    assert [cluster.locate(tokens).remote for tokens in prompts] == [WHOLE] * 8
    assert [cluster.lookup(tokens) for tokens in prompts[:2]] == [WHOLE] * 2
    assert [got(cluster, tokens) for tokens in prompts[::2]] == [WHOLE] * 4
    assert [retrieved(cluster, tokens) for tokens in prompts[1::2]] == [WHOLE] * 4
    traffic = cluster.status().tiers["remote"].traffic
    assert traffic["read"] >= 32 and not any(traffic[name] for name in ("written", "missing", "damaged", "unreadable"))
    cluster.check_integrity()
    assert cluster.is_healthy()


def test_there_are_no_files_to_check(cluster: CacheCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--name", "later", "--namespace", NAMESPACE]) == 2
    assert "cluster 'later' has no disk tier: it was started without local_disk" in capsys.readouterr().err


def test_a_lookup_begins_to_load(cluster: CacheCluster) -> None:
    forget_all(cluster)
    tokens = prompt(3)
    assert cluster.lookup(tokens) == WHOLE
    wait_until(lambda: cluster.locate(tokens).cpu == WHOLE, "the prompt is in memory")
    wait_until(lambda: cluster.status().leases == 0, "nobody holds it")


def test_views_and_batches_of_what_lies_in_the_store(cluster: CacheCluster) -> None:
    forget_all(cluster)
    with cluster.get(prompt(1), views=True) as views:
        assert views.num_tokens == WHOLE
    batch = cluster.get_many([Request(prompt(number)) for number in range(1, 9)])  # memory holds five of them
    assert [found[0] for found in batch if not isinstance(found, Exception)] == [WHOLE] * 8


def timed(call: Callable[[], int]) -> tuple[int, float]:
    """The answer, and the seconds that it took."""
    begun = time.monotonic()
    return call(), time.monotonic() - begun


def check_calls_end_in_time(cluster: CacheCluster, *, absent: range) -> None:
    """Stores, lookups and retrieves at the same time."""

    def retrieve(tokens: list[int]) -> int:
        return int(cluster.retrieve(tokens, np.arange(WHOLE)).sum())

    def run(call: Callable[[list[int]], int], numbers: range) -> list[tuple[int, float]]:
        return [timed(partial(call, prompt(number))) for number in numbers]

    with ThreadPoolExecutor(3) as threads:
        lookups = threads.submit(run, cluster.lookup, absent)
        retrieves = threads.submit(run, retrieve, absent)
        stores = threads.submit(run, partial(put, cluster), range(100, 106))
    assert [count for count, _ in (*lookups.result(), *retrieves.result())] == [0] * 2 * len(absent)
    assert [count for count, _ in stores.result()] == [WHOLE] * 6
    assert max(seconds for _, seconds in lookups.result()) < LOOKUP_TIMEOUT_S + GRACE_S
    assert max(seconds for _, seconds in (*retrieves.result(), *stores.result())) < CALL_TIMEOUT_S + GRACE_S


def check_outage(cluster: CacheCluster) -> None:
    wait_until(lambda: bool(cluster.status().problems), "the status says what is wrong")
    (problem,) = cluster.status().problems
    assert problem.startswith("the remote tier is out of order: ") and "redis://127.0.0.1" in problem


def test_a_frozen_store_delays_nobody_beyond_a_deadline_and_is_used_again_when_it_thaws(
    cluster: CacheCluster, server: RedisServer
) -> None:
    forget_all(cluster)
    server.freeze()
    try:
        assert cluster.run_on_ranks(rank_functions.ask_remote_store, 4) == [0, 0], "each rank finds out for itself"
        check_calls_end_in_time(cluster, absent=range(2, 5))
        assert put(cluster, prompt(50)) == got(cluster, prompt(50)) == retrieved(cluster, prompt(50)) == WHOLE
        check_outage(cluster)
    finally:
        server.thaw()
    wait_until(lambda: got(cluster, prompt(2)) == WHOLE, "hits return", BACK_S)
    assert retrieved(cluster, prompt(3)) == WHOLE
    wait_until(cluster.is_healthy, "all is well")
    assert put(cluster, prompt(51)) == WHOLE
    forget_all(cluster)
    assert retrieved(cluster, prompt(51)) == WHOLE, "and it is written to"
    cluster.check_integrity()
    assert cluster.status().leases == 0


def test_a_server_that_is_killed_during_stores_comes_back_empty_and_is_used(
    cluster: CacheCluster, server: RedisServer
) -> None:
    forget_all(cluster)
    for number in range(60, 70):
        assert put(cluster, prompt(number)) == WHOLE
        if number == 64:
            server.kill()
    assert got(cluster, prompt(69)) == WHOLE
    assert cluster.lookup(prompt(1)) == got(cluster, prompt(1)) == 0
    check_outage(cluster)
    server.start()
    wait_until(cluster.is_healthy, "it is used again")
    assert cluster.lookup(prompt(1)) == 0, "it is empty"
    assert store(cluster, prompt(1)) == WHOLE
    forget_all(cluster)
    assert retrieved(cluster, prompt(1)) == got(cluster, prompt(1)) == WHOLE
    cluster.check_integrity()


def test_rounded_chunks_are_others_and_the_coordinator_loads_no_torch(
    cluster: CacheCluster, server: RedisServer, start_cluster: StartCluster
) -> None:
    tokens = prompt(5)
    assert put(cluster, tokens) == WHOLE
    forget_all(cluster)
    with start_cluster(config(server, remote_serde="fp8"), layer_groups=GROUPS, world_size=2) as rounded:
        assert rounded.lookup(tokens) == got(rounded, tokens) == 0, "those are exact"
        layout = rounded.link.world.layout
        shards = [
            [torch.randn(halves.shape).to(halves.dtype), torch.randint(0, 99, whole.shape, dtype=whole.dtype)]
            for halves, whole in (empty_shard(layout.ranks[rank], WHOLE) for rank in layout.holders)
        ]
        assert rounded.put(tokens, shards) == WHOLE
        forget_all(rounded)
        num_tokens, found = rounded.get(tokens)
        assert num_tokens == WHOLE
        for (halves, whole), (wanted, exact) in zip(found, shards, strict=True):
            assert torch.equal(whole, exact)
            error = (halves.float() - wanted.float()).abs()
            assert error.max() > 0 and (error <= wanted.float().abs() / 15 + 1e-4).all()
        status = rounded.status()
        assert "libtorch" not in Path(f"/proc/{status.coordinator_pid}/maps").read_text()
    assert got(cluster, tokens) == WHOLE
