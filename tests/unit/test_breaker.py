"""When a store is left alone and when it is tried again, by plain calls with given times."""

from collections.abc import Iterable

import pytest

from lmcache_ray.storage.breaker import BreakerState, CircuitBreaker


def opened(now: float = 100.0, **settings: float) -> CircuitBreaker:
    breaker = CircuitBreaker(threshold=3, **settings)
    for _ in range(3):
        breaker.record_failure(now, "no answer")
    return breaker


def fail_trials(breaker: CircuitBreaker, times: Iterable[float]) -> None:
    for now in times:
        assert breaker.begin_trial(now)
        breaker.trial_failed(now, "still none")


def test_a_new_store_is_asked() -> None:
    breaker = CircuitBreaker()
    assert breaker.state is BreakerState.CLOSED
    assert (breaker.reason, breaker.num_trips, breaker.outage_s(5.0)) == ("", 0, 0.0)


def test_it_opens_at_the_third_failure_in_a_row() -> None:
    breaker = CircuitBreaker(threshold=3)
    for failures in (2, 2, 3):
        assert breaker.state is BreakerState.CLOSED
        for _ in range(failures):
            breaker.record_failure(7.0, "no answer")
        if failures < 3:
            breaker.record_success()
    assert breaker.state is BreakerState.OPEN
    assert (breaker.reason, breaker.num_trips, breaker.outage_s(9.5)) == ("no answer", 1, 2.5)


def test_no_trial_before_the_pause_is_over_and_one_at_a_time() -> None:
    breaker = opened(100.0, first_pause_s=1.0)
    assert not breaker.begin_trial(100.9)
    assert breaker.state is BreakerState.OPEN
    assert breaker.begin_trial(101.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.begin_trial(101.0)
    assert not breaker.begin_trial(1000.0)


def test_a_trial_that_succeeds_ends_the_outage_and_its_count() -> None:
    breaker = opened(100.0)
    assert breaker.begin_trial(101.0)
    breaker.trial_succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.outage_s(102.0) == 0.0
    breaker.record_failure(103.0, "again")
    breaker.record_failure(103.0, "again")
    assert breaker.state is BreakerState.CLOSED


def test_each_failed_trial_doubles_the_pause_up_to_the_longest() -> None:
    breaker = opened(0.0, first_pause_s=1.0, longest_pause_s=5.0)
    fail_trials(breaker, [1.0])
    for last, pause_s in ((1.0, 2.0), (3.0, 4.0), (7.0, 5.0), (12.0, 5.0)):
        assert not breaker.begin_trial(last + pause_s - 0.01)
        fail_trials(breaker, [last + pause_s])
    assert (breaker.reason, breaker.num_trips, breaker.outage_s(20.0)) == ("still none", 1, 20.0)


def test_the_next_outage_begins_with_the_first_pause_again() -> None:
    breaker = opened(0.0, first_pause_s=1.0)
    fail_trials(breaker, [1.0, 3.0, 7.0])
    assert breaker.begin_trial(50.0)
    breaker.trial_succeeded()
    for _ in range(3):
        breaker.record_failure(60.0, "no answer")
    assert (breaker.num_trips, breaker.outage_s(60.5)) == (2, 0.5)
    assert breaker.begin_trial(61.0)


@pytest.mark.parametrize("is_in_trial", [False, True])
def test_calls_from_before_the_outage_change_nothing(is_in_trial: bool) -> None:
    breaker = opened(100.0)
    if is_in_trial:
        assert breaker.begin_trial(101.0)
    state = breaker.state
    breaker.record_success()
    breaker.record_failure(101.5, "late")
    assert (breaker.state, breaker.reason, breaker.num_trips) == (state, "no answer", 1)


def test_the_end_of_a_trial_that_nobody_began_changes_nothing() -> None:
    breaker = CircuitBreaker()
    breaker.trial_failed(1.0, "what trial")
    assert breaker.state is BreakerState.CLOSED
    breaker = opened(1.0)
    breaker.trial_succeeded()
    assert breaker.state is BreakerState.OPEN
