"""Copies side by side: every one has ended when anything is answered. Arenas are not given away under a call."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from cluster.deadline import Deadline
from cluster.link import ClusterLink
from cluster.local_arenas import WORTH_A_THREAD_NBYTES, LocalArenas
from lmcache_ray.errors import ArenaError, ClosedError


@pytest.fixture
def arenas() -> LocalArenas:
    link = SimpleNamespace(
        world=SimpleNamespace(name="c"), hellos=[SimpleNamespace(arena_path=None)], deadline=lambda: Deadline(5.0)
    )
    return LocalArenas(cast(ClusterLink, link))


def job(number: int, ended: list[int], error: BaseException | None = None) -> Callable[[], int]:
    def run() -> int:
        ended.append(number)
        if error is not None:
            raise error
        return number

    return run


def test_results_come_in_order_and_small_copies_need_no_thread(arenas: LocalArenas) -> None:
    ended: list[int] = []
    jobs = [job(number, ended) for number in range(7)]
    assert arenas.run_together(jobs, nbytes=WORTH_A_THREAD_NBYTES) == list(range(7))
    assert sorted(ended) == list(range(7))
    names = arenas.run_together([lambda: threading.current_thread().name] * 3, nbytes=WORTH_A_THREAD_NBYTES - 1)
    assert set(names) == {threading.current_thread().name}
    assert arenas.run_together([], nbytes=0) == arenas.run_together([], nbytes=WORTH_A_THREAD_NBYTES) == []


@pytest.mark.parametrize("failing", [0, 1, 4])
@pytest.mark.parametrize("error", [ArenaError("no"), KeyboardInterrupt()])
def test_an_error_is_raised_when_all_have_ended(arenas: LocalArenas, failing: int, error: BaseException) -> None:
    ended: list[int] = []
    jobs = [job(number, ended, error if number == failing else None) for number in range(5)]
    with pytest.raises(type(error)):
        arenas.run_together(jobs, nbytes=WORTH_A_THREAD_NBYTES)
    assert sorted(ended) == list(range(5))


def test_closing_waits_for_calls_and_refuses_new_ones(arenas: LocalArenas) -> None:
    with arenas.call():
        assert arenas.close(timeout_s=0) is False
    assert arenas.close(timeout_s=5) is True
    with pytest.raises(ClosedError, match="'c' is closed"), arenas.call():
        pass


def test_a_rank_without_an_arena_has_none_to_map(arenas: LocalArenas) -> None:
    with pytest.raises(ArenaError, match="rank 0 holds no arena"):
        arenas.of_rank(0)
