"""The ranks of an in-process world as `TierRanks`: each answers in a thread of its own."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from lmcache_ray.tiers.calls import RankAnswer, TierCall
from lmcache_ray.tiers.rank_tiers import RankTiers


class LocalTierRanks:
    """A `TierRanks` over ranks of this process. Thread-safe.

    A call that is stuck, in a dead filesystem for example, keeps its thread; there are some for each rank. After
    `close` nobody answers.
    """

    def __init__(self, ranks: Mapping[int, RankTiers]) -> None:
        self._ranks = dict(ranks)
        self._threads = ThreadPoolExecutor(4 * max(1, len(self._ranks)), thread_name_prefix="tier-ranks")
        self._lock = threading.Lock()  # guards `_is_closed`
        self._is_closed = False

    @property
    def holders(self) -> Sequence[int]:
        """See `TierRanks`."""
        return tuple(self._ranks)

    def ask(self, calls: Mapping[int, TierCall], *, timeout_s: float) -> dict[int, RankAnswer]:
        """See `TierRanks`."""
        with self._lock:
            if self._is_closed:
                return {}
            futures = {rank: self._threads.submit(self._ranks[rank].run, call) for rank, call in calls.items()}
        done, _ = wait(futures.values(), timeout=timeout_s)
        return {rank: future.result() for rank, future in futures.items() if future in done}

    def close(self) -> None:
        """Close every rank's tiers. Idempotent."""
        with self._lock:
            self._is_closed = True
        for rank in self._ranks.values():
            rank.close()
        self._threads.shutdown(wait=False)  # calls that have not begun are answered at once: their rank is closed
