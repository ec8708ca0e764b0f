"""When a store that fails is left alone, and when it is tried again: the state machine of it. Pure, told the time.

::

            `threshold` failures in a row              begin_trial(), when the pause is over
    CLOSED ───────────────────────────────► OPEN ───────────────────────────────► HALF_OPEN
      ▲                                      ▲                                        │
      │                                      └── failed: the next pause is longer ────┤
      └────────────────────────── succeeded ──────────────────────────────────────────┘

Only a trial ends an outage. Ordinary calls are refused until then, so that no caller waits for a store which is known
to be silent; and what is still heard of calls from before the outage changes nothing any more.
"""

from enum import Enum


class BreakerState(Enum):
    """Whether the store is asked."""

    CLOSED = "closed"
    """It is."""
    OPEN = "open"
    """It is not, until the pause is over."""
    HALF_OPEN = "half-open"
    """One trial is under way, whose end decides."""


class CircuitBreaker:
    """One store's state. Times are seconds of any clock that does not go back. Not thread-safe."""

    def __init__(self, *, threshold: int = 3, first_pause_s: float = 1.0, longest_pause_s: float = 30.0) -> None:
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._state = BreakerState.CLOSED
        self._num_failures = 0  # in a row
        self._num_trips = 0
        self._pause_s = first_pause_s
        self._next_trial_s = 0.0
        self._since_s = 0.0
        self._reason = ""

    @property
    def state(self) -> BreakerState:
        """Whether the store is asked."""
        return self._state

    @property
    def num_trips(self) -> int:
        """How often the breaker left CLOSED."""
        return self._num_trips

    @property
    def reason(self) -> str:
        """The last failure that was told; empty before the first."""
        return self._reason

    def outage_s(self, now: float) -> float:
        """Seconds since the failure that ended CLOSED; 0 in CLOSED."""
        return 0.0 if self._state is BreakerState.CLOSED else now - self._since_s

    def record_success(self) -> None:
        """An ordinary call was answered."""
        if self._state is BreakerState.CLOSED:
            self._num_failures = 0

    def record_failure(self, now: float, reason: str) -> None:
        """An ordinary call was not answered."""
        if self._state is not BreakerState.CLOSED:
            return
        self._reason = reason
        self._num_failures += 1
        if self._num_failures >= self._threshold:
            self._num_trips += 1
            self._since_s = now
            self._pause_s = self._first_pause_s
            self._open(now)

    def begin_trial(self, now: float) -> bool:
        """Whether the caller is to try the store now. If so, it must tell the end by one of the two calls below."""
        if self._state is not BreakerState.OPEN or now < self._next_trial_s:
            return False
        self._state = BreakerState.HALF_OPEN
        return True

    def trial_succeeded(self) -> None:
        """The trial was answered: the outage is over."""
        if self._state is BreakerState.HALF_OPEN:
            self._state = BreakerState.CLOSED
            self._num_failures = 0

    def trial_failed(self, now: float, reason: str) -> None:
        """The trial was not answered: the outage goes on, and the next pause is twice as long."""
        if self._state is BreakerState.HALF_OPEN:
            self._reason = reason
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
            self._open(now)

    def _open(self, now: float) -> None:
        self._state = BreakerState.OPEN
        self._next_trial_s = now + self._pause_s
