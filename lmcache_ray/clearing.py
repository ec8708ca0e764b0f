"""What a clear did, and the names of the tiers it (and lookup) can be limited to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.index_service import ClearCounts
from lmcache_ray.layout import WorldLayout

CPU: Final = "cpu"
_TIERS: Final = {
    "cpu": "cpu",
    "LocalCPUBackend": "cpu",
    "disk": "disk",
    "LocalDiskBackend": "disk",
    "remote": "remote",
    "RemoteBackend": "remote",
}


def names_cpu_tier(tiers: Sequence[str] | None, *, argument: str) -> bool:
    """True if `tiers` (None: all of them) include memory. Raises `InvalidRequestError` for an unknown tier."""
    if tiers is None:
        return True
    if not isinstance(tiers, list | tuple | set | frozenset):
        raise InvalidRequestError(f"{argument} must be a list of tier names; got {tiers!r}")
    unknown = [tier for tier in tiers if tier not in _TIERS]
    if unknown:
        raise InvalidRequestError(f"{argument} names tier {unknown[0]!r}; known tiers: {', '.join(_TIERS)}")
    return any(_TIERS[tier] == CPU for tier in tiers)


@dataclass(frozen=True, slots=True)
class ClearResult:
    """Chunks removed, and kept because leased: per tier, one count for each rank (0 on ranks that hold none).

    `pending` names ranks that could not be reached: the chunks are gone for every reader, but those ranks' slots are
    not in use again before they have answered.
    """

    removed: dict[str, list[int]]
    kept: dict[str, list[int]]
    pending: tuple[int, ...] = ()

    @property
    def num_removed(self) -> int:
        """Chunks of the world that were removed, each counted once."""
        return sum(max(counts, default=0) for counts in self.removed.values())

    @property
    def num_kept(self) -> int:
        """Chunks of the world that were kept, each counted once."""
        return sum(max(counts, default=0) for counts in self.kept.values())

    @staticmethod
    def of_memory(counts: ClearCounts, layout: WorldLayout) -> "ClearResult":
        """The result of clearing the memory tier."""

        def per_rank(count: int) -> dict[str, list[int]]:
            return {CPU: [count if rank in layout.holders else 0 for rank in range(layout.world_size)]}

        return ClearResult(per_rank(counts.num_removed), per_rank(counts.num_kept), counts.pending_ranks)

    @staticmethod
    def nothing(layout: WorldLayout) -> "ClearResult":
        """The result of clearing tiers that hold nothing."""
        return ClearResult.of_memory(ClearCounts(0, 0), layout)
