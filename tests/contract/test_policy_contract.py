"""What every eviction policy must do; a new one joins by its entry in `POLICIES`."""

import random
from collections.abc import Iterator

import pytest

from lmcache_ray.errors import ConfigError
from lmcache_ray.index.policy import POLICIES, EvictionPolicy, make_policy


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make_policy(request.param)


def test_a_new_policy_has_no_candidates(policy: EvictionPolicy) -> None:
    assert list(policy.candidates()) == []


def test_candidates_are_the_admitted_slots_once_each(policy: EvictionPolicy) -> None:
    policy.admit([5, 3, 9])
    policy.touch([3, 3, 5])
    assert sorted(policy.candidates()) == [3, 5, 9]


def test_slots_never_used_again_leave_in_the_order_given(policy: EvictionPolicy) -> None:
    policy.admit([7, 8, 9])
    policy.admit([1, 2])
    assert list(policy.candidates()) == [7, 8, 9, 1, 2]


def test_a_prompt_given_tail_first_leaves_tail_first_after_any_number_of_uses(policy: EvictionPolicy) -> None:
    head_to_tail = [4, 5, 6, 7]
    policy.admit(reversed(head_to_tail))
    for used in (4, 2, 3, 1):
        policy.touch(reversed(head_to_tail[:used]))
    assert list(policy.candidates()) == [7, 6, 5, 4]


def test_removal_forgets_the_slot_and_its_history(policy: EvictionPolicy) -> None:
    policy.admit([1, 2])
    policy.touch([1, 1, 1])
    policy.remove([1])
    assert list(policy.candidates()) == [2]
    policy.admit([1])
    assert list(policy.candidates()) == [2, 1]


def test_removing_a_slot_that_is_not_admitted_is_a_key_error(policy: EvictionPolicy) -> None:
    with pytest.raises(KeyError):
        policy.remove([1])
    policy.admit([1])
    policy.remove([1])
    with pytest.raises(KeyError):
        policy.remove([1])


def test_a_caller_may_stop_early_pass_over_slots_and_remove_afterwards(policy: EvictionPolicy) -> None:
    policy.admit(range(6))
    candidates: Iterator[int] = policy.candidates()
    taken = [next(candidates), next(candidates), next(candidates)]
    policy.remove([taken[2]])
    policy.remove([taken[0]])
    assert list(policy.candidates()) == [taken[1], 3, 4, 5]


def test_admitting_and_touching_nothing_changes_nothing(policy: EvictionPolicy) -> None:
    policy.admit([])
    policy.touch([])
    policy.admit([1])
    policy.admit([])
    policy.touch([])
    assert list(policy.candidates()) == [1]


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_exactly_the_admitted_slots(policy: EvictionPolicy, seed: int) -> None:
    rng = random.Random(seed)
    admitted: set[int] = set()
    for _ in range(300):
        absent = sorted(set(range(20)) - admitted)
        step = rng.choice(("admit", "touch", "remove"))
        if step == "admit" and absent:
            slots = rng.sample(absent, rng.randint(1, len(absent)))
            policy.admit(slots)
            admitted.update(slots)
        elif step == "touch" and admitted:
            policy.touch(rng.choices(sorted(admitted), k=5))
        elif step == "remove" and admitted:
            slot = next(policy.candidates())
            policy.remove([slot])
            admitted.remove(slot)
        order = list(policy.candidates())
        assert len(order) == len(admitted) and set(order) == admitted


@pytest.mark.parametrize("name", ["LRU", "lru", "Fifo"])
def test_policies_are_made_by_name_in_any_case(name: str) -> None:
    assert type(make_policy(name)) is POLICIES[name.upper()]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'MRU'.*LRU, LFU, FIFO"):
        make_policy("MRU")
