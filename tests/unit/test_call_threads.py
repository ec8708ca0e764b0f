"""Calls in threads that can be abandoned. Events hold the calls, so nothing here depends on how fast the machine is."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmcache_ray.errors import ClosedError, DeadlineError
from lmcache_ray.storage.call_threads import CallThreads

LONG_S = 30.0
SHORT_S = 0.02


def until_none_is_stuck(threads: CallThreads) -> None:
    deadline = time.monotonic() + LONG_S
    while threads.num_stuck:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_the_call_returns_or_raises_is_the_callers() -> None:
    threads = CallThreads(max_threads=2, name="store")
    assert threads.run(lambda: 6 * 7, LONG_S) == 42
    with pytest.raises(KeyError, match="what"):
        threads.run(lambda: {}["what"], LONG_S)
    assert threads.num_stuck == 0


def test_a_call_that_does_not_return_is_left_and_counted_until_it_does() -> None:
    threads, held = CallThreads(max_threads=2, name="the store"), threading.Event()
    with pytest.raises(DeadlineError, match=r"the store did not answer within 0\.02 s"):
        threads.run(held.wait, SHORT_S)
    assert (threads.num_stuck, threads.are_all_stuck) == (1, False)
    assert threads.run(lambda: "another thread", LONG_S) == "another thread"
    held.set()
    until_none_is_stuck(threads)


def test_a_call_that_never_began_never_will() -> None:
    threads, held, began = CallThreads(max_threads=1, name="the store"), threading.Event(), threading.Event()
    with pytest.raises(DeadlineError, match="did not answer"):
        threads.run(held.wait, SHORT_S)
    assert threads.are_all_stuck
    with pytest.raises(DeadlineError, match="no thread was free"):
        threads.run(began.set, SHORT_S)
    assert threads.num_stuck == 1
    for _ in range(5):
        threads.begin(began.set).cancel()
    assert len(threads._waiting) == 1, "what nobody waits for any more is not kept"
    held.set()
    assert threads.run(lambda: "after it", LONG_S) == "after it"
    assert not began.is_set()


def test_no_more_threads_than_allowed_and_every_call_has_its_turn() -> None:
    threads, at_work, most = CallThreads(max_threads=3, name="store"), [], []

    def call() -> int:
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.001)
        at_work.pop()
        return threading.get_ident()

    with ThreadPoolExecutor(12) as callers:
        used = list(callers.map(lambda _: threads.run(call, LONG_S), range(60)))
    assert len(set(used)) <= 3
    assert max(most) <= 3


def test_an_idle_thread_is_used_again() -> None:
    threads = CallThreads(max_threads=8, name="store")
    assert len({threads.run(threading.get_ident, LONG_S) for _ in range(20)}) <= 2


def test_after_close_nothing_is_called() -> None:
    threads, held = CallThreads(max_threads=1, name="the store"), threading.Event()
    with pytest.raises(DeadlineError):
        threads.run(held.wait, SHORT_S)
    with ThreadPoolExecutor(1) as caller:
        waiting = caller.submit(threads.run, held.wait, LONG_S)
        while not threads._waiting:
            time.sleep(0.001)
        threads.close()
        with pytest.raises(ClosedError, match="the store is closed"):
            waiting.result(LONG_S)
    with pytest.raises(ClosedError, match="the store is closed"):
        threads.run(held.wait, LONG_S)
    held.set()


def test_a_stuck_thread_does_not_keep_the_process_from_ending() -> None:
    threads, held = CallThreads(max_threads=1, name="the dead one"), threading.Event()
    with pytest.raises(DeadlineError):
        threads.run(held.wait, SHORT_S)
    (stuck,) = (thread for thread in threading.enumerate() if thread.name == "the dead one call")
    assert stuck.daemon
    held.set()


def test_a_call_that_was_only_begun_ends_by_itself_or_is_cancelled_by_close() -> None:
    threads, held, begun = CallThreads(max_threads=1, name="store"), threading.Event(), threading.Event()
    first, second = threads.begin(lambda: begun.set() or held.wait()), threads.begin(lambda: "never")
    assert begun.wait(LONG_S)
    threads.close()
    assert second.cancelled() and not first.done()
    held.set()
    assert first.result(LONG_S) is True
    with pytest.raises(ClosedError, match="store is closed"):
        threads.begin(lambda: "never")
