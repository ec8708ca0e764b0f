"""Making a rank inside its process: metadata, paged KV, arena, and the engine over the world's coordinator.

Apart from `worker.py`, because that module is imported wherever a handle of its actor arrives, in the coordinator too,
and must not bring torch along; this one is imported when a rank starts.
"""

import os
from collections.abc import Sequence

import torch

from lmcache_ray.connector.paged import PagedConnector
from lmcache_ray.engine import EngineParts, LMCacheEngine
from lmcache_ray.index_service import LeaseNames
from lmcache_ray.layout import Placement

from .broadcaster import ClusterChannel, CoordinatorBroadcaster
from .coordinator_index import CoordinatorIndex
from .kv_source import KVSpec, make_kv_caches
from .rank import Rank, RankSetup
from .rank_metadata import rank_metadata
from .ray_calls import Actor
from .topology import RankPlace
from .world import WorldSpec


class RankContext:
    """What a function run by `CacheCluster.run_on_ranks` gets: this rank's engine and its paged KV."""

    def __init__(self, rank: Rank, engine: LMCacheEngine, kv_caches: Sequence[torch.Tensor]) -> None:
        self.rank = rank
        self.engine = engine
        self.kv_caches = kv_caches

    @property
    def worker_id(self) -> int:
        """The rank in the world."""
        return self.rank.place.worker_id


def start_rank(world: WorldSpec, place: RankPlace, kv: KVSpec, coordinator: Actor) -> RankContext:
    """The rank at `place`. Raises what its parts raise."""
    layout = world.layout.ranks[place.worker_id]
    metadata = rank_metadata(world, place, kv.num_blocks)
    kv_caches = make_kv_caches(kv, metadata, layout)
    rank = Rank(world, RankSetup(place, metadata, PagedConnector(layout, kv_caches)))
    return RankContext(rank, _engine_of(rank, coordinator), kv_caches)


def _engine_of(rank: Rank, coordinator: Actor) -> LMCacheEngine:
    world, client = rank.world, f"rank{rank.place.worker_id}"
    return LMCacheEngine(
        EngineParts(
            metadata=rank.metadata,
            layout=world.layout,
            hasher=world.hasher(),
            index=CoordinatorIndex(
                coordinator,
                client,
                call_timeout_s=world.call_timeout_s,
                lookup_timeout_s=world.lookup_timeout_s,
            ),
            shard=rank.shard,
            channel=_channel_of(rank, coordinator),
            lease_names=LeaseNames(f"{client}-{os.getpid()}", "ranks"),
            connector=rank.connector,
            min_retrieve_tokens=world.min_retrieve_tokens,
        )
    )


def _channel_of(rank: Rank, coordinator: Actor) -> ClusterChannel | None:
    """How rank 0's plans reach the others; None where every rank plans for itself."""
    world, place = rank.world, rank.place
    world_size = world.layout.world_size
    if world.layout.placement is not Placement.FIRST_RANK or world_size == 1:
        return None
    broadcaster = CoordinatorBroadcaster(place.worker_id, world_size, coordinator, timeout_s=world.call_timeout_s)
    return ClusterChannel(broadcaster, rank, has_other_nodes=place.local_world_size < world_size)
