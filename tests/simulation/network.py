"""Calls between simulated processes: what may become of a message, and what its sender hears of it.

As with Ray's actors, a call reaches the process that serves its name at that moment, is begun there at most once more
than it was sent, and ends for its caller by an answer, by the proof that the process is dead, or by a deadline.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

from lmcache_ray.errors import DeadlineError, LMCacheRayError
from tests.simulation.faults import Fault, Faults
from tests.simulation.scheduler import Process, Scheduler, Task

_FAST_S: Final = 0.002
_LATE_S: Final = 4.0
_ONCE: Final = frozenset(("store", "take_in"))
"""Calls whose refusal is an answer: Ray begins each at most once."""
_NOTICE_S: Final = 0.3
"""Until others know that a process has ended."""


class ProcessEnded(LMCacheRayError):
    """The process that had the call is dead, or there was none: it does nothing about it any more."""


class Handle:
    """An actor by name: `serving` is the object in its present process, if there is one."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.process: Process | None = None
        self.serving: object = None


class Pending:
    """A call that was sent."""

    def __init__(self, scheduler: Scheduler, what: str) -> None:
        self._scheduler = scheduler
        self._what = what
        self._waiting: Task | None = None
        self._is_answered = False
        self._answer: object = None
        self._error: LMCacheRayError | None = None

    def answer(self, value: object, error: LMCacheRayError | None) -> None:
        """The first answer counts."""
        if not self._is_answered:
            self._is_answered, self._answer, self._error = True, value, error
            if self._waiting is not None:
                self._scheduler.wake(self._waiting)

    def wait(self, timeout_s: float) -> Any:
        """The answer. Raises what the call raised, `ProcessEnded` or `DeadlineError`."""
        self._waiting = self._scheduler.current()
        until = self._scheduler.now + timeout_s
        while not self._is_answered:
            left = until - self._scheduler.now
            if left <= 0:
                raise DeadlineError(f"{self._what} did not answer within {timeout_s:.3g} s")
            self._scheduler.wait(left)
        if self._error is not None:
            raise self._error
        return self._answer


class Network:
    """Sends calls. How long a message takes, and whether it comes, is drawn from `rng`."""

    def __init__(self, scheduler: Scheduler, faults: Faults, rng: Random) -> None:
        self._scheduler = scheduler
        self._faults = faults
        self._rng = rng

    def call(self, handle: Handle, method: str, *arguments: object, timeout_s: float) -> Any:
        """One call, and its answer."""
        return self.send(handle, method, *arguments).wait(timeout_s)

    def call_each(
        self, calls: Mapping[int, tuple[Handle, str, tuple[object, ...]]], *, timeout_s: float
    ) -> dict[int, Any]:
        """Calls at the same time; what came of each, an answer or a `LMCacheRayError`."""
        until = self._scheduler.now + timeout_s
        sent = {number: self.send(handle, method, *arguments) for number, (handle, method, arguments) in calls.items()}
        outcomes: dict[int, Any] = {}
        for number, pending in sent.items():
            try:
                outcomes[number] = pending.wait(max(0.0, until - self._scheduler.now))
            except LMCacheRayError as error:
                outcomes[number] = error
        return outcomes

    def send(self, handle: Handle, method: str, *arguments: object, reliably: bool = False) -> Pending:
        """Begin a call. With `reliably` its message comes once, if late, and so does the answer."""
        pending = Pending(self._scheduler, f"{handle.name}.{method}")
        served_by: list[Process] = []

        def arrive() -> None:
            process = served_by[0] if served_by else handle.process
            if process is None or not process.is_alive:
                self._later(lambda: pending.answer(None, _ended(handle)))
                return
            if not served_by:
                served_by.append(process)
                process.obituaries.append(lambda: self._later(lambda: pending.answer(None, _ended(handle))))
            self._scheduler.spawn(process, method, lambda: self._serve(handle, method, arguments, pending, reliably))

        if reliably or not self._faults.strikes(Fault.MESSAGE_LOST):
            self._scheduler.after(self._delay_s(), arrive)
        if not reliably and method not in _ONCE and self._faults.strikes(Fault.MESSAGE_TWICE):
            self._scheduler.after(self._delay_s(), arrive)
        return pending

    def _serve(
        self, handle: Handle, method: str, arguments: tuple[object, ...], pending: Pending, reliably: bool
    ) -> None:
        value: object = None
        while handle.serving is None:  # its process has just begun
            self._scheduler.sleep(_FAST_S)
        serving = handle.serving
        failure: LMCacheRayError | None = None
        try:
            run: Callable[..., object] = getattr(serving, method)
            value = run(*arguments)
        except LMCacheRayError as error:
            failure = error
        if reliably or not self._faults.strikes(Fault.ANSWER_LOST):
            self._scheduler.after(self._delay_s(), lambda: pending.answer(value, failure))

    def _later(self, event: Callable[[], None]) -> None:
        self._scheduler.after(self._rng.random() * _NOTICE_S, event)

    def _delay_s(self) -> float:
        if self._faults.strikes(Fault.MESSAGE_LATE):
            return self._rng.random() * _LATE_S
        return self._rng.random() * _FAST_S


def _ended(handle: Handle) -> ProcessEnded:
    return ProcessEnded(f"{handle.name} is not running any more")
