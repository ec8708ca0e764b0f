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
    """End the process with exit code 0 here and now, without any cleaning up."""
    os._exit(0)


class StopRequest:
    """A reaction for `on_stop_signal`: takes note, and interrupts what may be interrupted."""

    def __init__(self) -> None:
        self._is_received = False
        self._interrupts = False

    @property
    def is_received(self) -> bool:
        """Whether a stop signal came."""
        return self._is_received

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within, a request that comes, or came before, raises ``SystemExit(0)``; a second one does not.

        A second exception would interrupt the cleaning up on the way of the first. Ask `is_received` afterwards: an
        exception that comes up within a destructor gets lost.
        """
        self._interrupts = True
        try:
            if self._is_received:
                raise SystemExit(0)
            yield
        finally:
            self._interrupts = False

    def __call__(self) -> None:
        """React to one signal."""
        is_first, self._is_received = not self._is_received, True
        if is_first and self._interrupts:
            raise SystemExit(0)
