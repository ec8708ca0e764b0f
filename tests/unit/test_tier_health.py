"""A tier that fails is left alone for a while, which grows; it says why, and is good again after one good use."""

from lmcache_ray.tiers.health import TierHealth


def test_a_new_tier_is_good() -> None:
    health = TierHealth()
    assert (health.is_good, health.may_try(0.0), health.problem(0.0)) == (True, True, None)


def test_a_failure_is_told_with_the_time_since_the_first_of_a_row() -> None:
    health = TierHealth()
    health.failed("the disk is full", 100.0)
    assert not health.is_good
    assert health.problem(104.2) == "the disk is full (for 4 s)"
    health.failed("rank 1 is silent", 110.0)
    assert health.problem(160.0) == "rank 1 is silent (for 60 s)", "the latest reason, the whole time"


def test_the_pause_doubles_up_to_half_a_minute() -> None:
    health, now, pauses = TierHealth(), 0.0, []
    for _ in range(8):
        health.failed("full", now)
        pauses.append(next(pause for pause in range(100) if health.may_try(now + pause)))
        assert not health.may_try(now + pauses[-1] - 0.01)
        now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_after_a_good_use_it_starts_anew() -> None:
    health = TierHealth()
    for now in (0.0, 5.0, 10.0):
        health.failed("full", now)
    health.went_well()
    assert (health.is_good, health.may_try(10.0), health.problem(10.0)) == (True, True, None)
    health.failed("full again", 50.0)
    assert health.problem(51.0) == "full again (for 1 s)"
    assert health.may_try(51.0) and not health.may_try(50.9)
