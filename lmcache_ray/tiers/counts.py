"""What a clear did in all tiers of a world, as the world's index counts it. Pure."""

from dataclasses import dataclass

from lmcache_ray.tiers.spec import Tier


@dataclass(frozen=True, slots=True)
class TierClearCounts:
    """Chunks that one clear removed, and kept because they are leased, in each tier that the world has.

    A chunk may lie in several tiers, so the totals are no sums: `num_kept` are the chunks that were kept in any tier,
    `num_removed` those that were removed from one at least and kept in none. `pending_ranks` did not answer: nobody
    finds these chunks any more, but the ranks' room for them is not in use again before they have.
    """

    removed: dict[Tier, int]
    kept: dict[Tier, int]
    num_removed: int
    num_kept: int
    pending_ranks: tuple[int, ...] = ()
