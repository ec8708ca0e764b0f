"""An arena of ten chunks under random operations of several threads and drivers, and when everything is pinned.

What a prompt's KV must be follows from its tokens, so any byte of another chunk shows wherever it turns up.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import ray

from cluster.client import CacheCluster
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray.conftest import NAMESPACE, StartCluster
from tests.on_ray.random_driver import CAPACITY, NUM_CHUNKS, NUM_THREADS, ROWS_PER_THREAD, C, RandomDriver, shards_of

NUM_OPERATIONS = int(os.environ.get("RANDOM_OPERATIONS", "1000"))
_ROOT = Path(__file__).resolve().parents[2]
_NAME = "small"


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> CacheCluster:
    """Two ranks, one on each node; every thread of every driver has KV rows of its own."""
    return start_cluster(
        {"chunk_size": C, "capacity_chunks": CAPACITY, "lease_timeout_s": 120},
        layer_groups=parse_kvcache_shape_spec("(2,2,16,1,8):float16:2;(1,2,16,2,3):int8:1"),
        world_size=2,
        name=_NAME,
        num_blocks=2 * NUM_THREADS * ROWS_PER_THREAD // 4,
    )


def check_idle(cluster: CacheCluster) -> None:
    """Index and arenas are sound; nothing is pinned or unfinished."""
    cluster.check_integrity()
    status = cluster.status()
    memory = status.tiers["cpu"]
    assert (status.leases, memory.writing, memory.quarantined) == (0, 0, 0)
    assert memory.ready + memory.free == memory.capacity == CAPACITY
    assert status.problems == ()


def test_what_does_not_fit_is_not_stored_and_nobody_waits(cluster: CacheCluster) -> None:
    pinned = [list(range(1000 * number, 1000 * number + 5 * C)) for number in range(1, 3)]
    for tokens in pinned:
        assert cluster.put(tokens, shards_of(cluster.link.world.layout, tokens)) == 5 * C
        assert cluster.lookup(tokens, lookup_id=str(tokens[0]), pin=True) == 5 * C
    other = list(range(2 * C))
    begun = time.monotonic()
    assert cluster.store(other, list(range(2 * C))) == 0
    assert cluster.put(other, shards_of(cluster.link.world.layout, other)) == 0
    assert time.monotonic() - begun < 5
    assert [cluster.lookup(tokens) for tokens in (*pinned, other)] == [5 * C, 5 * C, 0]
    for tokens in pinned:
        cluster.lookup_unpin(str(tokens[0]))
    assert cluster.store(other, list(range(2 * C))) == 2 * C
    check_idle(cluster)


def test_of_a_prompt_larger_than_the_arena_the_head_is_stored(cluster: CacheCluster) -> None:
    cluster.clear()
    tokens = list(range(5000, 5000 + (CAPACITY + 3) * C))
    assert cluster.put(tokens, shards_of(cluster.link.world.layout, tokens)) == CAPACITY * C
    assert cluster.lookup(tokens) == CAPACITY * C
    cluster.clear()
    check_idle(cluster)


def test_random_operations_of_four_threads_and_two_drivers(cluster: CacheCluster) -> None:
    """Half of the operations run here, half in another process that has connected; both watch the capacity."""
    cluster.clear()
    share = NUM_OPERATIONS // (2 * NUM_THREADS)
    command = [sys.executable, "-m", "tests.on_ray.random_driver", _NAME, NAMESPACE, str(share)]
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(_ROOT)}
    other = subprocess.Popen(
        command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline().strip() == "ready"
        other.stdin.write("go\n")
        other.stdin.flush()
        drivers = [RandomDriver(cluster, number, share) for number in range(NUM_THREADS)]
        threads = [threading.Thread(target=driver.run) for driver in drivers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        said, _ = other.communicate(timeout=60 + NUM_OPERATIONS / 20)
    finally:
        other.kill()
        other.wait()
    failures = [failure for driver in drivers for failure in driver.failures]
    assert not failures, "\n".join(failures)
    assert (other.returncode, said.strip()) == (0, "no failure")
    assert sum(driver.num_hit_tokens for driver in drivers) > NUM_CHUNKS
    assert cluster.status().clients == 1
    check_idle(cluster)
