"""The life-cycle scenarios, in their short form, against the index of a running cluster.

The serving engine of the scenarios lives in this process and writes and reads the ranks' arenas itself, as engines
that own no arena do.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest

from cluster.client import CacheCluster
from cluster.coordinator_client import CoordinatorClient
from cluster.coordinator_index import CoordinatorIndex
from lmcache_ray.arena.mapped import ArenaMap
from lmcache_ray.layout import Placement, WorldLayout
from lmcache_ray.shard import EngineShard
from tests.contract.lifecycle_suite import LifecycleWorld, MakeWorld, ShortLifecycleSuite
from tests.on_ray.conftest import StartCluster


class ClusterWorld:
    """A cluster all of whose ranks are on this process's node."""

    def __init__(self, cluster: CacheCluster, maps: Mapping[int, ArenaMap]) -> None:
        self._cluster = cluster
        self.layout = cluster.link.world.layout
        self.shards = {rank: EngineShard(mapped.slots) for rank, mapped in maps.items()}

    def client(self, name: str) -> CoordinatorIndex:
        """A client that has not registered: its leases end by time or release alone."""
        calls = CoordinatorClient(self._cluster.link.coordinator.actor, name, timeout_s=30.0)
        return CoordinatorIndex(calls, lookup_timeout_s=30.0, timeout_s=30.0, has_remote=False)

    def check_idle(self) -> None:
        self._cluster.check_integrity()
        status = self._cluster.status()
        memory = status.tiers["cpu"]
        assert (status.leases, memory.writing, memory.quarantined) == (0, 0, 0)
        committed = {rank: shard.slots.num_committed for rank, shard in self.shards.items()}
        assert min(committed.values()) >= memory.ready

    def clear(self) -> None:
        assert self._cluster.clear().num_kept == 0


@pytest.fixture(scope="module")
def worlds(start_cluster: StartCluster, ray_nodes: list[str]) -> Iterator[MakeWorld]:
    """One cluster for each layout, started when first asked for."""
    made: dict[bytes, ClusterWorld] = {}
    with ExitStack() as opened:

        def make(layout: WorldLayout, num_slots: int) -> LifecycleWorld:
            if layout.fingerprint not in made:
                cluster = start_cluster(
                    {"capacity_chunks": num_slots, "chunk_size": layout.chunk_size},
                    rank_layouts=[rank.groups for rank in layout.ranks],
                    world_size=layout.world_size,
                    use_mla=layout.placement is Placement.FIRST_RANK,
                    nodes=ray_nodes[:1] * layout.world_size,
                    num_blocks=2,
                )
                paths = {rank: cluster.link.hellos[rank].arena_path for rank in layout.holders}
                maps = {
                    rank: opened.enter_context(ArenaMap.open(path, expected_fingerprint=layout.fingerprint))
                    for rank, path in paths.items()
                    if path is not None
                }
                made[layout.fingerprint] = ClusterWorld(cluster, maps)
            made[layout.fingerprint].clear()
            return made[layout.fingerprint]

        yield make


class TestOnRay(ShortLifecycleSuite):
    @pytest.fixture
    def make_world(self, worlds: MakeWorld) -> MakeWorld:
        return worlds
