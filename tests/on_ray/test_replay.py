"""Replays on a cluster that others use too, and the limits of one window."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.chat_workload import chat_workload
from cluster.client import CacheCluster
from cluster.messages import MESSAGE_NBYTES
from cluster.replay import replay
from cluster.report import ReplayReport
from cluster.workload import BLOCK_SIZE, TraceRequest
from lmcache_ray.errors import ClusterError
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray.conftest import NAMESPACE, StartCluster

GROUPS = parse_kvcache_shape_spec("(1,2,16,1,1):uint8:1")  # 2 bytes per token
CAPACITY = 60
KV_BLOCKS = 3000


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> CacheCluster:
    """Two ranks on two nodes; fewer slots than the chats have chunks."""
    config = {"chunk_size": BLOCK_SIZE, "capacity_chunks": CAPACITY, "block_size": BLOCK_SIZE}
    return start_cluster(config, layer_groups=GROUPS, world_size=2, name="replayed", num_blocks=KV_BLOCKS)


def run(requests: Sequence[TraceRequest], window: int = 16) -> ReplayReport:
    """A replay by a driver of its own."""
    with CacheCluster.connect("replayed", namespace=NAMESPACE) as mine:
        return replay(mine, requests, window=window, verify=True)


def test_replays_of_several_drivers_at_once_do_not_mix_their_bytes(cluster: CacheCluster) -> None:
    with ThreadPoolExecutor(3) as pool:
        reports = list(pool.map(run, [chat_workload(seed=seed, num_requests=150) for seed in (0, 0, 1)]))
    assert [report.byte_mismatches for report in reports] == [0, 0, 0]
    assert min(report.verified_bytes for report in reports) > 0
    status = cluster.status()
    assert (status.leases, status.tiers["cpu"].ready, status.problems) == (0, CAPACITY, ())


def test_chunks_that_others_clear_meanwhile_end_a_replay_in_one_sentence(cluster: CacheCluster) -> None:
    stop = threading.Event()

    def clear() -> None:
        with CacheCluster.connect("replayed", namespace=NAMESPACE) as other:
            while not stop.is_set():
                other.clear()

    clearing = threading.Thread(target=clear)
    clearing.start()
    try:
        with pytest.raises(ClusterError, match=r"^rank \d left out \d+ of \d+ chunks .*another driver has cleared"):
            for seed in range(50):  # the first usually does
                run(chat_workload(seed=seed, num_requests=300))
    finally:
        stop.set()
        clearing.join()
    assert run(chat_workload(seed=0, num_requests=20)).byte_mismatches == 0


def test_a_request_larger_than_a_message_and_than_the_cache_is_a_window_of_its_own(cluster: CacheCluster) -> None:
    num_blocks = MESSAGE_NBYTES // 32 + 100
    long = TraceRequest(tuple(range(10_000, 10_000 + num_blocks)))
    short = TraceRequest(long.hash_ids[:10])
    report = run([short, long, short, long])
    assert (report.requests, report.lookup_blocks, report.byte_mismatches) == (4, 20 + 2 * num_blocks, 0)
    assert report.capacity_blocks == CAPACITY


def test_a_request_larger_than_the_kv_rows_is_refused_before_anything_is_done(cluster: CacheCluster) -> None:
    too_long = TraceRequest(tuple(range(KV_BLOCKS + 1)))
    with pytest.raises(ClusterError, match=f"has {KV_BLOCKS * BLOCK_SIZE} KV rows per rank: .*more num_blocks"):
        run([TraceRequest((1,)), too_long])
