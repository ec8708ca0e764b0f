"""Calls that meet something else under way: a put and a shutdown, a clear and a silent rank, two drivers' lookups."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cluster.client import CacheCluster, Request
from cluster.put_path import PutPath
from lmcache_ray.errors import ClosedError, ClusterError
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray import rank_functions
from tests.on_ray.conftest import NAMESPACE, StartCluster

NUM_TOKENS = 8
ROWS = np.arange(NUM_TOKENS)
CALL_TIMEOUT_S = 6.0


@pytest.fixture(scope="module")
def pair(start_cluster: StartCluster) -> CacheCluster:
    """Two ranks with their own bytes, one on each node."""
    return start_cluster(
        {"call_timeout_s": CALL_TIMEOUT_S},
        layer_groups=parse_kvcache_shape_spec("(1,2,16,2,4):float16:1"),
        world_size=2,
    )


@pytest.fixture
def other(pair: CacheCluster) -> Iterator[CacheCluster]:
    """A second connection, as another driver would have it."""
    with CacheCluster.connect(pair.link.world.name, namespace=NAMESPACE) as connection:
        yield connection


@contextmanager
def stopped(cluster: CacheCluster, rank: int) -> Iterator[None]:
    """Within it the rank's process stands still."""
    pid = cluster.status().ranks[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_until_settled(cluster: CacheCluster) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        memory = cluster.status().tiers["cpu"]
        if memory.writing == memory.quarantined == 0:
            return
        time.sleep(0.05)
    pytest.fail(f"slots are still waiting for an answer: {cluster.status().tiers}")


def tokens_from(first: int) -> list[int]:
    return list(range(first, first + NUM_TOKENS))


def random_shards(cluster: CacheCluster, seed: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn((2, 1, NUM_TOKENS, 8), generator=generator).to(torch.float16)]
        for _ in cluster.link.world.layout.holders
    ]


def test_a_shutdown_waits_for_a_put_under_way(
    pair: CacheCluster, other: CacheCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its slots would be given to others while it still copies into them."""
    copying, go_on = threading.Event(), threading.Event()
    write_here = PutPath._write_here

    def slow_write(*arguments: object) -> None:
        copying.set()
        assert go_on.wait(20)
        write_here(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PutPath, "_write_here", slow_write)
    results: list[int] = []
    put = threading.Thread(target=lambda: results.append(other.put(tokens_from(0), random_shards(pair, 1))))
    put.start()
    assert copying.wait(20)
    shutdown = threading.Thread(target=other.shutdown)
    shutdown.start()
    shutdown.join(1.0)
    assert shutdown.is_alive(), "the put is not done"
    with pytest.raises(ClosedError):
        other.put(tokens_from(50), random_shards(pair, 2))
    go_on.set()
    put.join(20)
    shutdown.join(20)
    assert results == [NUM_TOKENS] and not shutdown.is_alive()
    assert pair.lookup(tokens_from(0)) == NUM_TOKENS
    pair.check_integrity()


def test_a_clear_names_the_rank_that_did_not_answer_and_its_slots_come_back(pair: CacheCluster) -> None:
    assert pair.store(tokens_from(100), ROWS) == NUM_TOKENS
    with stopped(pair, 1):
        begun = time.monotonic()
        result = pair.clear(tokens_from(100))
        assert time.monotonic() - begun < CALL_TIMEOUT_S
        assert result.pending == (1,) and result.num_removed == 2
        assert pair.lookup(tokens_from(100)) == 0, "gone for every reader at once"
    wait_until_settled(pair)
    pair.check_integrity()
    assert pair.run_on_ranks(rank_functions.lookup, tokens_from(100)) == [0, 0]
    assert pair.store(tokens_from(100), ROWS) == NUM_TOKENS


def test_lookup_ids_of_two_drivers_do_not_meet(pair: CacheCluster, other: CacheCluster) -> None:
    """Both number their requests from 0."""
    mine, theirs = tokens_from(200), tokens_from(300)
    pair.store_many([Request(mine, ROWS), Request(theirs, ROWS)])
    assert pair.lookup(mine, pin=True, lookup_id="0") == NUM_TOKENS
    assert other.lookup(theirs, pin=True, lookup_id="0") == NUM_TOKENS
    other.lookup_unpin("0")
    assert pair.clear(mine).num_kept == 2
    assert pair.clear(theirs).num_kept == 0
    pair.lookup_unpin("0")
    assert pair.status().leases == 0


def test_an_error_of_a_step_is_the_answer_of_its_requests_alone_and_leaves_nothing(pair: CacheCluster) -> None:
    assert pair.store(tokens_from(400), ROWS) == NUM_TOKENS
    pair.run_on_ranks(rank_functions.break_connector)
    try:
        cached, new = pair.store_many([Request(tokens_from(400), ROWS), Request(tokens_from(500), ROWS)])
    finally:
        pair.run_on_ranks(rank_functions.mend_connector)
    assert cached == NUM_TOKENS
    assert isinstance(new, RuntimeError) and "on fire" in str(new)
    wait_until_settled(pair)
    assert pair.status().leases == 0
    assert pair.store(tokens_from(500), ROWS) == NUM_TOKENS
    pair.check_integrity()


def test_a_put_over_both_nodes_in_one_batch_comes_back_byte_for_byte(pair: CacheCluster) -> None:
    prompts = [tokens_from(600 + 10 * number) for number in range(5)]
    shards = [random_shards(pair, seed) for seed in range(5)]
    put = pair.put_many([Request(tokens, shards=each) for tokens, each in zip(prompts, shards, strict=True)])
    assert put == [NUM_TOKENS] * 5
    absent = Request(tokens_from(900))
    *got, nothing = pair.get_many([*(Request(tokens, start=3) for tokens in prompts), absent])
    for (num_tokens, found), stored in zip(got, shards, strict=True):  # type: ignore[misc]
        assert num_tokens == NUM_TOKENS
        for rank_found, rank_stored in zip(found, stored, strict=True):
            assert torch.equal(rank_found[0].view(torch.int16), rank_stored[0][:, :, 3:].view(torch.int16))
    assert nothing[0] == 0 and nothing[1][0][0].shape[2] == 0  # type: ignore[index]
    assert pair.status().leases == 0


def test_a_rank_that_lives_but_does_not_answer_is_named_until_it_does(pair: CacheCluster) -> None:
    """Ray sees a stopped process as alive; without this, every store is a miss and nothing says why."""
    assert pair.is_healthy()
    with stopped(pair, 1):
        wait_for_health(pair, healthy=False)
        (problem,) = pair.status().problems
        assert problem.startswith("rank 1 is silent")
    wait_for_health(pair, healthy=True)


def test_a_function_that_exits_does_not_take_its_rank_along(pair: CacheCluster) -> None:
    with pytest.raises(ClusterError, match=r"sys.exit\(3\)"):
        pair.run_on_ranks(rank_functions.leave, 3)
    assert pair.store(tokens_from(1000), ROWS) == NUM_TOKENS
    assert pair.is_healthy()


def wait_for_health(cluster: CacheCluster, *, healthy: bool) -> None:
    deadline = time.monotonic() + 40
    while cluster.is_healthy() != healthy:
        assert time.monotonic() < deadline, cluster.status().problems
        time.sleep(0.1)


def test_views_close_and_lookups_end_while_the_coordinator_stands_still(pair: CacheCluster) -> None:
    """A lookup gives up in its own time, also when the end of a lease was sent before it and is not answered."""
    tokens = list(range(500, 500 + NUM_TOKENS))
    shards = [[torch.full((2, 1, NUM_TOKENS, 8), rank, dtype=torch.float16)] for rank in range(2)]
    assert pair.put(tokens, shards) == NUM_TOKENS
    found = pair.get(tokens, views=True)
    assert found.num_tokens == NUM_TOKENS and pair.status().view_leases == 1
    pid = pair.status().coordinator_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        found.close()
        assert pair.lookup(tokens) == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert pair.lookup(tokens) == NUM_TOKENS
    assert (pair.status().view_leases, pair.clear(tokens).num_kept) == (0, 0)
