"""The threads of a rank's tiers: every chunk once, in order, and no call behind another one."""

import threading
import time
from collections.abc import Iterator

import pytest

from lmcache_ray.errors import ClosedError, StorageError
from lmcache_ray.tiers.calls import ChunkOutcome, RankAnswer
from lmcache_ray.tiers.chunk_threads import ChunkThreads

PATIENCE_S = 20.0


@pytest.fixture
def threads() -> Iterator[ChunkThreads]:
    found = ChunkThreads("tiers of rank 3")
    yield found
    found.close()


def done(position: int) -> ChunkOutcome:
    return ChunkOutcome.DONE


@pytest.mark.parametrize("with_help", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2, 50])
def test_every_chunk_is_done_once_and_answered_in_its_place(
    threads: ChunkThreads, number: int, with_help: bool
) -> None:
    seen: list[int] = []

    def run(position: int) -> ChunkOutcome:
        seen.append(position)
        return ChunkOutcome.DONE if position % 3 else ChunkOutcome.DAMAGED

    answer = threads.each(number, run, with_help=with_help)
    assert sorted(seen) == list(range(number))
    assert answer == RankAnswer(bytes(1 if position % 3 else 3 for position in range(number)))


def test_the_caller_and_one_helper_do_them_together_or_the_caller_alone(threads: ChunkThreads) -> None:
    both_have_one = threading.Barrier(2)
    names: dict[int, str] = {}

    def together(position: int) -> ChunkOutcome:
        names[position] = threading.current_thread().name
        both_have_one.wait(PATIENCE_S)
        return ChunkOutcome.DONE

    assert all(threads.each(2, together, with_help=True).done)
    own = threading.current_thread().name
    (helper,) = set(names.values()) - {own}
    assert helper.startswith("tiers of rank 3") and len(names) == 2

    def alone(position: int) -> ChunkOutcome:
        assert threading.current_thread().name == own
        return ChunkOutcome.DONE

    assert all(threads.each(20, alone, with_help=False).done)


def test_a_call_does_not_wait_for_others_that_keep_every_helper(threads: ChunkThreads) -> None:
    may_end = threading.Event()
    have_begun = threading.Semaphore(0)

    def slow(position: int) -> ChunkOutcome:
        have_begun.release()
        return ChunkOutcome.DONE if may_end.wait(PATIENCE_S) else ChunkOutcome.NOT_DONE

    others = [threading.Thread(target=threads.each, args=(2, slow), kwargs={"with_help": True}) for _ in range(3)]
    for other in others:
        other.start()
    for _ in range(3 + 2):  # three callers, and both helpers there are
        assert have_begun.acquire(timeout=PATIENCE_S)
    try:
        assert all(threads.each(10, done, with_help=True).done)
        assert all(other.is_alive() for other in others)
    finally:
        may_end.set()
        for other in others:
            other.join(PATIENCE_S)


@pytest.mark.parametrize("with_help", [True, False])
def test_after_a_problem_nothing_more_is_begun(threads: ChunkThreads, with_help: bool) -> None:
    seen: list[int] = []

    def run(position: int) -> ChunkOutcome:
        seen.append(position)
        if position == 1:
            raise StorageError("the device is full")
        time.sleep(0.001)  # long enough for the problem to be known before the last chunk
        return ChunkOutcome.DONE

    answer = threads.each(500, run, with_help=with_help)
    assert answer.problem == "the device is full"
    assert answer.outcomes == bytes(1 if position in seen and position != 1 else 0 for position in range(500))
    assert len(seen) == 2 if not with_help else len(seen) < 500


def test_an_unforeseen_error_is_raised_when_nothing_runs_any_more(threads: ChunkThreads) -> None:
    began, running = threading.Barrier(2), threading.Event()

    def run(position: int) -> ChunkOutcome:
        began.wait(PATIENCE_S)
        if threading.current_thread() is threading.main_thread():
            raise ZeroDivisionError
        running.set()
        threading.Event().wait(0.02)
        running.clear()
        return ChunkOutcome.DONE

    with pytest.raises(ZeroDivisionError):
        threads.each(2, run, with_help=True)
    assert not running.is_set()


def test_after_close_calls_are_refused_and_what_has_begun_ends(threads: ChunkThreads) -> None:
    def run(position: int) -> ChunkOutcome:
        threads.close()
        return ChunkOutcome.DONE

    answer = threads.each(5, run, with_help=False)
    assert answer == RankAnswer(bytes([1, 0, 0, 0, 0]), "the tiers of rank 3 were closed")
    with pytest.raises(ClosedError, match="the tiers of rank 3 were closed"):
        threads.check_open()
    with pytest.raises(ClosedError):
        threads.each(5, done, with_help=True)
    threads.close()
