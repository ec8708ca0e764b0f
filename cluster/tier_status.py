"""How the tiers of a world stand, for its status. Pure."""

from dataclasses import asdict

from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tier_service import TierService
from lmcache_ray.tiers.tiered_index import TieredIndex

from .world import TierStatus


def tier_statuses(index: TieredIndex, tiers: TierService) -> dict[str, TierStatus]:
    """Each tier that the world has, by name."""
    statuses = {Tier.CPU.value: _status(index.memory)}
    for tier, moved in ((Tier.DISK, tiers.disk), (Tier.REMOTE, tiers.remote)):
        if moved is not None:
            held = index.disk if tier is Tier.DISK else None
            statuses[tier.value] = _status(held, waiting=len(index.backlogs[tier]), traffic=asdict(moved.traffic))
    return statuses


def _status(index: CacheIndex | None, *, waiting: int = 0, traffic: dict[str, int] | None = None) -> TierStatus:
    if index is None:
        return TierStatus(0, 0, 0, 0, 0, waiting, traffic or {})
    counts = index.counts()
    return TierStatus(
        counts.ready, counts.writing, counts.quarantined, counts.free, counts.capacity, waiting, traffic or {}
    )
