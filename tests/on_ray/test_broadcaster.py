"""The broadcaster of ranks in different processes against the contract, over a real coordinator actor."""

import sys
import uuid
from collections.abc import Iterator

import pytest
import ray
from ray.exceptions import RayActorError

from cluster.broadcaster import CoordinatorBroadcaster
from cluster.coordinator import Coordinator, concurrency_groups
from cluster.coordinator_client import CoordinatorClient
from cluster.ray_calls import Actor
from cluster.world import WorldSpec
from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import BroadcastError
from lmcache_ray.layout import Placement, ShardSpec, uniform_world
from lmcache_ray.tiers.spec import TierSpec
from tests.contract.broadcaster_suite import MakeWorld, ManyRankSuite, TagSuite

MAX_RANKS = 4


class FreshCoordinator(Coordinator):
    """A coordinator whose broadcasts can begin anew, so that one process serves all tests."""

    @ray.method(concurrency_group="control")
    def begin_anew(self, world_size: int, timeout_s: float) -> None:
        """Forget every broadcast; from now on there are `world_size` ranks."""
        self._core.exchange = Exchange(uuid.uuid4().hex, world_size, timeout_s)  # type: ignore[misc]


def tiny_world() -> WorldSpec:
    group = ShardSpec((0,), range(1), 8, KVDtype.FLOAT16, kv_size=1)
    return WorldSpec(
        namespace="lmcache_ray-tests",
        name="broadcaster",
        model_name="m",
        model_revision=None,
        layout=uniform_world([group], chunk_size=4, world_size=MAX_RANKS, placement=Placement.FIRST_RANK),
        num_slots=4,
        save_unfull_chunk=False,
        min_retrieve_tokens=0,
        block_size=4,
        cache_policy="lru",
        arena_dir="/dev/shm",
        lease_timeout_s=30.0,
        lookup_timeout_s=30.0,
        call_timeout_s=30.0,
        restart_window_s=30.0,
        tiers=TierSpec(),
        life="one",
        lossy_serde=None,
    )


def start_coordinator() -> Actor:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    groups = concurrency_groups(MAX_RANKS)
    actor: Actor = ray.remote(concurrency_groups=groups)(FreshCoordinator).options(num_cpus=0).remote(tiny_world())
    return actor


def client_of(actor: Actor, rank: int) -> CoordinatorClient:
    return CoordinatorClient(actor, f"rank{rank}", timeout_s=30.0)


@pytest.fixture(scope="module")
def coordinator(ray_nodes: list[str]) -> Iterator[Actor]:
    actor = start_coordinator()
    yield actor
    ray.kill(actor)


class TestCoordinatorBroadcaster(ManyRankSuite, TagSuite):
    """The ranks are threads of the driver; each has a broadcaster of its own."""

    @pytest.fixture
    def make_world(self, coordinator: Actor) -> MakeWorld:
        def make(world_size: int, timeout_s: float) -> list[CoordinatorBroadcaster]:
            ray.get(coordinator.begin_anew.remote(world_size, timeout_s), timeout=30)
            return [
                CoordinatorBroadcaster(rank, world_size, client_of(coordinator, rank), timeout_s=timeout_s)
                for rank in range(world_size)
            ]

        return make

    def test_without_a_coordinator_no_broadcast_is_possible(self, ray_nodes: list[str]) -> None:
        actor = start_coordinator()
        ends = [CoordinatorBroadcaster(rank, MAX_RANKS, client_of(actor, rank), timeout_s=5.0) for rank in range(2)]
        ends[0].broadcast_object("there", src=0)
        assert ends[1].broadcast_object(None, src=0) == "there"
        ray.kill(actor)
        with pytest.raises(RayActorError):  # Ray kills in the background
            while True:
                ray.get(actor.ping.remote(), timeout=30)
        for end in ends:
            with pytest.raises(BroadcastError, match="coordinator"):
                end.broadcast_object(None, src=0)
