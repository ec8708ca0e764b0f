"""A store that hangs, fails or freezes, as its users see it. Outcomes depend on a clock that the test moves."""

import time
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from lmcache_ray.errors import ClosedError, InvalidRequestError, StorageError, StorageUnavailableError
from lmcache_ray.storage.backends import open_backend
from lmcache_ray.storage.guarded import GuardedBackend
from tests.redis_server import RedisServer
from tests.unit.held_backend import HeldBackend

LONG_S = 30.0
SHORT_S = 0.05


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> Iterator[HeldBackend]:
    held = HeldBackend(open_backend(f"memory://{uuid4().hex}", timeout_s=LONG_S))
    yield held
    held.gate.set()


def guarded(store: HeldBackend, clock: Clock, timeout_s: float = SHORT_S, max_threads: int = 8) -> GuardedBackend:
    return GuardedBackend(store, timeout_s=timeout_s, clock=clock, place="the store", max_threads=max_threads)


def refuse(text: str) -> Callable[[], None]:
    def mishap() -> None:
        raise StorageError(text)

    return mishap


def break_with(error: Exception) -> Callable[[], None]:
    def mishap() -> None:
        raise error

    return mishap


def fails(guard: GuardedBackend, text: str) -> None:
    with pytest.raises(StorageUnavailableError, match=text):
        guard.get("a")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_while_all_is_well_nothing_is_different(store: HeldBackend, clock: Clock) -> None:
    guard = guarded(store, clock, LONG_S)
    guard.put("a", [b"1"])
    assert bytes(guard.get("a") or b"") == b"1"
    with pytest.raises(InvalidRequestError):
        guard.get("../a")
    assert guard.problem is None and guard.probe()
    assert (guard.counts.made, guard.counts.failed, guard.counts.refused, guard.counts.stuck) == (3, 0, 0, 0)


def test_a_hanging_store_costs_three_deadlines_then_nothing(store: HeldBackend, clock: Clock) -> None:
    guard = guarded(store, clock)
    store.gate.clear()
    for _ in range(3):
        fails(guard, r"the store did not answer within 0\.05 s")
    num_calls = len(store.calls)
    clock.now_s += 4.0
    for _ in range(20):
        fails(guard, "the store has been out of order for 4 s: the store did not answer")
    assert len(store.calls) == num_calls
    counts = guard.counts
    assert (counts.made, counts.refused, counts.late, counts.failed) == (3, 20, 3, 3)
    assert (counts.outages, counts.stuck) == (1, 3)


def test_it_is_used_again_after_a_probe_and_not_before(store: HeldBackend, clock: Clock) -> None:
    guard = guarded(store, clock, LONG_S)
    guard.put("a", [b"1"])
    store.mishap = break_with(ConnectionResetError("gone"))
    for _ in range(3):
        fails(guard, "the store raised ConnectionResetError: gone")
    store.mishap = lambda: None
    assert not guard.probe(), "the pause is not over"
    fails(guard, "out of order for 0 s: the store raised ConnectionResetError")
    clock.now_s += 1.0
    assert guard.probe()
    assert guard.problem is None
    assert bytes(guard.get("a") or b"") == b"1"


def test_failed_probes_wait_longer_each_time(store: HeldBackend, clock: Clock) -> None:
    guard = guarded(store, clock)
    store.gate.clear()
    for _ in range(3):
        fails(guard, "did not answer")
    tried_at = []
    for _ in range(70):
        clock.now_s += 0.5
        before = len(store.calls)
        assert not guard.probe()
        if len(store.calls) > before:
            tried_at.append(clock.now_s - 1000.0)
    assert tried_at == [1.0, 3.0, 7.0, 15.0, 31.0]
    assert "exist" in store.calls[-1]


def test_an_answer_that_refuses_is_no_outage(store: HeldBackend, clock: Clock) -> None:
    """A store without room for writes still serves reads."""
    guard = guarded(store, clock, LONG_S)
    store.mishap = refuse("no room")
    for _ in range(10):
        with pytest.raises(StorageError, match="no room"):
            guard.put("a", [b"1"])
    assert guard.problem is None
    assert guard.counts.failed == 0


def test_whatever_a_users_backend_raises_is_a_storage_error(store: HeldBackend, clock: Clock) -> None:
    guard = guarded(store, clock, LONG_S)
    store.mishap = break_with(ZeroDivisionError("oh"))
    fails(guard, "the store raised ZeroDivisionError: oh")


def test_a_caller_with_little_time_does_not_speak_against_the_store(store: HeldBackend, clock: Clock) -> None:
    """Lookups wait shorter than the store may take. Their calls are judged when they end."""
    guard = guarded(store, clock, LONG_S)
    store.gate.clear()
    for _ in range(5):
        fails(guard.within(SHORT_S), "did not answer within")
    assert guard.problem is None
    assert (guard.counts.late, guard.counts.failed, guard.counts.stuck) == (5, 0, 5)
    store.mishap = break_with(OSError("it was dead after all"))
    store.gate.set()
    wait_until(lambda: guard.counts.stuck == 0)
    assert guard.counts.failed >= 3
    assert "it was dead after all" in (guard.problem or "")


def test_a_view_has_its_time_for_all_calls_together(store: HeldBackend, clock: Clock) -> None:
    guard = guarded(store, clock, LONG_S)
    view = guard.within(5.0)
    assert view.exist(["a"]) == [False]
    clock.now_s += 5.0
    with pytest.raises(StorageUnavailableError, match="no time left"):
        view.exist(["a"])
    assert guard.exist(["a"]) == [False]
    assert (guard.counts.made, guard.counts.refused) == (2, 1)
    assert view.counts == guard.counts


def test_when_every_thread_is_stuck_calls_are_refused_at_once(store: HeldBackend, clock: Clock) -> None:
    guard = guarded(store, clock, LONG_S, max_threads=2)
    store.gate.clear()
    for _ in range(2):
        fails(guard.within(SHORT_S), "did not answer")
    fails(guard, "2 calls have not returned, and no more are made")
    assert not guard.probe()
    store.gate.set()
    wait_until(lambda: guard.counts.stuck == 0)
    assert guard.problem is None and guard.probe()
    assert guard.get("a") is None


def test_a_listing_is_guarded_step_by_step(store: HeldBackend, clock: Clock) -> None:
    for number in range(1500):
        store.put(f"x/{number}", [b"1"])
    guard = guarded(store, clock)
    assert len(list(guard.list("x"))) == 1500
    store.gate.clear()
    with pytest.raises(StorageUnavailableError, match=r"did not answer within 0\.5 s"):
        list(guard.list("x"))


def test_close_does_not_wait_for_a_store_that_hangs(store: HeldBackend, clock: Clock) -> None:
    guard = guarded(store, clock)
    store.gate.clear()
    guard.close()
    guard.close()
    with pytest.raises(ClosedError):
        guard.get("a")


def frozen_and_back(guard: GuardedBackend, clock: Clock, stop: Callable[[], None], go_on: Callable[[], None]) -> None:
    """The server ends answering after `stop` and answers again after `go_on`."""
    stop()
    for _ in range(3):
        with pytest.raises(StorageUnavailableError):
            guard.get("a")
    assert guard.problem is not None
    clock.now_s += 1.0
    assert not guard.probe()
    go_on()
    assert not guard.probe(), "after a failed probe the pause is two seconds"
    fails(guard, "out of order")
    wait_until(lambda: is_back(guard, clock))
    assert guard.problem is None


def is_back(guard: GuardedBackend, clock: Clock) -> bool:
    """One more probe, after the longest pause; a busy machine may need more than one."""
    clock.now_s += 30.0
    return guard.probe()


def test_a_frozen_server_and_its_return(redis_server: RedisServer, clock: Clock) -> None:
    backend = open_backend(redis_server.url, timeout_s=LONG_S)
    backend.put("a", [b"1"])
    guard = GuardedBackend(backend, timeout_s=0.2, clock=clock)
    frozen_and_back(guard, clock, redis_server.freeze, redis_server.thaw)
    assert bytes(backend.get("a") or b"") == b"1"
    guard.close()


def test_a_killed_server_comes_back_empty(redis_server: RedisServer, clock: Clock) -> None:
    guard = GuardedBackend(open_backend(redis_server.url, timeout_s=LONG_S), timeout_s=LONG_S, clock=clock)
    guard.put("a", [b"1"])
    frozen_and_back(guard, clock, redis_server.kill, redis_server.start)
    assert guard.get("a") is None
    guard.put("a", [b"2"])
    assert bytes(guard.get("a") or b"") == b"2"
    guard.close()


def test_a_server_killed_in_a_transfer(redis_server: RedisServer, clock: Clock) -> None:
    guard = GuardedBackend(open_backend(redis_server.url, timeout_s=5.0), timeout_s=5.0, clock=clock)
    large = bytes(64 * 2**20)
    guard.put("a", [large])
    redis_server.freeze()
    with pytest.raises(StorageUnavailableError):  # a first part of it is under way when the caller leaves
        guard.within(SHORT_S).put("b", [large])
    redis_server.kill()
    wait_until(lambda: guard.counts.stuck == 0)
    redis_server.start()
    assert guard.problem is None, "one failure is none"
    assert guard.get_many(["a", "b"]) == [None, None]
    guard.close()
