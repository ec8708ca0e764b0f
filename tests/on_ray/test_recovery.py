"""Whatever process of a cluster is killed, what was committed is a hit again on every rank, byte for byte, and what was
cleared is not; calls that were under way end as a result or a named error.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from cluster.client import CacheCluster
from lmcache_ray.errors import ClusterError, DeadlineError
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray import rank_functions
from tests.on_ray.checked_calls import got, prompt, put, retrieved, store, wait_until
from tests.on_ray.conftest import NAMESPACE, StartCluster
from tests.on_ray.random_driver import C

CALL_TIMEOUT_S = 12.0
BACK_WITHIN_S = 15.0
WHOLE = 4 * C


@pytest.fixture(scope="module", params=["per rank", "MLA"])
def cluster(request: pytest.FixtureRequest, start_cluster: StartCluster, ray_nodes: list[str]) -> CacheCluster:
    """Two ranks of the driver's node and one of the other."""
    here, there = ray_nodes
    is_mla = request.param == "MLA"
    return start_cluster(
        {"call_timeout_s": CALL_TIMEOUT_S, "capacity_chunks": 128},
        layer_groups=parse_kvcache_shape_spec("(2,1,16,1,8):bfloat16:2" if is_mla else "(2,2,16,2,4):float16:2"),
        world_size=3,
        use_mla=is_mla,
        nodes=[here, there, here],
        num_blocks=64,
    )


def pids_of(cluster: CacheCluster) -> dict[str, int]:
    """The processes by name: "coordinator", "rank 0", ..."""
    status = cluster.status()
    ranks = {f"rank {rank.worker_id}": rank.pid for rank in status.ranks if rank.pid is not None}
    return {"coordinator": status.coordinator_pid, **ranks}


def kill(cluster: CacheCluster, *names: str) -> frozenset[int]:
    """All at once; the process ids that they had."""
    pids = pids_of(cluster)
    for name in names:
        os.kill(pids[name], signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pids[name]) for name in names), f"{names} are dead")
    return frozenset(pids[name] for name in names)


def is_alive(pid: int) -> bool:
    """A zombie has ended, too."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until_whole(cluster: CacheCluster, dead: frozenset[int]) -> None:
    """Until others have come in the place of `dead` processes."""

    def is_whole() -> bool:
        return dead.isdisjoint(pids_of(cluster).values()) and cluster.is_healthy()

    wait_until(is_whole, "the cluster is whole again", BACK_WITHIN_S)


def check_hits(cluster: CacheCluster, *numbers: int) -> None:
    """Each prompt is whole: in the driver, and on every rank."""
    for number in numbers:
        assert cluster.lookup(prompt(number)) == WHOLE
        assert got(cluster, prompt(number)) == retrieved(cluster, prompt(number)) == WHOLE


def check_idle(cluster: CacheCluster) -> None:
    """Nothing is left of what was broken off."""

    def is_idle() -> bool:
        status = cluster.status()
        return status.leases == status.tiers["cpu"].writing == status.tiers["cpu"].quarantined == 0

    wait_until(is_idle, "no lease, and no slot that is being written or quarantined")
    cluster.check_integrity()


def bytes_of_views(shards: Sequence[Sequence[Sequence[torch.Tensor]]]) -> list[bytes]:
    return [
        chunk.contiguous().view(torch.uint8).numpy().tobytes() for shard in shards for group in shard for chunk in group
    ]


@contextmanager
def under_load(cluster: CacheCluster) -> Iterator[list[str]]:
    """Stores, puts, gets, retrieves and broadcasts without a pause; what has failed, by a name that nobody expects."""
    stopping, faults = threading.Event(), list[str]()

    def repeat(name: str, call: Callable[[int], object]) -> None:
        number = 0
        while not stopping.is_set():
            number += 1
            begun = time.monotonic()
            try:
                call(number)
            except (ClusterError, DeadlineError):
                pass
            except BaseException as error:
                faults.append(f"{name}: {type(error).__name__}: {error}")
            if time.monotonic() - begun > CALL_TIMEOUT_S + 1:
                faults.append(f"{name} took {time.monotonic() - begun:.1f} s")

    rows = np.arange(WHOLE)
    calls: dict[str, Callable[[int], object]] = {
        "store": lambda number: cluster.store(prompt(100 + number % 7), rows),
        "put": lambda number: put(cluster, prompt(200 + number % 7)),
        "get": lambda number: got(cluster, prompt(200 + number % 7)),
        "engines": lambda number: cluster.run_on_ranks(rank_functions.retrieve_or_name, prompt(1), [rows] * 3, ()),
    }
    threads = [threading.Thread(target=repeat, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    try:
        yield faults
    finally:
        stopping.set()
        for thread in threads:
            thread.join(CALL_TIMEOUT_S + 5)
        assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("names", [("rank 1",), ("coordinator", "rank 0", "rank 2")])
def test_killed_while_idle(cluster: CacheCluster, names: tuple[str, ...]) -> None:
    for number in (1, 2):
        assert store(cluster, prompt(number)) == WHOLE
    assert put(cluster, prompt(3)) == WHOLE
    epochs = [rank.epoch for rank in cluster.status().ranks]
    dead = kill(cluster, *names)
    with CacheCluster.connect(cluster.link.world.name, namespace=NAMESPACE) as newcomer:
        wait_until_whole(newcomer, dead)
        assert newcomer.lookup(prompt(1)) == WHOLE
    wait_until_whole(cluster, dead)
    check_hits(cluster, 1, 2, 3)
    for rank in cluster.status().ranks:
        assert rank.epoch == epochs[rank.worker_id] + (f"rank {rank.worker_id}" in names)
    assert store(cluster, prompt(4)) == WHOLE
    check_hits(cluster, 4)
    check_idle(cluster)
    assert cluster.clear(prompt(4)).num_removed == 4


@pytest.mark.parametrize("names", [("rank 0",), ("coordinator", "rank 1")])
def test_killed_at_work(cluster: CacheCluster, names: tuple[str, ...]) -> None:
    for number in (1, 2):
        assert store(cluster, prompt(number)) == WHOLE
    with under_load(cluster) as faults:
        time.sleep(0.7)
        dead = kill(cluster, *names)
        wait_until(lambda: got(cluster, prompt(2)) == WHOLE, "a committed prompt is a hit again", BACK_WITHIN_S)
        time.sleep(0.5)
    assert faults == []
    wait_until_whole(cluster, dead)
    check_hits(cluster, 1, 2)
    check_idle(cluster)


@pytest.mark.parametrize("is_everything", [True, False])
def test_what_was_cleared_while_a_rank_was_away_stays_cleared(cluster: CacheCluster, is_everything: bool) -> None:
    """The one that holds the chunks, or one of those that do, returns only after the next coordinator has come."""
    for number in (5, 6):
        assert store(cluster, prompt(number)) == WHOLE
    dead = kill(cluster, "rank 0")
    cleared = cluster.clear(None if is_everything else prompt(5))
    dead |= kill(cluster, "coordinator")
    wait_until_whole(cluster, dead)
    assert cluster.lookup(prompt(5)) == 0, cleared
    assert cluster.lookup(prompt(6)) == (0 if is_everything else WHOLE)
    check_idle(cluster)


def test_views_show_the_same_bytes_when_the_coordinator_has_died(cluster: CacheCluster) -> None:
    """The next coordinator gives the slots that they show to nobody, although all others are used again."""
    assert put(cluster, prompt(7)) == WHOLE
    num_tokens, shards = cluster.get(prompt(7), views=True)
    assert num_tokens == WHOLE
    before = bytes_of_views(shards)
    wait_until_whole(cluster, kill(cluster, "coordinator"))
    for number in range(300, 300 + 128 // 4 + 8):
        put(cluster, prompt(number))
    assert cluster.lookup(prompt(300)) == 0, "the arena was filled anew"
    assert bytes_of_views(shards) == before
    del shards
    wait_until(lambda: cluster.lookup(prompt(1)) >= 0 and cluster.status().view_leases == 0, "the views have ended")


def test_a_rank_that_was_stopped_beyond_every_deadline_rejoins_and_damages_nothing(cluster: CacheCluster) -> None:
    """It is stopped in the middle of stores, the coordinator dies, and the next one waits for it."""
    assert store(cluster, prompt(8)) == WHOLE
    pid = pids_of(cluster)["rank 2"]
    with under_load(cluster) as faults:
        time.sleep(0.3)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        dead = kill(cluster, "coordinator")
        time.sleep(CALL_TIMEOUT_S / 2)
        os.kill(pid, signal.SIGCONT)
        wait_until_whole(cluster, dead)
    assert faults == []
    check_hits(cluster, 8)
    check_idle(cluster)
