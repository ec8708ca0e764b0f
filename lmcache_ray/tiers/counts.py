"""What a clear did in all tiers of a world, as its index counts it, and what it could not do yet. Pure."""

from collections.abc import Iterable
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


class UnseenClears:
    """What was cleared in a tier before it was known what is there."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._is_all = False

    def add(self, keys: Iterable[bytes] | None) -> None:
        """These, or all with None."""
        self._is_all = self._is_all or keys is None
        self._keys.update(keys or ())

    def cover(self, key: bytes) -> bool:
        """Whether the key was among them."""
        return self._is_all or key in self._keys
