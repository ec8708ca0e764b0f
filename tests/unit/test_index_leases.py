"""Leases: pins with an owner and an end."""

import pytest

from lmcache_ray.index.leases import LeaseTable


@pytest.fixture
def leases() -> LeaseTable:
    return LeaseTable(timeout_s=10.0)


def pinned(leases: LeaseTable) -> list[int]:
    return [slot for slot in range(10) if slot in leases.pinned]


def test_a_lease_pins_its_slots_until_released_once(leases: LeaseTable) -> None:
    leases.hold("a", "client", [1, 2], now=0.0)
    assert pinned(leases) == [1, 2]
    assert leases.release("a") is True
    assert leases.release("a") is False
    assert pinned(leases) == [] and len(leases) == 0


def test_a_slot_stays_pinned_while_any_lease_holds_it(leases: LeaseTable) -> None:
    leases.hold("a", "client", [1, 2], now=0.0)
    leases.hold("b", "client", [2, 3], now=0.0)
    leases.release("a")
    leases.release("a")
    assert pinned(leases) == [2, 3]


def test_asking_again_replaces_the_slots_and_renews(leases: LeaseTable) -> None:
    leases.hold("a", "client", [1, 2], now=0.0)
    leases.hold("a", "client", [2, 3], now=5.0)
    assert pinned(leases) == [2, 3] and len(leases) == 1
    assert leases.expire(14.9) == []
    assert leases.expire(15.0) == ["a"]
    assert pinned(leases) == []


def test_a_repeated_slot_is_pinned_once_by_one_lease(leases: LeaseTable) -> None:
    leases.hold("a", "client", [1, 1, 1], now=0.0)
    leases.release("a")
    assert pinned(leases) == []


def test_holding_nothing_ends_the_lease(leases: LeaseTable) -> None:
    leases.hold("a", "client", [], now=0.0)
    assert len(leases) == 0
    leases.hold("a", "client", [1], now=0.0)
    leases.hold("a", "client", [], now=0.0)
    assert len(leases) == 0 and pinned(leases) == []


def test_only_leases_whose_time_is_up_expire(leases: LeaseTable) -> None:
    leases.hold("early", "client", [1], now=0.0)
    leases.hold("late", "client", [2], now=4.0)
    assert leases.renew("early", now=3.0) is True
    assert leases.renew("never", now=3.0) is False
    assert leases.expire(10.0) == []
    assert leases.expire(13.5) == ["early"]
    assert leases.expire(14.0) == ["late"]
    assert leases.expire(1e9) == []


def test_a_client_takes_its_leases_along(leases: LeaseTable) -> None:
    leases.hold("a", "mine", [1], now=0.0)
    leases.hold("b", "yours", [1, 2], now=0.0)
    leases.hold("c", "mine", [3], now=0.0)
    assert leases.drop_client("mine") == ["a", "c"]
    assert pinned(leases) == [1, 2]


def test_a_lease_taken_over_belongs_to_its_last_client(leases: LeaseTable) -> None:
    leases.hold("a", "mine", [1], now=0.0)
    leases.hold("a", "yours", [2], now=0.0)
    assert leases.drop_client("mine") == []
    assert pinned(leases) == [2]


def test_a_kept_lease_ends_by_release_or_with_its_client_and_never_by_time(leases: LeaseTable) -> None:
    for lease_id, slots in (("a", [1, 2]), ("b", [3])):
        leases.hold(lease_id, "client", slots, now=0.0)
        assert leases.keep(lease_id, max_slots=3) is True
    assert leases.expire(1e18) == [] and leases.renew("a", now=1e18) is True
    assert leases.expire(1e19) == [] and (leases.num_kept, leases.kept_slots) == (2, {1, 2, 3})
    assert leases.release("a") is True
    assert (leases.num_kept, pinned(leases)) == (1, [3])
    assert leases.drop_client("client") == ["b"]
    assert (leases.num_kept, pinned(leases), leases.contradictions()) == (0, [], [])


def test_a_lease_that_would_keep_too_many_slots_still_ends_by_time(leases: LeaseTable) -> None:
    leases.hold("a", "client", [1, 2], now=0.0)
    leases.hold("b", "client", [2, 3], now=0.0)
    assert leases.keep("a", max_slots=2) is True
    assert leases.keep("b", max_slots=2) is False
    assert leases.keep("never", max_slots=2) is False
    assert leases.expire(10.0) == ["b"] and pinned(leases) == [1, 2]
    leases.hold("c", "client", [1, 2], now=10.0)
    assert leases.keep("c", max_slots=2) is True, "slots count once, however many leases hold them"
    assert leases.keep("c", max_slots=0) is True, "it is kept already"
    leases.release("c")
    assert leases.kept_slots == {1, 2} and leases.contradictions() == [], "the other lease keeps them"


def test_asking_for_a_kept_lease_again_gives_it_a_time(leases: LeaseTable) -> None:
    leases.hold("a", "client", [1], now=0.0)
    assert leases.keep("a", max_slots=1) is True
    leases.hold("a", "client", [1], now=5.0)
    assert leases.num_kept == 0 and leases.expire(15.0) == ["a"]
