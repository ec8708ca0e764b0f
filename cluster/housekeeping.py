"""What a coordinator does without being asked: notice ends, bring ranks back, end what is overdue, settle slots.

Two threads, and one more for each rank that is being brought back. The watch sleeps until a rank's process ends, so
that waiting receivers learn of it at once; the other one makes rounds, and its calls to ranks have short deadlines and
go out together, so one silent rank delays nothing else.
"""

import threading
from collections.abc import Callable
from typing import Final

from lmcache_ray.errors import LMCacheRayError

from .core import CoordinatorCore
from .rank_calls import RankCalls

_ROUND_S: Final = 0.5
_ROUNDS_BETWEEN_CHECKS: Final = 6
_ENLIST_S: Final = 15.0  # an answer may get lost; asking again is harmless
_LONGEST_PAUSE_S: Final = 2.0


class Housekeeping:
    """The threads, from `start` to `stop`. What goes wrong in one is kept in `faults`; it goes on."""

    def __init__(self, core: CoordinatorCore, calls: RankCalls) -> None:
        self._core = core
        self._calls = calls
        self._stopping = threading.Event()
        self._num_rounds = 0
        self._lock = threading.Lock()  # guards `_returning`
        self._returning: set[int] = set()
        self.faults: dict[str, str] = {}

    def start(self) -> None:
        """Begin. Every rank that is not there is asked to come."""
        for name, turn in (("watch", self._watch), ("rounds", self._make_round)):
            threading.Thread(target=self._repeat, args=(name, turn), name=f"housekeeping-{name}", daemon=True).start()

    def stop(self) -> None:
        """End the threads."""
        self._stopping.set()

    def _repeat(self, name: str, turn: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                turn()
                self.faults.pop(name, None)
            except Exception as error:  # the outermost frame of a thread that must not end: recorded, shown in status
                self.faults[name] = f"housekeeping ({name}) failed: {type(error).__name__}: {error}"
                self._stopping.wait(_ROUND_S)

    def _watch(self) -> None:
        ended = self._calls.ended_ranks(timeout_s=_ROUND_S)
        if not ended:
            self._stopping.wait(0 if self._calls.is_watching else _ROUND_S)
        for rank, reason in ended:
            self._core.lost(rank, reason)
        if ended:
            self._bring_back()

    def _make_round(self) -> None:
        self._stopping.wait(_ROUND_S)
        self._bring_back()
        self._num_rounds += 1
        if self._num_rounds % _ROUNDS_BETWEEN_CHECKS == 0:
            self._core.drop_dead_clients()
            self._core.ping_ranks()
            self._core.finish_clears()
            self._core.follow_views()
        self._core.exchange.expire()
        self._core.settle()
        self._core.plans.prune()

    def _bring_back(self) -> None:
        """Ask each rank that is not there to come; one that was stopped on purpose stays away."""
        for rank in self._core.membership.absent():
            with self._lock:
                if rank in self._returning or not self._calls.can_return(rank):
                    continue
                self._returning.add(rank)
            threading.Thread(target=self._enlist, args=(rank,), name=f"enlist-{rank}", daemon=True).start()

    def _enlist(self, rank: int) -> None:
        """Thread: until the rank is there."""
        pause_s = _LONGEST_PAUSE_S / 16
        try:
            while not self._stopping.is_set() and self._calls.can_return(rank):
                try:
                    self._core.enlist(rank, timeout_s=_ENLIST_S)
                    return
                except LMCacheRayError:  # membership says why
                    self._stopping.wait(pause_s)
                    pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        except Exception as error:  # the outermost frame of the thread
            self.faults[f"rank {rank}"] = f"bringing rank {rank} back failed: {type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._returning.discard(rank)
