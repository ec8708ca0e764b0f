"""A cluster that is restarted rank by rank, drained, started from within a full placement group, or loses a node."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.client import CacheCluster, Drained
from cluster.ray_session import RaySession, alive_node_ids
from lmcache_ray.errors import ClusterError, ClusterNotFoundError, ConfigError, DeadlineError
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from lmcache_ray.tiers.hits import TierHits
from tests.on_ray.checked_calls import got, prompt, put, retrieved, store, wait_until
from tests.on_ray.conftest import NAMESPACE, StartCluster, make_config
from tests.on_ray.random_driver import C

WHOLE = 4 * C
GROUPS = parse_kvcache_shape_spec("(1,2,16,2,4):float16:1")
DISK_GB = 2**-6


def start(start_cluster: StartCluster, disk: Path, **arguments: object) -> CacheCluster:
    config = {"local_disk": str(disk), "max_local_disk_size": DISK_GB, "call_timeout_s": 12}
    return start_cluster(config, layer_groups=GROUPS, world_size=2, num_blocks=64, **arguments)


def test_ranks_restarted_one_by_one_under_load_keep_what_is_committed(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """Then the cluster is drained: everything is in files, and the next one hits it."""
    cluster = start(start_cluster, tmp_path, name="rolling")
    for number in range(5):
        assert store(cluster, prompt(number)) == WHOLE
    stopping, faults = threading.Event(), list[BaseException]()

    def work() -> None:
        number = 100
        while not stopping.is_set():
            number += 1
            try:
                put(cluster, prompt(number % 8 + 100))
                got(cluster, prompt(number % 5))
            except (ClusterError, DeadlineError):
                pass
            except BaseException as error:
                faults.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    epochs = [rank.epoch for rank in cluster.status().ranks]
    assert list(cluster.restart_ranks()) == [0, 1]
    stopping.set()
    worker.join(20)
    assert faults == [] and not worker.is_alive()
    assert [rank.epoch for rank in cluster.status().ranks] == [epoch + 1 for epoch in epochs]
    for number in range(5):
        assert got(cluster, prompt(number)) == retrieved(cluster, prompt(number)) == WHOLE
    with pytest.raises(ConfigError, match="there is no rank 2 in a world of 2"):
        cluster.restart_ranks([2])

    assert put(cluster, prompt(6)) == WHOLE
    assert cluster.drain() == Drained(open_stores=0, unflushed=0)
    with pytest.raises(ClusterNotFoundError):
        CacheCluster.connect("rolling", namespace=NAMESPACE)
    successor = start(start_cluster, tmp_path, name="rolling")
    assert successor.status().epoch > 1
    assert successor.locate(prompt(6)) == TierHits(WHOLE, 0, WHOLE, 0)
    assert got(successor, prompt(6)) == WHOLE
    successor.shutdown()


@ray.remote(num_cpus=1)
class Replica:
    """As one of Ray Serve: whatever it starts goes into its placement group, unless it says otherwise."""

    def use(self, arena_dir: str) -> tuple[int, int, int]:
        """Start a cluster, store, retrieve, and have a rank brought back; what each answers."""
        config = make_config(Path(arena_dir))
        named = {"name": "captured", "namespace": NAMESPACE}
        with CacheCluster.start(
            config, model_name="m", layer_groups=GROUPS, world_size=2, num_blocks=64, **named
        ) as cluster:
            stored = put(cluster, prompt(1))
            cluster.restart_ranks([1])
            with CacheCluster.connect("captured", namespace=NAMESPACE) as other:
                return stored, other.lookup(prompt(1)), got(cluster, prompt(1))


def test_a_start_from_an_actor_whose_full_placement_group_captures_its_children(
    arena_dir: Path, ray_nodes: list[str]
) -> None:
    group = placement_group([{"CPU": 1}])
    try:
        assert group.wait(30)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        replica = Replica.options(scheduling_strategy=strategy).remote()
        assert ray.get(replica.use.remote(str(arena_dir)), timeout=90) == (WHOLE, WHOLE, WHOLE)
        ray.kill(replica)
    finally:
        remove_placement_group(group)


@pytest.fixture
def third_node(ray_session: RaySession) -> Iterator[object]:
    """A node that may be removed."""
    node = ray_session.simulated.add_node(num_cpus=4, object_store_memory=80 * 2**20)  # type: ignore[attr-defined]
    yield node
    if node in ray_session.simulated.list_all_nodes():  # type: ignore[attr-defined]
        ray_session.simulated.remove_node(node)  # type: ignore[attr-defined]


def test_a_rank_whose_node_is_gone_is_brought_back_elsewhere_and_what_its_disk_has_is_hit(
    start_cluster: StartCluster, ray_session: RaySession, ray_nodes: list[str], third_node: object, tmp_path: Path
) -> None:
    """Its arena is gone with the node. The simulated nodes share a file system, as nodes with a network disk do."""
    wait_until(lambda: len(alive_node_ids()) == 3, "the third node is there")
    (there,) = set(alive_node_ids()) - set(ray_nodes)
    cluster = start(start_cluster, tmp_path, nodes=[ray_nodes[0], there])
    assert store(cluster, prompt(1)) == WHOLE
    wait_until(lambda: cluster.status().tiers["disk"].ready == 4, "it is on disk, too")
    ray_session.simulated.remove_node(third_node, allow_graceful=False)  # type: ignore[attr-defined]
    wait_until(lambda: not cluster.health().can_serve, "its loss is noticed")
    (problem,) = [problem for problem in cluster.health().problems if problem.rank is not None]
    assert problem.rank == 1 and problem.since is not None and "rank 1 is lost" in problem.what
    assert cluster.lookup(prompt(1)) == put(cluster, prompt(2)) == got(cluster, prompt(1)) == 0
    wait_until(cluster.is_healthy, "it is brought back on another node", 60)
    assert cluster.status().ranks[1].node_id in ray_nodes and cluster.status().ranks[1].epoch == 2
    assert cluster.locate(prompt(1)) == TierHits(WHOLE, 0, WHOLE, 0), "memory is gone, the disk is not"
    assert got(cluster, prompt(1)) == retrieved(cluster, prompt(1)) == WHOLE
    assert store(cluster, prompt(3)) == retrieved(cluster, prompt(3)) == WHOLE
    cluster.check_integrity()
    cluster.shutdown()
    assert os.listdir(tmp_path)
