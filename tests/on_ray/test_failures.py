"""What is left when a rank or the coordinator fails: misses and a health that says why, never a hang."""

import os
import signal
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import ray

from cluster.client import CacheCluster
from lmcache_ray.errors import ClusterError, DeadlineError
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray import rank_functions
from tests.on_ray.conftest import StartCluster
from tests.on_ray.kv_bytes import assert_same

NUM_TOKENS = 8
ROWS = np.arange(NUM_TOKENS)
GOOD = [True] * NUM_TOKENS
MISS = [False] * NUM_TOKENS
CALL_TIMEOUT_S = 20.0
SHORT_TIMEOUT_S = 4.0
DEAD_WITHIN_S = 3.0


@pytest.fixture(scope="module")
def mla(start_cluster: StartCluster, ray_nodes: list[str]) -> CacheCluster:
    """Three ranks around one copy: ranks 0 and 2 on one node, rank 1 on the other."""
    here, there = ray_nodes
    return start_cluster(
        {"call_timeout_s": CALL_TIMEOUT_S},
        layer_groups=parse_kvcache_shape_spec("(2,1,16,1,8):bfloat16:2"),
        world_size=3,
        use_mla=True,
        nodes=[here, there, here],
    )


@pytest.fixture(scope="module")
def pair(start_cluster: StartCluster) -> CacheCluster:
    """Two ranks with their own bytes, one on each node."""
    return start_cluster(
        {"call_timeout_s": SHORT_TIMEOUT_S},
        layer_groups=parse_kvcache_shape_spec("(1,2,16,2,4):float16:1"),
        world_size=2,
    )


def retrieve(
    cluster: CacheCluster, tokens: Sequence[int], rows: Sequence[np.ndarray] | None = None, delays: Sequence[float] = ()
) -> list[rank_functions.SpmdResult]:
    return cluster.run_on_ranks(rank_functions.retrieve_or_name, tokens, rows or [ROWS] * 3, delays)


def kill(cluster: CacheCluster, rank: int) -> None:
    pid = cluster.status().ranks[rank].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def seconds_until(condition: Callable[[], bool]) -> float:
    begun = time.monotonic()
    while not condition() and time.monotonic() - begun < CALL_TIMEOUT_S:
        time.sleep(0.02)
    return time.monotonic() - begun


def test_an_exception_at_rank_0_is_a_miss_on_the_others_at_once(mla: CacheCluster) -> None:
    tokens = list(range(NUM_TOKENS))
    mla.run_on_ranks(rank_functions.fill, 1)
    stored = mla.run_on_ranks(rank_functions.read_rows, ROWS)
    assert mla.store(tokens, ROWS) == NUM_TOKENS
    for bad_rows in (ROWS[:3], np.zeros(NUM_TOKENS, dtype=np.int64), ROWS + 1000):
        results = retrieve(mla, tokens, [bad_rows, ROWS, ROWS])
        assert [result for result, _ in results] == ["InvalidRequestError", MISS, MISS]
        assert all(seconds < DEAD_WITHIN_S for _, seconds in results)
        mla.run_on_ranks(rank_functions.poison)
        assert [result for result, _ in retrieve(mla, tokens)] == [GOOD] * 3, "the ranks are in step again"
        assert_same(mla.run_on_ranks(rank_functions.read_rows, ROWS), stored)
    assert mla.status().leases == 0


def test_an_exception_elsewhere_stays_there(mla: CacheCluster) -> None:
    tokens = list(range(NUM_TOKENS))
    results = retrieve(mla, tokens, [ROWS, ROWS[:3], ROWS])
    assert [result for result, _ in results] == [GOOD, "InvalidRequestError", GOOD]
    assert [result for result, _ in retrieve(mla, tokens)] == [GOOD] * 3
    assert mla.status().leases == 0


def test_ranks_that_ask_for_different_prompts_miss_and_agree_again(mla: CacheCluster) -> None:
    one, other = list(range(NUM_TOKENS)), list(range(100, 100 + NUM_TOKENS))
    mla.store(other, ROWS)
    results = mla.run_on_ranks(rank_functions.retrieve_own, [one, other, one], ROWS)
    assert results[0] == GOOD and results[1] == MISS
    for _ in range(4):
        if [result for result, _ in retrieve(mla, one)] == [GOOD] * 3:
            break
    assert [result for result, _ in retrieve(mla, one)] == [GOOD] * 3
    assert mla.status().leases == 0


def test_a_receiver_may_come_late(mla: CacheCluster) -> None:
    results = retrieve(mla, list(range(NUM_TOKENS)), delays=[0.0, 0.5, 1.5])
    assert [result for result, _ in results] == [GOOD] * 3


def test_a_killed_receiver_makes_misses_for_the_driver_only(mla: CacheCluster) -> None:
    """Rank 2's death takes no bytes along: rank 0 has them, rank 1 still loads."""
    tokens = list(range(NUM_TOKENS))
    kill(mla, 2)
    assert seconds_until(lambda: not mla.is_healthy()) < DEAD_WITHIN_S
    (problem,) = mla.status().problems
    assert problem.startswith("rank 2 is lost")
    assert mla.lookup(tokens) == NUM_TOKENS
    assert len(mla.retrieve(tokens, ROWS)) == NUM_TOKENS, "a miss, or whole if the rank is back by then"
    calls = [mla.link.workers[rank].call.remote(rank_functions.retrieve, tokens, ROWS) for rank in (0, 1)]
    assert ray.get(calls, timeout=CALL_TIMEOUT_S) == [GOOD] * 2
    assert mla.status().leases == 0, "nothing is pinned for a rank that is gone"
    assert mla.store(list(range(200, 200 + NUM_TOKENS)), ROWS) == NUM_TOKENS


def test_a_kill_of_rank_0_frees_a_waiting_rank_within_seconds(mla: CacheCluster) -> None:
    tokens = list(range(NUM_TOKENS))
    waiting = mla.link.workers[1].call.remote(rank_functions.retrieve_or_name, tokens, [ROWS] * 3)
    time.sleep(0.5)
    begun = time.monotonic()
    kill(mla, 0)
    ((result, _),) = ray.get([waiting], timeout=CALL_TIMEOUT_S)
    assert time.monotonic() - begun < DEAD_WITHIN_S
    assert result == MISS
    assert mla.lookup(tokens) in (0, NUM_TOKENS), "a miss until the rank is back"


def test_silent_ranks_cost_a_call_one_deadline_and_what_they_missed_is_settled(pair: CacheCluster) -> None:
    """Both ranks stand still for a while: no call waits for one after the other."""
    tokens, others = list(range(300, 300 + NUM_TOKENS)), list(range(400, 400 + NUM_TOKENS))
    assert pair.store(tokens, ROWS) == NUM_TOKENS
    pids = [rank.pid for rank in pair.status().ranks if rank.pid is not None]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        for call in (lambda: pair.store(others, ROWS), lambda: int(pair.retrieve(tokens, ROWS).sum())):
            begun = time.monotonic()
            assert call() == 0
            assert time.monotonic() - begun < 1.75 * SHORT_TIMEOUT_S
        assert pair.lookup(others) == 0
        assert pair.lookup(tokens) == NUM_TOKENS, "nothing is known to be lost"
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    seconds_until(lambda: is_settled(pair))
    assert is_settled(pair) and pair.is_healthy()
    pair.check_integrity()
    assert pair.store(others, ROWS) == NUM_TOKENS
    assert pair.retrieve(others, ROWS).all() and pair.retrieve(tokens, ROWS).all()
    assert pair.status().leases == 0


def is_settled(cluster: CacheCluster) -> bool:
    """No slot is being written, or waits for word of a writer."""
    memory = cluster.status().tiers["cpu"]
    return memory.writing == memory.quarantined == 0


def test_after_a_rank_is_killed_calls_miss_and_say_so(pair: CacheCluster) -> None:
    tokens = list(range(NUM_TOKENS))
    pair.store(tokens, ROWS)
    kill(pair, 1)
    begun = time.monotonic()
    assert not pair.retrieve(tokens, ROWS).any(), "also before anybody has noticed"
    assert pair.store(list(range(50, 58)), ROWS) == 0
    assert pair.get(tokens)[0] in (0, NUM_TOKENS), "on the driver's node bytes may be read until the loss is known"
    assert seconds_until(lambda: not pair.is_healthy()) < DEAD_WITHIN_S
    assert pair.lookup(tokens) == 0
    assert not pair.retrieve(tokens, ROWS).any()
    assert pair.store(tokens, ROWS) == 0
    assert pair.get(tokens)[0] == 0
    assert time.monotonic() - begun < 2 * DEAD_WITHIN_S
    (problem,) = pair.status().problems
    assert problem.startswith("rank 1 is lost: ")
    assert [rank.alive for rank in pair.status().ranks] == [True, False]
    assert pair.status().leases == 0


def test_a_coordinator_that_was_ended_for_good_is_an_error_at_once(pair: CacheCluster) -> None:
    ray.kill(pair.link.coordinator.actor, no_restart=True)
    tokens = list(range(NUM_TOKENS))
    begun = time.monotonic()
    for call in (
        lambda: pair.lookup(tokens),
        lambda: pair.store(tokens, ROWS),
        lambda: pair.retrieve(tokens, ROWS),
        lambda: pair.get(tokens),
        lambda: pair.clear(),
        lambda: pair.status(),
    ):
        with pytest.raises((ClusterError, DeadlineError), match="coordinator"):
            call()
    assert not pair.is_healthy()
    assert time.monotonic() - begun < CALL_TIMEOUT_S / 2
