"""What a clear did, and the names of the tiers it (and lookup) can be limited to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.layout import WorldLayout
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import Tier

_NAMES: Final = {
    "cpu": Tier.CPU,
    "LocalCPUBackend": Tier.CPU,
    "disk": Tier.DISK,
    "LocalDiskBackend": Tier.DISK,
    "remote": Tier.REMOTE,
    "RemoteBackend": Tier.REMOTE,
}
"""The tiers by our names and by LMCache's."""


def tiers_of(tiers: Sequence[str] | None, *, argument: str) -> frozenset[Tier]:
    """The tiers that the caller's `argument` names, ours or LMCache's names; None is all of them, ``[]`` is none.

    Whether the world has them is not asked. Raises `InvalidRequestError` for what is no list, and for an unknown tier.
    """
    if tiers is None:
        return frozenset(Tier)
    if not isinstance(tiers, list | tuple | set | frozenset):
        raise InvalidRequestError(f"{argument} must be a list of tier names; got {tiers!r}")
    for tier in tiers:
        if not isinstance(tier, str) or tier not in _NAMES:
            raise InvalidRequestError(f"{argument} names tier {tier!r}; known tiers: {', '.join(_NAMES)}")
    return frozenset(_NAMES[tier] for tier in tiers)


@dataclass(frozen=True, slots=True)
class ClearResult:
    """Chunks removed, and kept because leased: for each tier of the world, one count per rank (0 where none is held).

    `num_kept` are the chunks of the world that were kept in any tier, `num_removed` those that were removed and kept
    in none; each counts once, on however many ranks and in however many tiers it lay. `pending` names ranks that could
    not be reached: the chunks are gone for every reader, but those ranks' room is not in use again before they have
    answered.
    """

    removed: dict[str, list[int]]
    kept: dict[str, list[int]]
    pending: tuple[int, ...]
    num_removed: int
    num_kept: int

    @staticmethod
    def of(counts: TierClearCounts, layout: WorldLayout) -> "ClearResult":
        """The result in a world of this layout, in all of whose tiers the same ranks hold chunks."""

        def per_rank(chunks: dict[Tier, int]) -> dict[str, list[int]]:
            return {
                tier.value: [chunks[tier] if rank in layout.holders else 0 for rank in range(layout.world_size)]
                for tier in Tier
                if tier in chunks
            }

        removed, kept = per_rank(counts.removed), per_rank(counts.kept)
        return ClearResult(removed, kept, counts.pending_ranks, counts.num_removed, counts.num_kept)
