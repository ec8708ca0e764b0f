"""A world, or a part of it, in one process: index, arenas and tiers of its ranks, and the parts of their engines.

Apart from `build.py`, which reads the configuration; this takes plain values.
"""

import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_ray.arena.capacity import check_memory
from lmcache_ray.arena.private import PrivateArena
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.connector.base import KVConnector
from lmcache_ray.engine import EngineParts
from lmcache_ray.first_rank import FIRST_RANK, FirstRankChannel
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index_service import IndexService, LeaseNames, rank_client
from lmcache_ray.keys import ChunkHasher
from lmcache_ray.layout import WorldLayout
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.retrieval import Delivery, OwnRetrieval, ReceivingRetrieval, Retrieval, SendingRetrieval
from lmcache_ray.shard import ArenaSource, EngineShard
from lmcache_ray.storage.directory_lock import DirectoryOwner
from lmcache_ray.tiers.assembly import MakeIndex, check_disk_limit, index_maker, open_remote, tier_service, tiered_index
from lmcache_ray.tiers.local_index import LocalIndex
from lmcache_ray.tiers.local_ranks import LocalTierRanks
from lmcache_ray.tiers.rank_tiers import RankTiers
from lmcache_ray.tiers.spec import TierSpec
from lmcache_ray.tiers.tier_service import TierService

_INDEX_EPOCH: Final = 1  # an in-process index lives and dies with its arenas
_NAMESPACE: Final = "in process"


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """What the configuration says of such a world."""

    num_slots: int
    cache_policy: str
    tiers: TierSpec
    hasher: ChunkHasher
    min_retrieve_tokens: int
    instance_id: str | None
    call_timeout_s: float
    lease_timeout_s: float


class InProcessWorld:
    """Index, arenas and tiers of the `holders` among a layout's ranks.

    Raises `CapacityError`, `ConfigError` for a remote store that cannot be meant, or `DirectoryTakenError`.
    """

    def __init__(self, settings: WorldSettings, layout: WorldLayout, holders: Sequence[int]) -> None:
        self._settings = settings
        self._layout = layout
        num_slots = settings.num_slots
        check_disk_limit(settings.tiers, layout)
        geometries = {rank: ArenaGeometry(num_slots, layout.ranks[rank].slot_nbytes) for rank in holders}
        check_memory({rank: geometry.file_nbytes for rank, geometry in geometries.items()})
        self._arenas = {rank: PrivateArena(geometry) for rank, geometry in geometries.items()}
        self.shards = {rank: EngineShard(arena.slots) for rank, arena in self._arenas.items()}
        make_index = index_maker(
            tuple(holders) or (FIRST_RANK,),
            settings.cache_policy,
            call_timeout_s=settings.call_timeout_s,
            lease_timeout_s=settings.lease_timeout_s,
        )
        index = tiered_index(settings.tiers, lambda below: make_index(num_slots, _INDEX_EPOCH, below))
        self._service = IndexService(index, clock=time.monotonic, free_slots=self._free_slots)
        self._tier_ranks, self._tiers = self._make_tiers(make_index)
        try:
            self._tiers.open(settings.call_timeout_s)
        except BaseException:
            self._close_tiers()
            raise

    def _make_tiers(self, make_index: MakeIndex) -> tuple[LocalTierRanks, TierService]:
        """What moves chunks below memory; where no rank holds any there is nothing to move."""
        settings = self._settings
        spec = settings.tiers if self.shards else TierSpec()
        life = uuid.uuid4().hex
        owner = DirectoryOwner(_NAMESPACE, f"{settings.hasher.model_name} in process {os.getpid()}", life)
        remote = open_remote(spec.remote, self._layout, scope=settings.hasher.scope(), origin=life)
        ranks = LocalTierRanks(
            {
                rank: RankTiers(
                    shard,
                    self._layout,
                    rank,
                    disk=spec.disk,
                    owner=owner,
                    remote=remote,
                )
                for rank, shard in self.shards.items()
            }
        )
        tiers = tier_service(
            spec,
            self._service,
            ranks,
            self._layout,
            make_index=make_index,
            remote=remote,
            call_timeout_s=settings.call_timeout_s,
            settle=self._settle,
        )
        return ranks, tiers

    def _settle(self) -> None:
        """Free slots of which a rank did not answer in time, once it does not write them any more."""
        for rank, shard in self.shards.items():
            with self._service.at_now() as (index, _):
                unsettled = index.memory.unsettled(rank)
            settled = [ref for ref, is_idle in zip(unsettled, shard.settle(unsettled), strict=True) if is_idle]
            with self._service.at_now() as (index, _):
                index.memory.settle(rank, settled)

    def index_client(self, rank: int) -> LocalIndex:
        """The index as `rank` speaks to it."""
        return LocalIndex(
            self._service, self._tiers, rank_client(rank), timeout_s=self._settings.call_timeout_s / 2
        )

    def parts(
        self,
        metadata: LMCacheMetadata,
        channel: FirstRankChannel | None,
        connector: KVConnector | None = None,
        leave: Callable[[], None] = lambda: None,
    ) -> EngineParts:
        """What the engine of one rank of this world is made of. `leave` tells the other ranks when it is closed.

        `channel` is given where the world has receivers.
        """
        rank = metadata.worker_id

        def close() -> None:
            leave()
            self._close_tiers()
            self._service.rank_lost(rank)
            if rank in self._arenas:
                self._arenas[rank].close()

        names = LeaseNames(rank_client(rank), "world")
        return EngineParts(
            metadata=metadata,
            layout=self._layout,
            hasher=self._settings.hasher,
            index=self.index_client(rank),
            shard=self.shards.get(rank),
            retrieval=self._retrieval(rank, channel, names),
            lease_names=names,
            connector=connector,
            instance_id=self._settings.instance_id,
            problems=self._tiers.problems,
            on_close=close,
        )

    def _retrieval(self, rank: int, channel: FirstRankChannel | None, names: LeaseNames) -> Retrieval:
        delivery = Delivery(self.index_client(rank), min_tokens=self._settings.min_retrieve_tokens)
        if channel is None:
            return OwnRetrieval(delivery, ArenaSource(self.shards[rank].slots), names)
        if rank != FIRST_RANK:
            return ReceivingRetrieval(delivery, channel, rank)
        source = ArenaSource(self.shards[rank].slots)
        return SendingRetrieval(delivery, source, names, channel, world_size=self._layout.world_size)

    def _close_tiers(self) -> None:
        """With the first rank that leaves: the world is not whole any more, so nothing can be stored."""
        self._tiers.close(flush_s=self._settings.call_timeout_s)
        self._tier_ranks.close()

    def _free_slots(self, ranks: Sequence[int], refs: Sequence[ChunkRef]) -> Sequence[int]:
        for rank in ranks:
            self.shards[rank].free(refs)
        return ranks
