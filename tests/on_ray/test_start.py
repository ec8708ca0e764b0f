"""Starting, finding and leaving: what cannot be started says why and leaves nothing."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.client import CacheCluster
from cluster.launch import end_orphans, end_remains
from cluster.world import coordinator_name, rank_name
from lmcache_ray.errors import (
    ArenaError,
    CapacityError,
    ClosedError,
    ClusterExistsError,
    ClusterNotFoundError,
    ConfigError,
    DeadlineError,
)
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray import rank_functions
from tests.on_ray.conftest import NAMESPACE, StartCluster, living_actors, make_config

ROOT = Path(__file__).resolve().parents[2]
GROUPS = parse_kvcache_shape_spec("(2,2,16,1,4):float16:2")


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster, ray_nodes: list[str]) -> CacheCluster:
    """One rank on the driver's node; its KV by a function."""
    return start_cluster(
        layer_groups=GROUPS, name="lives", nodes=ray_nodes[:1], kv_source=rank_functions.numbered_kv, num_blocks=3
    )


@pytest.fixture
def traces(arena_dir: Path) -> Iterator[None]:
    """Fails a test that leaves a file or an actor more than it found."""
    before = sorted(os.listdir(arena_dir)), sorted(living_actors())
    yield
    assert (sorted(os.listdir(arena_dir)), sorted(living_actors())) == before


def test_kv_comes_from_the_given_function(cluster: CacheCluster) -> None:
    (rows,) = cluster.run_on_ranks(rank_functions.read_rows, np.arange(24))
    (group,) = rows
    assert group.shape == (2, 2, 24, 8)
    assert [set(group[:, layer].flatten()) for layer in range(2)] == [{0}, {1}]
    tokens = list(range(8))
    assert cluster.store(tokens, list(range(16, 24))) == 8
    with pytest.raises(ValueError, match="rows 0 to 23"):
        cluster.store(tokens, list(range(17, 25)))


def test_a_name_is_taken_while_its_cluster_lives(cluster: CacheCluster, start_cluster: StartCluster) -> None:
    with pytest.raises(ClusterExistsError, match="'lives' lives in namespace"):
        start_cluster(layer_groups=GROUPS, name="lives")
    assert cluster.is_healthy()


def test_another_connection_sees_the_same_chunks_and_ends_alone(cluster: CacheCluster, traces: None) -> None:
    tokens = list(range(40, 48))
    cluster.store(tokens, list(range(8)))
    with CacheCluster.connect("lives", namespace=NAMESPACE) as other:
        assert other.lookup(tokens) == 8
        assert cluster.status().clients == 2
        other.lookup(tokens, lookup_id="left behind", pin=True)
        assert other.status().leases == 1
    assert (cluster.status().clients, cluster.status().leases) == (1, 0)
    for call in (
        lambda: other.lookup(tokens),
        lambda: other.store(tokens, list(range(8))),
        lambda: other.get(tokens),
        lambda: other.get_many([]),
        lambda: other.lookup_unpin("x"),
        lambda: other.clear(),
        lambda: other.status(),
        lambda: other.run_on_ranks(rank_functions.place),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()
    assert not other.is_healthy()
    assert cluster.lookup(tokens) == 8


def make_named(name: str) -> ActorHandle[object]:
    """A living actor in the tests' namespace with the name of one of a cluster's."""

    class Named:  # local, so that it is sent by value
        def stop(self) -> None:
            """What every actor of a cluster can do."""

        def close_tiers(self, flush_s: float) -> None:
            """What a coordinator is asked first."""

        def answer(self) -> int:
            """A sign of life: its process."""
            return os.getpid()

    actor = ray.remote(Named).options(name=name, namespace=NAMESPACE, num_cpus=0).remote()
    ray.get(actor.answer.remote(), timeout=30)
    return actor


def test_ranks_that_have_lost_their_coordinator_are_ended_by_a_start(
    start_cluster: StartCluster, ray_nodes: list[str], traces: None
) -> None:
    orphan = make_named(rank_name("orphaned", 0))
    with start_cluster(layer_groups=GROUPS, name="orphaned") as cluster:
        assert cluster.is_healthy()
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(orphan.answer.remote(), timeout=30)


def test_a_cluster_that_another_driver_is_making_is_left_alone(ray_nodes: list[str], traces: None) -> None:
    """Its coordinator did not answer when it was asked for; it is there when its ranks are found."""
    theirs = [make_named(name) for name in (coordinator_name("young"), rank_name("young", 0))]
    try:
        with pytest.raises(ClusterExistsError, match="'young' is being started or ended"):
            end_orphans("young", NAMESPACE)
        assert len(ray.get([actor.answer.remote() for actor in theirs], timeout=30)) == 2
    finally:
        assert end_remains("young", NAMESPACE) == 2


def test_of_two_starts_at_once_one_wins_and_is_whole(start_cluster: StartCluster, traces: None) -> None:
    def start(_: int) -> CacheCluster | Exception:
        try:
            return start_cluster(layer_groups=GROUPS, world_size=2, name="contended")
        except ClusterExistsError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(start, range(2)))
    (winner,) = (result for result in results if isinstance(result, CacheCluster))
    with winner:
        assert winner.is_healthy()
        tokens = list(range(8))
        assert winner.store(tokens, tokens) == 8


def test_a_session_leaves_the_ray_that_it_joined(ray_nodes: list[str], tmp_path: Path) -> None:
    program = """
import ray
from cluster.ray_session import open_session
from lmcache_ray.errors import ClusterError
for num_nodes in (1, 2, 99):
    try:
        session = open_session("sessions", num_nodes=num_nodes)
        print(num_nodes, ray.is_initialized())
        session.close()
    except ClusterError as error:
        print(error)
    assert not ray.is_initialized()
"""
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "1 True", "2 True", "99 nodes were asked for; the Ray that this process is connected to has 2"
    ], done.stderr


def test_an_unknown_cluster_is_not_found(ray_nodes: list[str]) -> None:
    with pytest.raises(ClusterNotFoundError, match=f"'nobody' lives in namespace '{NAMESPACE}'"):
        CacheCluster.connect("nobody", namespace=NAMESPACE)
    with pytest.raises(ClusterNotFoundError, match="'elsewhere'"):
        CacheCluster.connect("lives", namespace="elsewhere")


def test_arenas_that_cannot_fit_are_refused_with_all_sizes(start_cluster: StartCluster, traces: None) -> None:
    disk = os.statvfs("/dev/shm")
    groups = parse_kvcache_shape_spec("(1,2,1,1024,1024):float32:1")
    chunks = 10 * disk.f_blocks * disk.f_frsize // (4 * 2 * 2**22)  # so much that nothing can be reserved, if tried
    with pytest.raises(CapacityError, match=r"need \d+ bytes \(rank 0: \d+, rank 1: \d+\).* has \d+ left") as caught:
        start_cluster({"capacity_chunks": chunks}, layer_groups=groups, world_size=2, ranks_per_node=[2])
    assert "node " in str(caught.value)


def test_a_directory_that_a_node_does_not_have_is_named_with_the_node(ray_nodes: list[str], traces: None) -> None:
    config = make_config(Path("/dev/shm/no-such"))
    with pytest.raises(ArenaError, match=r"node \w+ cannot sweep arena directory /dev/shm/no-such"):
        CacheCluster.start(config, model_name="m", layer_groups=GROUPS, name="nowhere", namespace=NAMESPACE)


def test_a_chunk_larger_than_the_arena_is_refused_with_both_sizes(start_cluster: StartCluster, traces: None) -> None:
    config = {"chunk_size": 4096, "capacity_chunks": None, "max_local_cpu_size": 0.0001}
    with pytest.raises(CapacityError, match="one chunk of 131072 bytes is larger than the arena of 107374 bytes"):
        start_cluster(config, layer_groups=GROUPS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"nodes": ["no-such-node"]}, "'no-such-node' is not alive"),
        ({"ranks_per_node": [1, 1]}, "'1,1' makes 2 ranks; world_size is 1"),
        ({"ranks_per_node": [1, 1, 1], "world_size": 3}, "names 3 nodes; 2 are alive"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"layer_groups": None}, "the KV is not described"),
        ({"layer_groups": None, "kv_dtype": torch.float16}, "both or neither"),
    ],
)
def test_arguments_that_do_not_agree_are_refused(
    start_cluster: StartCluster, traces: None, arguments: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        start_cluster(**{"layer_groups": GROUPS, **arguments})


def test_a_kv_source_that_is_not_there_ends_the_start(start_cluster: StartCluster, traces: None) -> None:
    with pytest.raises(ConfigError, match="has no function 'no_such'"):
        start_cluster(layer_groups=GROUPS, kv_source="cluster.replay_rank:no_such")


def test_a_placement_without_memory_ends_in_time_and_names_it(
    start_cluster: StartCluster, ray_nodes: list[str], traces: None
) -> None:
    """An actor of the test reserves the other node's `memory`, all but a little."""
    node = next(node for node in ray.nodes() if node["NodeID"] == ray_nodes[1])
    reserve = ray.remote(rank_functions.Idler).options(
        num_cpus=0,
        memory=int(node["Resources"]["memory"]) - 10_000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray_nodes[1], soft=False),
    )
    holder = reserve.remote()
    ray.get(holder.answer.remote(), timeout=30)
    begun = time.monotonic()
    try:
        with pytest.raises(DeadlineError) as caught:
            start_cluster(
                {"capacity_chunks": 1000}, layer_groups=GROUPS, world_size=2, nodes=ray_nodes, timeout_s=8.0
            )
    finally:
        ray.kill(holder)
    assert time.monotonic() - begun < 30
    for named in ("rank 1", ray_nodes[1], "within 8 s", "bytes of Ray `memory`"):
        assert named in str(caught.value)


def test_shutdown_ends_every_process_and_file(start_cluster: StartCluster, traces: None) -> None:
    with start_cluster(layer_groups=GROUPS, world_size=2, name="ends") as cluster:
        status = cluster.status()
        pids = [status.coordinator_pid, *(rank.pid for rank in status.ranks if rank.pid)]
        paths = [rank.arena_path for rank in status.ranks if rank.arena_path]
        assert len(pids) == 3 and all(Path(path).exists() for path in paths)
        cluster.shutdown()
        cluster.shutdown()
        assert not any(Path(path).exists() for path in paths)
        assert not any(":ends:" in name for name in living_actors()), "the name can be used again at once"
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
