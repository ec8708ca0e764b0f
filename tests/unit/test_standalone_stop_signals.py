"""Stop signals: who reacts, what is interrupted, and that a second signal breaks nothing."""

import os
import signal
import threading

import pytest

from lmcache_ray.standalone.stop_signals import STOP_SIGNALS, StopRequest, on_stop_signal


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_reactions_nest_and_end(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    heard: list[str] = []
    with on_stop_signal(lambda: heard.append("outer")):
        with on_stop_signal(lambda: heard.append("inner")):
            send(number)
        send(number)
    assert heard == ["inner", "outer"]
    assert signal.getsignal(number) == before


def test_another_thread_changes_nothing() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    during: list[object] = []

    def enter() -> None:
        with on_stop_signal(lambda: None):
            during.extend(signal.getsignal(number) for number in STOP_SIGNALS)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert during == before


def test_the_first_signal_interrupts_and_the_second_lets_it_clean_up() -> None:
    request = StopRequest()
    done: list[str] = []

    def step() -> None:
        try:
            send(signal.SIGINT)
            done.append("not interrupted")
        finally:
            send(signal.SIGTERM)
            done.append("cleaned up")

    with on_stop_signal(request):
        request.run_until_received(step)
    assert done == ["cleaned up"]
    assert request.is_received


def test_a_signal_that_came_before_skips_the_step() -> None:
    request = StopRequest()
    with on_stop_signal(request):
        send(signal.SIGTERM)
        assert request.is_received
        request.run_until_received(lambda: pytest.fail("it ran"))


def test_a_signal_after_the_step_is_noted_only() -> None:
    request = StopRequest()
    with on_stop_signal(request):
        request.run_until_received(lambda: None)
        assert not request.is_received
        send(signal.SIGTERM)
    assert request.is_received


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_lost_in_a_destructor_is_still_a_request() -> None:
    class Interrupted:
        def __del__(self) -> None:
            send(signal.SIGTERM)
            signal.getsignal(signal.SIGTERM)  # the handler runs here at the latest

    request = StopRequest()
    ended: list[int] = []
    with on_stop_signal(request):
        request.run_until_received(lambda: ended.append(id(Interrupted())))
    assert len(ended) == 1, "nothing interrupted the step"
    assert request.is_received


def test_failures_of_the_step_pass() -> None:
    request = StopRequest()
    with on_stop_signal(request), pytest.raises(ZeroDivisionError):
        request.run_until_received(lambda: 1 // 0)
    assert not request.is_received
