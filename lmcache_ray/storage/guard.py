"""One guard per store: every call ends in time, and a store that does not answer is left alone for a while.

Libraries of stores keep deadlines badly or not at all. So each call runs in a thread that can be abandoned
(`call_threads.py`), and its outcome is told to a circuit breaker (`breaker.py`), from the thread itself, also when
nobody waits for it any more. What the outcome says about the *store* is judged once per call:

- an answer, also one that refuses (no permission, no room): the store is there;
- `StorageUnavailableError`, an exception of a kind that no backend may raise, or no answer within the guard's full
  time: it failed;
- a caller that had less time and left: nothing yet. The call goes on and is judged when it ends.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from lmcache_ray.errors import DeadlineError, LMCacheRayError, StorageUnavailableError
from lmcache_ray.storage.breaker import BreakerState, CircuitBreaker
from lmcache_ray.storage.call_threads import CallThreads

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GuardCounts:
    """What became of the calls so far."""

    made: int = 0
    """Calls that were begun, trials not counted."""
    refused: int = 0
    """Calls that were not: the store was known to be out of order, or the caller's time was over."""
    late: int = 0
    """Calls that their caller gave up."""
    failed: int = 0
    """Calls that told the breaker of a failure."""
    outages: int = 0
    """How often the breaker opened."""
    stuck: int = 0
    """Calls that somebody gave up and that have not returned, now."""


class _Verdict:
    """Whether a call's outcome has been told: by its thread or by its caller, whoever knows first."""

    __slots__ = ("is_given",)

    def __init__(self) -> None:
        self.is_given = False


class Guard:
    """Runs calls to one store, called `place` in messages. Thread-safe. `clock` is monotonic, in seconds."""

    def __init__(
        self, place: str, *, timeout_s: float, clock: Callable[[], float], breaker: CircuitBreaker, max_threads: int
    ) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._clock = clock
        self._threads = CallThreads(max_threads=max_threads, name=place)
        self._max_threads = max_threads
        self._lock = threading.Lock()  # guards all that follows
        self._breaker = breaker
        self._made = self._refused = self._late = self._failed = 0

    @property
    def counts(self) -> GuardCounts:
        """What became of the calls so far."""
        stuck = self._threads.num_stuck
        with self._lock:
            trips = self._breaker.num_trips
            return GuardCounts(self._made, self._refused, self._late, self._failed, trips, stuck)

    @property
    def problem(self) -> str | None:
        """Why the store is not asked, and since when; None while it is."""
        with self._lock:
            if self._breaker.state is not BreakerState.CLOSED:
                outage_s = self._breaker.outage_s(self._clock())
                return f"{self._place} has been out of order for {outage_s:.0f} s: {self._breaker.reason}"
        if self._threads.are_all_stuck:
            return f"{self._place}: {self._max_threads} calls have not returned, and no more are made"
        return None

    def call(self, function: Callable[[], T], *, timeout_s: float | None = None, until: float | None = None) -> T:
        """What `function()` returns or raises, within `timeout_s` (None: the guard's) and not after `until`.

        Raises `StorageUnavailableError` if the store fails or is not asked, `LMCacheRayError` as `function` does.
        """
        full_s = self._timeout_s if timeout_s is None else timeout_s
        rest_s = full_s if until is None else min(full_s, until - self._clock())
        self._begin(rest_s)
        verdict = _Verdict()
        try:
            return self._threads.run(lambda: self._judged(function, verdict), rest_s)
        except DeadlineError as error:
            self._record_late(verdict, str(error), is_failure=rest_s >= full_s)
            raise StorageUnavailableError(str(error)) from error

    def probe(self, function: Callable[[], object]) -> bool:
        """Whether the store is asked from now on; if it was not, and it is time to try again, `function()` decides."""
        with self._lock:
            if self._breaker.state is BreakerState.CLOSED:
                return not self._threads.are_all_stuck
            if not self._breaker.begin_trial(self._clock()):
                return False
        reason = self._try(function)
        with self._lock:
            if reason is None:
                self._breaker.trial_succeeded()
            else:
                self._breaker.trial_failed(self._clock(), reason)
        return reason is None

    def close(self) -> None:
        """End the threads that are not stuck. Later calls raise `ClosedError`."""
        self._threads.close()

    def _begin(self, rest_s: float) -> None:
        problem = self.problem
        if problem is None and rest_s <= 0:
            problem = f"{self._place} is not asked: there is no time left for it"
        with self._lock:
            if problem is None:
                self._made += 1
                return
            self._refused += 1
        raise StorageUnavailableError(problem)

    def _judged(self, function: Callable[[], T], verdict: _Verdict) -> T:
        try:
            result = self._translated(function)
        except StorageUnavailableError as error:
            self._judge(verdict, str(error))
            raise
        except LMCacheRayError:
            self._judge(verdict, None)
            raise
        self._judge(verdict, None)
        return result

    def _translated(self, function: Callable[[], T]) -> T:
        """The thread's outermost frame: a backend of somebody else's may raise anything."""
        try:
            return function()
        except LMCacheRayError:
            raise
        except Exception as error:
            raise StorageUnavailableError(f"{self._place} raised {type(error).__name__}: {error}") from error

    def _record_late(self, verdict: _Verdict, reason: str, *, is_failure: bool) -> None:
        with self._lock:
            self._late += 1
        if is_failure:
            self._judge(verdict, reason)

    def _judge(self, verdict: _Verdict, reason: str | None) -> None:
        with self._lock:
            if verdict.is_given:
                return
            verdict.is_given = True
            if reason is None:
                self._breaker.record_success()
            else:
                self._failed += 1
                self._breaker.record_failure(self._clock(), reason)

    def _try(self, function: Callable[[], object]) -> str | None:
        """Why the trial failed; None if the store answered."""
        if self._threads.are_all_stuck:
            return f"{self._max_threads} calls have not returned, so it cannot be tried"
        try:
            self._threads.run(lambda: self._translated(function), self._timeout_s)
        except (DeadlineError, StorageUnavailableError) as error:
            return str(error)
        except LMCacheRayError:
            return None  # it refused, so it answers
        return None
