"""Calls that may never return, made in threads of their own, so that their caller always does.

Python cannot end a thread that hangs in a dead filesystem. Such a thread is abandoned by its caller and counted as
stuck until its call returns after all. The threads are daemons: a stuck one does not keep the process from ending,
which an executor's would.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from lmcache_ray.errors import ClosedError, DeadlineError

T = TypeVar("T")


class CallThreads:
    """At most `max_threads` calls at a time; further ones wait for their turn, within their own time. Thread-safe."""

    def __init__(self, *, max_threads: int, name: str) -> None:
        self._max_threads = max_threads
        self._name = name
        self._has_work = threading.Condition()  # guards all that follows
        self._waiting: deque[tuple[Future[Any], Callable[[], object]]] = deque()
        self._stuck: set[Future[Any]] = set()
        self._num_threads = 0
        self._num_idle = 0
        self._is_closed = False

    @property
    def num_stuck(self) -> int:
        """Threads whose caller has given them up."""
        with self._has_work:
            return len(self._stuck)

    @property
    def are_all_stuck(self) -> bool:
        """Whether a call made now could not even begin."""
        return self.num_stuck >= self._max_threads

    def run(self, function: Callable[[], T], timeout_s: float) -> T:
        """What `function()` returns or raises, if it ends in time.

        Raises `DeadlineError` else; then `function` was not begun and will not be, or it is stuck for the time being.
        Raises `ClosedError` after `close`.
        """
        future = self.begin(function)
        wait([future], timeout_s)
        if not future.done() and future.cancel():
            raise DeadlineError(f"no thread was free for {self._name} within {timeout_s:.3g} s")
        with self._has_work:
            if not future.done():
                self._stuck.add(future)
                raise DeadlineError(f"{self._name} did not answer within {timeout_s:.3g} s")
        if future.cancelled():
            raise self._closed()
        return future.result()

    def begin(self, function: Callable[[], T]) -> "Future[T]":
        """The call, under way as soon as a thread is free; until then it can be cancelled, and `close` cancels it.

        Whoever begins a call so waits for it himself, and it never counts as stuck. Raises `ClosedError` after `close`.
        """
        future: Future[T] = Future()
        self._submit(future, function)
        return future

    def close(self) -> None:
        """End idle threads now and busy ones after their call. Calls that wait for their turn raise `ClosedError`."""
        with self._has_work:
            self._is_closed = True
            left, self._waiting = self._waiting, deque()
            self._has_work.notify_all()
        for future, _ in left:
            if future.cancel():
                future.set_running_or_notify_cancel()  # wakes who waits for it

    def _submit(self, future: "Future[T]", function: Callable[[], T]) -> None:
        with self._has_work:
            if self._is_closed:
                raise self._closed()
            while self._waiting and self._waiting[0][0].cancelled():
                self._waiting.popleft()  # while all threads are stuck nobody else takes them away
            self._waiting.append((future, function))
            if self._num_idle >= len(self._waiting):
                self._has_work.notify()
            elif self._num_threads < self._max_threads:
                self._num_threads += 1
                threading.Thread(target=self._work, name=f"{self._name} call", daemon=True).start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            future, function = job
            if future.set_running_or_notify_cancel():
                _carry_out(function, future)
                with self._has_work:
                    self._stuck.discard(future)
            del job, future, function  # an idle thread keeps nothing alive

    def _next(self) -> tuple["Future[Any]", Callable[[], object]] | None:
        with self._has_work:
            while not self._waiting and not self._is_closed:
                self._num_idle += 1
                self._has_work.wait()
                self._num_idle -= 1
            if self._waiting:
                return self._waiting.popleft()
            self._num_threads -= 1
            return None

    def _closed(self) -> ClosedError:
        return ClosedError(f"{self._name} is closed")


def _carry_out(function: Callable[[], object], future: "Future[Any]") -> None:
    try:
        result = function()
    except BaseException as error:  # the outermost frame of the thread: whatever it is, it is the caller's
        future.set_exception(error)
    else:
        future.set_result(result)
