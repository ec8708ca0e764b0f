"""A cluster's disk: chunks that outlive it, however it ends, and serve all calls from below a memory of a few chunks.

What a prompt's KV must be follows from its tokens (`shards_of`), so every byte of every hit can be proven.
DISK_KILL_ROUNDS says how often a cluster is killed while it writes.
"""

import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.chat_workload import chat_workload
from cluster.client import CacheCluster, Request
from cluster.replay import replay
from cluster.workload import BLOCK_SIZE
from lmcache_ray.errors import DirectoryTakenError, LMCacheRayError
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray import rank_functions
from tests.on_ray.checked_calls import flush, got, prompt, put, retrieved, wait_until
from tests.on_ray.conftest import StartCluster
from tests.on_ray.kv_bytes import GroupBytes, assert_same, repeated, shard_bytes
from tests.on_ray.random_driver import NUM_THREADS, ROWS_PER_THREAD, C, RandomDriver, shards_of
from tests.unit.disk_builders import du

NUM_KILLS = int(os.environ.get("DISK_KILL_ROUNDS", "2"))
SHARED = "on-disk"
CAPACITY = 20
NUM_ROWS = 256
MIB = 1 / 1024
CALL_TIMEOUT_S = 20.0
SHORT_TIMEOUT_S = 4.0

GROUPS = parse_kvcache_shape_spec("(2,2,16,1,8):float16:2;(1,2,16,2,3):int8:1")
MLA_GROUPS = parse_kvcache_shape_spec("(2,1,16,1,9):bfloat16:2;(1,1,16,1,5):uint8:1")


def all_retrieved(cluster: CacheCluster, prompts: Sequence[Sequence[int]]) -> list[int]:
    """`retrieve_many` into rows that held nothing: the leading tokens of each, every byte of which was compared."""
    cluster.run_on_ranks(rank_functions.poison)
    ends = np.cumsum([len(tokens) for tokens in prompts])
    rows = np.split(np.random.default_rng(0).permutation(NUM_ROWS)[: ends[-1]], ends[:-1])
    masks = cluster.retrieve_many([Request(tokens, where) for tokens, where in zip(prompts, rows, strict=True)])
    counts = []
    for tokens, where, mask in zip(prompts, rows, masks, strict=True):
        assert isinstance(mask, torch.Tensor), mask
        count = int(mask.sum())
        assert mask.tolist() == [True] * count + [False] * (len(tokens) - count)
        found = cluster.run_on_ranks(rank_functions.read_rows, where[:count])
        assert_same(found, repeated(bytes_of(cluster, tokens), len(found)), slice(0, count))
        counts.append(count)
    return counts


def bytes_of(cluster: CacheCluster, tokens: Sequence[int]) -> list[GroupBytes]:
    """What the KV of these tokens is on each rank that holds chunks."""
    return shard_bytes(shards_of(cluster.link.world.layout, tokens))


def chunk_names(root: Path) -> list[set[str]]:
    """The chunk files of each rank."""
    return [{path.name for path in tree.rglob("*.kv")} for tree in sorted(root.glob("*/rank-*"))]


# -- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world_sizes", "use_mla"), [((2, 2), False), ((2, 3), True)])
def test_a_cluster_that_is_started_again_hits_on_its_first_pass(
    start_cluster: StartCluster, tmp_path: Path, world_sizes: tuple[int, int], use_mla: bool
) -> None:
    prompts = [prompt(number) for number in range(12)]  # more than memory holds
    arguments = {"layer_groups": MLA_GROUPS if use_mla else GROUPS, "use_mla": use_mla, "num_blocks": NUM_ROWS // 4}
    config = {"capacity_chunks": CAPACITY, "local_disk": str(tmp_path / "kv"), "max_local_disk_size": 4 * MIB}
    first, then = world_sizes
    with start_cluster(config, world_size=first, **arguments) as cluster:
        assert [put(cluster, tokens) for tokens in prompts] == [16] * len(prompts)
    assert not list(tmp_path.rglob("*.tmp"))
    with start_cluster(config, world_size=then, **arguments) as again:
        assert [again.locate(tokens).disk for tokens in prompts] == [16] * len(prompts)
        assert [got(again, tokens) for tokens in prompts[::2]] == [16] * 6
        assert [retrieved(again, tokens) for tokens in prompts[1::2]] == [16] * 6
        traffic = again.status().tiers["disk"].traffic
        assert (traffic["read"], traffic["written"]) == (48, 0)
        again.check_integrity()
        assert again.check_tiers() == [] and again.is_healthy()


def test_killed_at_any_moment_it_is_started_again_and_never_serves_a_wrong_byte(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """Coordinator and ranks are killed while chunks go to the disk, and others go for them."""
    moments = random.Random(os.environ.get("DISK_KILL_SEED", "0"))
    root, limit = tmp_path / "kv", 2**20
    num_hits = 0
    for round_ in range(NUM_KILLS + 1):
        cluster = start_cluster(
            {"capacity_chunks": CAPACITY, "local_disk": str(root), "max_local_disk_size": limit / 2**30},
            layer_groups=GROUPS,
            world_size=2,
            name="killed",
            num_blocks=NUM_ROWS // 4,
        )
        assert not list(root.rglob("*.tmp"))
        assert max(map(du, root.glob("*/rank-*"))) <= limit
        names = chunk_names(root)
        assert names[0] == names[1], "what not all ranks have is gone"
        hits = [got(cluster, prompt(number)) for number in range(80)]
        assert sum(hits) <= len(names[0]) * C
        num_hits += sum(hits)
        assert cluster.check_tiers() == [], f"round {round_}"
        if round_ < NUM_KILLS:
            kill_while_it_writes(cluster, moments)
        cluster.shutdown()
    assert num_hits > 0 or NUM_KILLS == 0


def kill_while_it_writes(cluster: CacheCluster, moments: random.Random) -> None:
    """Three threads store prompts until all processes of the cluster are killed, one right after the other."""
    status = cluster.status()
    pids = [status.coordinator_pid, *(rank.pid for rank in status.ranks if rank.pid is not None)]
    moments.shuffle(pids)
    is_over = threading.Event()

    def store(order: random.Random) -> None:
        with suppress(LMCacheRayError):  # when it is killed
            while not is_over.is_set():
                put(cluster, prompt(order.randrange(80)))

    threads = [threading.Thread(target=store, args=(random.Random(number),)) for number in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(moments.uniform(0.1, 1.0))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    is_over.set()
    for thread in threads:
        thread.join()


# -- one cluster, whose memory is small -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `shared` keeps its chunks."""
    return tmp_path_factory.mktemp("disk") / "kv"


@pytest.fixture(scope="module")
def shared(start_cluster: StartCluster, shared_root: Path) -> CacheCluster:
    """Two ranks, one on each node."""
    return start_cluster(
        {
            "capacity_chunks": CAPACITY,
            "local_disk": str(shared_root),
            "max_local_disk_size": 4 * MIB,
            "call_timeout_s": CALL_TIMEOUT_S,
        },
        layer_groups=GROUPS,
        world_size=2,
        name=SHARED,
        num_blocks=NUM_ROWS // 4,
    )


@pytest.fixture
def cluster(shared: CacheCluster) -> Iterator[CacheCluster]:
    """`shared`, empty before, and idle and sound after each test."""
    shared.clear()
    yield shared
    flush(shared)
    wait_until(lambda: shared.status().leases == 0, "no lease is left")
    shared.check_integrity()
    status = shared.status()
    assert (status.problems, status.tiers["disk"].traffic["damaged"]) == ((), 0)


def test_a_second_cluster_on_the_directory_is_refused_with_the_name_of_the_first(
    cluster: CacheCluster, start_cluster: StartCluster, shared_root: Path
) -> None:
    assert put(cluster, prompt(1)) == 16
    flush(cluster)
    named = f"{re.escape(str(shared_root))} belongs to the living cluster '{cluster.link.world.namespace}/{SHARED}'"
    with pytest.raises(DirectoryTakenError, match=named):
        start_cluster({"local_disk": str(shared_root), "max_local_disk_size": MIB}, layer_groups=GROUPS)
    cluster.clear(locations=["cpu"])
    assert got(cluster, prompt(1)) == 16, "the first has not noticed"


def test_views_of_chunks_that_lie_on_disk(cluster: CacheCluster) -> None:
    tokens = prompt(1)
    assert put(cluster, tokens) == 16
    flush(cluster)
    assert cluster.clear(locations=["cpu"]).num_removed == 4
    assert cluster.locate(tokens).disk == 16
    for start in (0, 5):
        with cluster.get(tokens, start, views=True) as found:
            assert found.num_tokens == 16
            joined = [[torch.cat(chunks, dim=2) for chunks in shard] for shard in found.shards]
            assert_same(shard_bytes(joined), bytes_of(cluster, tokens), slice(start, 16))
        cluster.clear(locations=["cpu"])


def test_batches_of_far_more_than_memory_holds(cluster: CacheCluster) -> None:
    prompts = [prompt(number) for number in range(16)]
    layout = cluster.link.world.layout
    assert cluster.put_many([Request(tokens, shards=shards_of(layout, tokens)) for tokens in prompts]) == [16] * 16
    flush(cluster)
    assert sum(cluster.locate(tokens).disk > 0 for tokens in prompts) >= 16 - CAPACITY // 4
    for _ in range(2):
        assert all_retrieved(cluster, prompts) == [16] * 16
        for tokens, copies in zip(prompts, cluster.get_many([Request(tokens) for tokens in prompts]), strict=True):
            assert not isinstance(copies, Exception), copies
            assert copies[0] == 16
            assert_same(shard_bytes(copies[1]), bytes_of(cluster, tokens))


def test_a_batch_of_stores_from_the_ranks_rows(cluster: CacheCluster) -> None:
    prompts = [prompt(number) for number in range(100, 116)]
    rows = np.random.default_rng(1).permutation(NUM_ROWS).reshape(16, 16)
    for tokens, where in zip(prompts, rows, strict=True):
        cluster.run_on_ranks(rank_functions.write_rows, where, bytes_of(cluster, tokens))
    requests = [Request(tokens, where) for tokens, where in zip(prompts, rows, strict=True)]
    assert cluster.store_many(requests) == [16] * 16
    flush(cluster)
    assert all_retrieved(cluster, prompts) == [16] * 16
    assert [got(cluster, tokens) for tokens in prompts] == [16] * 16


def test_a_prompt_longer_than_memory_is_loaded_as_far_as_it_fits(cluster: CacheCluster) -> None:
    long = prompt(7, num_chunks=CAPACITY + 12)
    for end in (CAPACITY, CAPACITY + 12):
        put(cluster, long[: end * C])
        flush(cluster)
    assert cluster.lookup(long) == CAPACITY * C
    assert got(cluster, long) == CAPACITY * C


class DiskDriver(RandomDriver):
    """The random operations of a small arena, above a disk.

    Memory is not cleared: a chunk that is pinned on disk while it comes up would be a miss for that moment.
    """

    def _clear(self, tokens: Sequence[int]) -> None:
        self._cluster.clear(None if self._random.random() < 0.3 else tokens, locations=["disk"])

    def _check_capacity(self) -> None:
        memory = self._cluster.status().tiers["cpu"]
        used = memory.ready + memory.writing + memory.quarantined
        self._check(used + memory.free == memory.capacity == CAPACITY, f"{used} + {memory.free} of {CAPACITY} chunks")


def test_random_operations_of_four_threads(cluster: CacheCluster) -> None:
    """Among them pins: what was found and pinned is there until it is unpinned, on disk or in memory."""
    assert NUM_THREADS * ROWS_PER_THREAD <= NUM_ROWS
    drivers = [DiskDriver(cluster, number, int(os.environ.get("RANDOM_OPERATIONS", "300")) // 4) for number in range(4)]
    threads = [threading.Thread(target=driver.run) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [failure for driver in drivers for failure in driver.failures] == []
    assert sum(driver.num_hit_tokens for driver in drivers) > 100


def test_the_directory_is_removed_while_it_is_used(cluster: CacheCluster, shared_root: Path) -> None:
    tokens, others = prompt(1), prompt(2)
    for each in (tokens, others):
        assert put(cluster, each) == 16
    flush(cluster)
    cluster.clear(locations=["cpu"])
    before = cluster.status().tiers["disk"].traffic["missing"]
    shutil.rmtree(shared_root)
    assert cluster.lookup(tokens) == 16, "nobody has looked yet"
    assert retrieved(cluster, tokens) == got(cluster, tokens) == cluster.lookup(tokens) == 0
    assert cluster.status().tiers["disk"].traffic["missing"] == before + 4
    assert put(cluster, tokens) == 16
    flush(cluster)
    cluster.clear(locations=["cpu"])
    assert retrieved(cluster, tokens) == 16
    assert got(cluster, others) == 0


# -- a rank that stands still -----------------------------------------------------------------------------------------


def test_a_rank_that_is_stopped_during_a_flush_holds_nobody_up(
    start_cluster: StartCluster, ray_nodes: list[str], tmp_path: Path
) -> None:
    """Both ranks are on the driver's node, so `put` needs no rank; only the disk does."""
    root = tmp_path / "kv"
    config = {
        "capacity_chunks": CAPACITY,
        "local_disk": str(root),
        "max_local_disk_size": 4 * MIB,
        "call_timeout_s": SHORT_TIMEOUT_S,
    }
    with start_cluster(config, layer_groups=GROUPS, world_size=2, nodes=[ray_nodes[0]] * 2) as cluster:
        stored = [prompt(number) for number in range(3)]
        assert [put(cluster, tokens) for tokens in stored] == [16] * 3
        flush(cluster)
        pid = cluster.status().ranks[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            for number in range(10, 22):
                begun = time.monotonic()
                put(cluster, prompt(number))
                assert cluster.lookup(prompt(number)) in range(0, 17, C)
                assert time.monotonic() - begun < 1.75 * SHORT_TIMEOUT_S
            assert got(cluster, prompt(21)) == 16, "without the disk, memory is free for all"
            assert any("disk tier is out of order: rank 1 did not answer" in said for said in cluster.status().problems)
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(cluster.is_healthy, "the disk is back")
        assert put(cluster, prompt(50)) == 16
        flush(cluster)
        cluster.clear(locations=["cpu"])
        assert got(cluster, prompt(50)) == 16
        for tokens in (*stored, *(prompt(number) for number in range(10, 22))):
            got(cluster, tokens)
        wait_until(lambda: len(set(map(frozenset, chunk_names(root)))) == 1, "what one rank wrote alone is deleted")
        assert cluster.check_tiers() == []
        cluster.check_integrity()


# -- replays ----------------------------------------------------------------------------------------------------------


def test_a_replay_hits_everything_on_its_first_pass_after_a_restart(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    requests = chat_workload(seed=3, num_requests=100)
    longest = max(len(request.hash_ids) for request in requests)
    config = {
        "chunk_size": BLOCK_SIZE,
        "block_size": BLOCK_SIZE,
        "capacity_chunks": 2 * longest,
        "local_disk": str(tmp_path / "kv"),
        "max_local_disk_size": 64 * MIB,
    }
    groups = parse_kvcache_shape_spec("(1,2,16,1,1):uint8:1")
    reports = []
    for _ in range(2):
        with start_cluster(config, layer_groups=groups, world_size=2, num_blocks=2000) as cluster:
            reports.append(replay(cluster, requests, window=16, verify=True))
            assert cluster.status().problems == ()
    first, again = reports
    assert (first.byte_mismatches, again.byte_mismatches) == (0, 0)
    assert 0 < first.hit_blocks < first.lookup_blocks and first.hit_blocks_by_tier["disk"] > 0
    assert again.hit_blocks == again.lookup_blocks
    assert again.hit_blocks_by_tier["disk"] > 0
    assert again.verified_bytes == 2 * again.hit_blocks * 2 * BLOCK_SIZE
