"""The rank actors as `TierRanks`: one packed call to each, all at the same time."""

from collections.abc import Mapping, Sequence

from lmcache_ray.tiers.calls import RankAnswer, TierCall

from .packed_calls import pack, unpack
from .rank_calls import RankCalls


class ActorTierRanks:
    """A `TierRanks` over the ranks that `calls` has adopted."""

    def __init__(self, calls: RankCalls, holders: Sequence[int]) -> None:
        self._calls = calls
        self._holders = tuple(holders)

    @property
    def holders(self) -> Sequence[int]:
        """See `TierRanks`."""
        return self._holders

    def ask(self, calls: Mapping[int, TierCall], *, timeout_s: float) -> dict[int, RankAnswer]:
        """See `TierRanks`."""
        answers = self._calls.move_chunks({rank: pack(call) for rank, call in calls.items()}, timeout_s=timeout_s)
        return {rank: unpack(answer) for rank, answer in answers.items()}
