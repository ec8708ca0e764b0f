"""What production code finds under `threading`, `time` and `concurrent.futures` while a simulation runs.

Locks, conditions, threads and futures with the same methods, whose waits are waits of the scheduler. They stand in for
the operating system, not for any part of this project: `installed` puts them into every module of ours that asks for
the real ones, and takes them out again.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any, Final

from tests.simulation.locks import Condition, Event, Lock, RLock
from tests.simulation.scheduler import Scheduler

_PACKAGES: Final = ("lmcache_ray.", "cluster.")
_WALL_S: Final = 1_700_000_000.0
_WITH_AN_END: Final = ("enlist",)
"""How the names of threads begin that end by themselves."""


class Thread:
    """A task of the process that makes it. It counts as idle: most threads wait for work until their process ends."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., object],
        name: str = "thread",
        args: Iterable[object] = (),
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self._scheduler = scheduler
        self._target = target
        self._args = tuple(args)
        self._ended = Event(scheduler)

    def start(self) -> None:
        """Begin."""
        is_idle = not self.name.startswith(_WITH_AN_END)
        self._scheduler.spawn(self._scheduler.current().process, self.name, self._run, is_idle=is_idle)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not self._ended.is_set()

    def _run(self) -> None:
        self._target(*self._args)
        self._ended.set()


class Future:
    """A result to come, with as much of `concurrent.futures.Future` as is in use here."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._changed = Condition(scheduler)
        self._state = "pending"
        self._result: object = None
        self._error: BaseException | None = None

    def cancel(self) -> bool:
        """Whether it has not begun, and never will."""
        if self._state == "pending":
            self._end("cancelled")
        return self._state == "cancelled"

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._state == "cancelled"

    def done(self) -> bool:
        """Whether it will not change any more."""
        return self._state in ("cancelled", "done")

    def set_running_or_notify_cancel(self) -> bool:
        """Whether to begin."""
        if self._state == "pending":
            self._state = "running"
        return self._state == "running"

    def set_result(self, result: object) -> None:
        """It went well."""
        self._result = result
        self._end("done")

    def set_exception(self, error: BaseException) -> None:
        """It did not."""
        self._error = error
        self._end("done")

    def result(self, timeout: float | None = None) -> Any:
        """What came of it."""
        if not self.wait(timeout):
            raise futures.TimeoutError
        if self._state == "cancelled":
            raise futures.CancelledError
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done."""
        with self._changed:
            return self._changed.wait_for(self.done, timeout)

    def _end(self, state: str) -> None:
        self._state = state
        self._changed.notify_all()


class ThreadPool:
    """An executor whose jobs are tasks of the process that submits them."""

    def __init__(self, scheduler: Scheduler, max_workers: int) -> None:
        self._scheduler = scheduler
        self._num_free = max_workers
        self._jobs: deque[Callable[[], object]] = deque()

    def submit(self, run: Callable[..., object], *arguments: object) -> None:
        """Do it when there is room."""
        self._jobs.append(lambda: run(*arguments))
        if self._num_free:
            self._num_free -= 1
            self._scheduler.spawn(self._scheduler.current().process, "pool", self._work)

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Begin no more."""
        self._jobs.clear()

    def _work(self) -> None:
        while self._jobs:
            self._jobs.popleft()()
        self._num_free += 1


class _Threading:
    """The module `threading`, as far as it is in use here."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.Lock = lambda: Lock(scheduler)
        self.RLock = lambda: RLock(scheduler)
        self.Condition = lambda lock=None: Condition(scheduler, lock)
        self.Event = lambda: Event(scheduler)
        self.Thread = lambda **arguments: Thread(scheduler, **arguments)


class _Time:
    """The module `time`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.monotonic = scheduler.clock
        self.perf_counter = scheduler.clock
        self.sleep = scheduler.sleep
        self.time = lambda: _WALL_S + scheduler.now
        self.time_ns = lambda: int((_WALL_S + scheduler.now) * 1e9)


def _wait_for_all(
    scheduler: Scheduler, awaited: Iterable[Future], timeout: float | None = None
) -> tuple[set[Future], set[Future]]:
    """`concurrent.futures.wait`."""
    every = set(awaited)
    until = None if timeout is None else scheduler.now + timeout
    for future in list(every):
        future.wait(None if until is None else max(0.0, until - scheduler.now))
    done = {future for future in every if future.done()}
    return done, every - done


@contextmanager
def installed(scheduler: Scheduler) -> Iterator[None]:
    """Within the block our modules wait on the scheduler, on which nothing else may wait."""
    stand_ins: dict[object, object] = {
        threading: _Threading(scheduler),
        time: _Time(scheduler),
        futures.Future: lambda: Future(scheduler),
        futures.ThreadPoolExecutor: lambda max_workers, thread_name_prefix="": ThreadPool(scheduler, max_workers),
        futures.wait: lambda awaited, timeout=None: _wait_for_all(scheduler, awaited, timeout),
    }
    places = _places()
    for module, name, real in places:
        setattr(module, name, stand_ins[real])
    try:
        yield
    finally:
        for module, name, real in places:
            setattr(module, name, real)


def _places() -> list[tuple[Any, str, object]]:
    """Where our modules have the real ones, by what name."""
    real = {
        "threading": threading,
        "time": time,
        "Future": futures.Future,
        "ThreadPoolExecutor": futures.ThreadPoolExecutor,
        "wait": futures.wait,
    }
    ours = [module for name, module in sys.modules.items() if name.startswith(_PACKAGES)]
    return [(module, name, thing) for module in ours for name, thing in real.items() if vars(module).get(name) is thing]
