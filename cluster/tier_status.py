"""How the tiers of a world stand, for its status. Pure."""

from dataclasses import asdict, replace

from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tier_service import TierService
from lmcache_ray.tiers.tiered_index import TieredIndex

from .world import TierStatus, WorldSpec


def tier_statuses(world: WorldSpec, index: TieredIndex, tiers: TierService) -> dict[str, TierStatus]:
    """Each tier that the world has, by name."""
    statuses = {Tier.CPU.value: _status(index.memory)}
    if tiers.disk is not None and world.tiers.disk is not None:
        max_nbytes = world.tiers.disk.max_nbytes
        statuses[Tier.DISK.value] = replace(
            _status(index.disk),
            waiting=len(index.backlogs[Tier.DISK]),
            max_nbytes=max_nbytes,
            total_max_nbytes=max_nbytes * len(world.layout.holders),
            traffic=asdict(tiers.disk.traffic),
        )
    if tiers.remote is not None and world.tiers.remote is not None:
        statuses[Tier.REMOTE.value] = replace(
            _status(None),
            waiting=len(index.backlogs[Tier.REMOTE]),
            total_max_nbytes=world.tiers.remote.max_nbytes,
            traffic=asdict(tiers.remote.traffic),
        )
    return statuses


def _status(index: CacheIndex | None) -> TierStatus:
    if index is None:
        return TierStatus(0, 0, 0, 0, 0)
    counts = index.counts()
    return TierStatus(counts.ready, counts.writing, counts.quarantined, counts.free, counts.capacity)
