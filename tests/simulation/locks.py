"""Locks, conditions and events with the methods of those in `threading`, whose waits are waits of the scheduler.

A task may lose its turn wherever it takes a lock: between two of them anything may happen, as among threads.
"""

from collections import deque
from collections.abc import Callable

from tests.simulation.scheduler import Scheduler, Task


class RLock:
    """A lock that its task may take again."""

    is_reentrant = True

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, or wait for it."""
        self._scheduler.preempt()
        me = self._scheduler.current()
        if self._owner is me and self.is_reentrant:
            self._depth += 1
            return True
        until = None if timeout < 0 else self._scheduler.now + timeout
        while self._owner is not None:
            if not blocking or (until is not None and self._scheduler.now >= until):
                return False
            self._waiting.append(me)
            self._scheduler.wait(None if until is None else until - self._scheduler.now)
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        """Let it go."""
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._waiting:
                self._scheduler.wake(self._waiting.popleft())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *args: object) -> None:
        self.release()


class Lock(RLock):
    """A lock that nobody may take twice."""

    is_reentrant = False

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._owner is not None


class Condition:
    """Waiting for something to be so, beside a lock."""

    def __init__(self, scheduler: Scheduler, lock: RLock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = RLock(scheduler) if lock is None else lock
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *args: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification, without the lock meanwhile."""
        me = self._scheduler.current()
        self._waiting.append(me)
        self._lock.release()
        was_told = self._scheduler.wait(timeout)
        if me in self._waiting:
            self._waiting.remove(me)
        self._lock.acquire()
        return was_told

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until it is so."""
        until = None if timeout is None else self._scheduler.now + timeout
        while not (is_so := predicate()):
            left = None if until is None else until - self._scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return is_so

    def notify(self, n: int = 1) -> None:
        """Wake some that wait."""
        for task in self._waiting[:n]:
            self._waiting.remove(task)
            self._scheduler.wake(task)

    def notify_all(self) -> None:
        """Wake all that wait."""
        self.notify(len(self._waiting))


class Event:
    """A flag that can be waited for."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._is_set = False
        self._changed = Condition(scheduler)

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def set(self) -> None:
        """Let all go on that wait for it."""
        self._is_set = True
        self._changed.notify_all()

    def clear(self) -> None:
        """Let them wait again."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set."""
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)
