"""SIGINT and SIGTERM, the two ways of asking a process to stop. No torch here: a process listens before it loads that.

Python runs signal handlers in the main thread only, between two of its instructions; elsewhere nothing can be
installed, and these functions then do nothing.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def on_stop_signal(react: Callable[[], None]) -> Iterator[None]:
    """While entered, each stop signal calls `react` in the main thread; afterwards the handlers before are back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, lambda _number, _frame: react()) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """From now on stop signals do nothing."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def leave_process() -> NoReturn:
    """End the process with exit code 0 here and now: nothing is flushed, nothing is cleaned up."""
    os._exit(0)


class _Interrupted(BaseException):
    """Not an `Exception`, so that nothing but the outermost frame catches it."""


class StopRequest:
    """A reaction for `on_stop_signal`: takes note, and interrupts what may be interrupted."""

    def __init__(self) -> None:
        self._is_received = False
        self._interrupts = False

    @property
    def is_received(self) -> bool:
        """Whether a stop signal came."""
        return self._is_received

    def run_until_received(self, step: Callable[[], object]) -> None:
        """Run `step`, which the first signal interrupts by an exception that ends here; not at all if one came before.

        A further signal interrupts nothing, so `step` can clean up on its way out. It may run to its end although a
        signal came, for an exception within a destructor gets lost: ask `is_received`.
        """
        self._interrupts = True
        try:
            if not self._is_received:
                step()
            self._interrupts = False
        except _Interrupted:
            pass
        finally:
            self._interrupts = False

    def __call__(self) -> None:
        """React to one signal."""
        is_first, self._is_received = not self._is_received, True
        if is_first and self._interrupts:
            raise _Interrupted
