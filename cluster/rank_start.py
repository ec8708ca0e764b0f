"""Making a rank inside its process: metadata, paged KV, arena, and the engine over the world's coordinator.

Apart from `worker.py`, because that module is imported wherever a handle of its actor arrives, in the coordinator too,
and must not bring torch along; this one is imported when a rank starts.
"""

import os
from collections.abc import Sequence

import torch

from lmcache_ray.broadcast.callables import BroadcastFns, broadcast_fns
from lmcache_ray.connector.paged import PagedConnector
from lmcache_ray.engine import EngineParts, LMCacheEngine
from lmcache_ray.index_service import LeaseNames, rank_client
from lmcache_ray.retrieval import Delivery, OwnRetrieval, ReceivingRetrieval, Retrieval, SendingRetrieval
from lmcache_ray.shard import ArenaSource

from .broadcaster import ClusterChannel, CoordinatorBroadcaster
from .coordinator_client import CoordinatorClient
from .coordinator_index import CoordinatorIndex
from .kv_source import KVSpec, make_kv_caches
from .rank import Rank, RankSetup
from .rank_metadata import rank_metadata
from .ray_calls import Actor
from .topology import RankPlace
from .world import WorldSpec


class RankContext:
    """What a function run by `CacheCluster.run_on_ranks` gets: this rank's engine and its paged KV.

    `broadcast_fns` are LMCache's two callables, carried by the coordinator: small things, on every rank in the same
    order, retrieves of a first-rank world counted.
    """

    def __init__(
        self,
        rank: Rank,
        engine: LMCacheEngine,
        kv_caches: Sequence[torch.Tensor],
        broadcast_fns: BroadcastFns,
    ) -> None:
        self.rank = rank
        self.engine = engine
        self.kv_caches = kv_caches
        self.broadcast_fns = broadcast_fns

    @property
    def worker_id(self) -> int:
        """The rank in the world."""
        return self.rank.place.worker_id


def start_rank(
    world: WorldSpec, place: RankPlace, kv: KVSpec, coordinator: Actor, *, may_attach: bool
) -> RankContext:
    """The rank at `place`, which may attach to the arena of its predecessor there. Raises what its parts raise."""
    layout = world.layout.ranks[place.worker_id]
    metadata = rank_metadata(world, place, kv.num_blocks)
    kv_caches = make_kv_caches(kv, metadata, layout)
    rank = Rank(world, RankSetup(place, metadata, PagedConnector(layout, kv_caches)), may_attach=may_attach)
    # A store or retrieve of an engine makes up to three calls: each may take a third of its deadline.
    timeout_s = world.call_timeout_s / 3
    calls = CoordinatorClient(coordinator, rank_client(place.worker_id), timeout_s=timeout_s)
    broadcaster = CoordinatorBroadcaster(place.worker_id, world.layout.world_size, calls, timeout_s=timeout_s)
    return RankContext(rank, _engine_of(rank, calls, broadcaster), kv_caches, broadcast_fns(broadcaster))


def _engine_of(rank: Rank, calls: CoordinatorClient, broadcaster: CoordinatorBroadcaster) -> LMCacheEngine:
    world = rank.world
    index = CoordinatorIndex(
        calls,
        lookup_timeout_s=world.lookup_timeout_s,
        timeout_s=world.call_timeout_s / 3,
        has_remote=world.tiers.remote is not None,
    )
    lease_names = LeaseNames(f"{rank_client(rank.place.worker_id)}-{os.getpid()}", "ranks")
    return LMCacheEngine(
        EngineParts(
            metadata=rank.metadata,
            layout=world.layout,
            hasher=world.hasher(),
            index=index,
            shard=rank.shard,
            retrieval=_retrieval_of(rank, index, lease_names, broadcaster),
            lease_names=lease_names,
            connector=rank.connector,
        )
    )


def _retrieval_of(
    rank: Rank, index: CoordinatorIndex, lease_names: LeaseNames, broadcaster: CoordinatorBroadcaster
) -> Retrieval:
    """Every rank plans for itself, but in a first-rank world, where rank 0 plans and the others read what it says."""
    layout, place = rank.world.layout, rank.place
    delivery = Delivery(index, min_tokens=rank.world.min_retrieve_tokens)
    channel = ClusterChannel(broadcaster, rank, has_other_nodes=place.local_world_size < layout.world_size)
    if rank.shard is None:
        return ReceivingRetrieval(delivery, channel, place.worker_id)
    source = ArenaSource(rank.shard.slots)
    if not layout.has_receivers:
        return OwnRetrieval(delivery, source, lease_names)
    return SendingRetrieval(delivery, source, lease_names, channel, world_size=layout.world_size)
