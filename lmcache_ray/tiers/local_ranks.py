"""The ranks of an in-process world as `TierRanks`: each answers in a thread of its own."""

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Final

from lmcache_ray.errors import ClosedError
from lmcache_ray.storage.call_threads import CallThreads
from lmcache_ray.tiers.calls import RankAnswer, TierCall
from lmcache_ray.tiers.rank_tiers import RankTiers

_THREADS_OF_A_RANK: Final = 4


class LocalTierRanks:
    """A `TierRanks` over ranks of this process. Thread-safe.

    A call that is stuck, in a dead filesystem for example, keeps its thread, of which there are four for each rank, but
    not the process from ending. One that has not begun in time never will. After `close` nobody answers.
    """

    def __init__(self, ranks: Mapping[int, RankTiers]) -> None:
        self._ranks = dict(ranks)
        self._threads = CallThreads(max_threads=_THREADS_OF_A_RANK * max(1, len(self._ranks)), name="tier ranks")

    @property
    def holders(self) -> Sequence[int]:
        """See `TierRanks`."""
        return tuple(self._ranks)

    def ask(self, calls: Mapping[int, TierCall], *, timeout_s: float) -> dict[int, RankAnswer]:
        """See `TierRanks`."""
        try:
            begun = {rank: self._threads.begin(partial(self._ranks[rank].run, call)) for rank, call in calls.items()}
        except ClosedError:
            return {}
        done, late = wait(begun.values(), timeout=timeout_s)
        for call_of_rank in late:
            call_of_rank.cancel()
        return {rank: future.result() for rank, future in begun.items() if future in done and not future.cancelled()}

    def close(self) -> None:
        """Close every rank's tiers. Idempotent."""
        self._threads.close()
        for rank in self._ranks.values():
            rank.close()
