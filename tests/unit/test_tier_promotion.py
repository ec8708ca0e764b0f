"""The way up: what is read from which tier into which slots, who waits for whom, and what is forgotten."""

import pytest

from lmcache_ray.index.plans import Deferred
from lmcache_ray.tiers.promotion import Promotion, is_coming_up, stop_waiting
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import TieredIndex
from tests.unit.index_builders import keys_of, names
from tests.unit.tier_builders import (
    PIN_S,
    all_good,
    bring_up,
    complete,
    in_memory,
    load,
    lookup,
    make_tiers,
    on_disk,
    plan_up,
    planned_up,
    store,
    waiting,
    where,
    write_down,
)


def with_disk(
    text: str, num_slots: int = 4, disk_slots: int = 8, *, has_remote: bool = False, keeps: bool = True
) -> TieredIndex:
    """An earlier life has left these on the disk, and nothing is in memory."""
    tiers = make_tiers(num_slots, disk_slots, has_remote=has_remote, keeps=keeps)
    assert tiers.disk is not None
    tiers.disk.adopt([(key, number) for number, key in enumerate(reversed(keys_of(text)), start=1)])
    assert (in_memory(tiers), on_disk(tiers)) == ("", text[::-1])
    return tiers


def from_disk(promotion: Promotion[str]) -> str:
    """What is read from the disk."""
    assert [promotion.refs[at].key for at in promotion.disk] == [ref.key for ref in promotion.disk.values()]
    return names(promotion.disk.values())


def num_leases(tiers: TieredIndex) -> tuple[int, int]:
    assert tiers.disk is not None
    return tiers.memory.counts().leases, tiers.disk.counts().leases


# -- planning ---------------------------------------------------------------------------------------------------------


def test_what_lies_below_is_read_into_memory_and_what_is_there_stays() -> None:
    tiers = with_disk("abc")
    bring_up(tiers, "a", lease_id="first")
    tiers.release("first")
    promotion = planned_up(tiers, "abcx")
    assert (names(promotion.refs), from_disk(promotion), promotion.remote) == ("bc", "bc", {})
    assert (list(promotion.keys), promotion.lease_id) == (keys_of("abc"), "load")
    assert store(tiers, "vwxyz").num_refused == 4, "a is pinned, b and c are coming"
    complete(tiers, promotion)
    assert (where(tiers, "abc"), load(tiers, "abc")) == ("ccc", "abc")


def test_a_chunk_comes_from_the_fastest_tier_that_has_it() -> None:
    tiers = with_disk("ac")
    promotion = planned_up(tiers, "abcde", found="abd")
    assert names(promotion.refs) == "abcd"
    assert from_disk(promotion) == "ac"
    assert promotion.remote == {1: "remote b", 3: "remote d"}


def test_a_hole_in_all_tiers_ends_what_is_brought_up() -> None:
    tiers = with_disk("abd")
    assert bring_up(tiers, "abcd") == "ab"
    assert where(tiers, "abcd") == "cc"


def test_of_a_prompt_that_does_not_fit_the_leading_part_comes() -> None:
    tiers = with_disk("abcdef", num_slots=4)
    assert bring_up(tiers, "abcdef") == "abcd"
    tiers = with_disk("abcdef", num_slots=4)
    store(tiers, "xy")
    promotion = planned_up(tiers, "abcd")
    assert names(promotion.refs) == "ab", "x and y wait for the disk"
    complete(tiers, promotion)
    assert load(tiers, "abcd") == "ab"


def test_all_or_nothing_if_that_is_asked_for() -> None:
    tiers = with_disk("abcd")
    store(tiers, "x")
    before = list(tiers.memory.entries())
    assert plan_up(tiers, "abcd", whole=True) is Deferred.NOT_WHOLE
    assert (list(tiers.memory.entries()), num_leases(tiers), tiers.coming_up) == (before, (0, 0), {})
    write_down(tiers)
    promotion = plan_up(tiers, "abcd", whole=True)
    assert isinstance(promotion, Promotion) and names(promotion.refs) == "abcd"


def test_prompts_that_are_promoted_together_do_not_push_each_other_out() -> None:
    tiers = with_disk("abcxy")
    first = planned_up(tiers, "abc", lease_id="1")
    assert plan_up(tiers, "xy", lease_id="2", whole=True) is Deferred.NOT_WHOLE
    complete(tiers, first)
    assert plan_up(tiers, "xy", lease_id="2", whole=True) is Deferred.NOT_WHOLE, "they are pinned for their load"
    tiers.release("1")
    assert isinstance(plan_up(tiers, "xy", lease_id="2", whole=True), Promotion)


def test_a_prompt_that_is_nowhere_is_a_promotion_of_nothing() -> None:
    tiers = with_disk("ab")
    promotion = planned_up(tiers, "xy")
    assert (promotion.refs, promotion.keys) == ((), [])
    assert complete(tiers, promotion) == []
    assert num_leases(tiers) == (0, 0)


def test_room_is_made_by_the_policy_but_not_of_what_is_read() -> None:
    tiers = with_disk("abcd")
    bring_up(tiers, "ab", lease_id="1")
    tiers.release("1")
    store(tiers, "xy")
    write_down(tiers)
    assert in_memory(tiers) == "bayx"
    promotion = planned_up(tiers, "abcd")
    assert names(promotion.refs) == "cd"
    assert sorted(in_memory(tiers)) == ["a", "b"]


def test_what_waits_for_the_remote_store_makes_way_for_what_is_to_be_read() -> None:
    tiers = with_disk("ab", num_slots=2, has_remote=True)
    store(tiers, "xy")
    write_down(tiers)
    assert waiting(tiers, Tier.REMOTE) == "xy"
    assert bring_up(tiers, "ab") == "ab"
    assert (waiting(tiers, Tier.REMOTE), tiers.backlogs[Tier.REMOTE].num_dropped) == ("", 2)


# -- leases -----------------------------------------------------------------------------------------------------------


def test_what_is_being_read_stays_on_the_disk_until_it_is_read() -> None:
    tiers = with_disk("abc", num_slots=8, disk_slots=4)
    promotion = planned_up(tiers, "abc")
    store(tiers, "wxyz")
    writes = write_down(tiers)
    assert writes is not None and (names(writes.targets), writes.evicted) == ("w", ())
    assert num_leases(tiers) == (0, 1)
    complete(tiers, promotion)
    assert num_leases(tiers) == (1, 0)
    store(tiers, "pq")
    writes = write_down(tiers)
    assert writes is not None and names(writes.evicted) == "cb"


def test_what_has_come_up_stays_for_the_load_that_follows_and_no_longer_than_it_may_take() -> None:
    tiers = with_disk("abc", num_slots=3)
    bring_up(tiers, "abc")
    assert store(tiers, "xyz").refs == ()
    assert load(tiers, "abc") == "abc"
    tiers.release("load")
    assert num_leases(tiers) == (0, 0)
    assert names(store(tiers, "xyz").refs) == "xyz"
    tiers = with_disk("abc", num_slots=3)
    bring_up(tiers, "abc")
    assert tiers.expire(PIN_S).lease_ids == ("load",)


def test_a_reader_that_has_ended_pins_nothing_that_comes_up() -> None:
    tiers = with_disk("abc")
    bring_up(tiers, "abc")
    tiers.drop_client("reader")
    assert num_leases(tiers) == (0, 0)


# -- outcomes ---------------------------------------------------------------------------------------------------------


def test_a_chunk_that_one_rank_could_not_read_is_not_up_and_its_slot_is_free_again() -> None:
    tiers = with_disk("abc")
    promotion = planned_up(tiers, "abc")
    assert complete(tiers, promotion, {0: [True] * 3, 1: [True, False, True]}) == []
    assert (where(tiers, "abc"), load(tiers, "abc")) == ("cdc", "a")
    assert tiers.memory.counts().free == 2
    assert bring_up(tiers, "abc") == "b", "it is still on the disk, and is tried again"


def test_what_is_of_no_use_is_forgotten_on_the_disk() -> None:
    tiers = with_disk("abc")
    promotion = planned_up(tiers, "abc")
    lost = complete(tiers, promotion, {0: [True] * 3, 1: [True, False, True]}, gone=[1])
    assert lost == [promotion.disk[1]]
    assert (where(tiers, "abc"), sorted(on_disk(tiers))) == ("c", ["a", "c"])
    assert names(store(tiers, "abc").refs) == "b", "the next store repairs it"
    write_down(tiers)
    assert sorted(on_disk(tiers)) == ["a", "b", "c"]


def test_what_is_gone_is_forgotten_although_others_hold_it() -> None:
    tiers = with_disk("abc")
    lookup(tiers, "ab", "one")
    lookup(tiers, "b", "other")
    tiers.pin(keys_of("b"), "pin", now=0.0)
    promotion = planned_up(tiers, "abc")
    assert names(complete(tiers, promotion, {}, gone=[1])) == "b"
    assert tiers.disk is not None and tiers.disk.kept() == (0, 0)
    assert num_leases(tiers) == (0, 1), "of their leases one still holds a"
    assert tiers.release("one") is True and tiers.release("pin") is False
    assert where(tiers, "abc") == "d"


def test_what_is_gone_from_a_remote_store_is_its_own_affair() -> None:
    tiers = with_disk("a")
    promotion = planned_up(tiers, "ab", found="b")
    assert complete(tiers, promotion, {0: [True, False], 1: [True, False]}, gone=[1]) == []
    assert where(tiers, "ab") == "c"


def test_a_chunk_that_is_cleared_on_the_disk_while_it_is_read_is_kept_there_since_it_is_leased() -> None:
    tiers = with_disk("ab")
    promotion = planned_up(tiers, "ab")
    assert tiers.clear_disk(None).num_kept == 2
    complete(tiers, promotion)
    assert where(tiers, "ab") == "cc"


def test_what_memory_is_cleared_of_while_it_comes_up_does_not_appear() -> None:
    tiers = with_disk("ab")
    promotion = planned_up(tiers, "ab")
    plan = tiers.clear_memory(None)
    assert names(plan.aborted) == "ab"
    complete(tiers, promotion)
    assert (where(tiers, "ab"), tiers.memory.counts().free, num_leases(tiers)) == ("dd", 4, (0, 0))


def test_a_rank_that_has_not_answered_keeps_the_slots_from_others() -> None:
    tiers = with_disk("ab")
    promotion = planned_up(tiers, "ab")
    complete(tiers, promotion, {0: [True, True]})
    assert (where(tiers, "ab"), tiers.coming_up) == ("dd", {})
    assert tiers.expire(10.0).plan_ids == (promotion.plan_id,)
    assert tiers.memory.unsettled(1) == list(promotion.refs), "it may still be writing"
    tiers.memory.settle(1, promotion.refs)
    assert tiers.memory.counts().free == 4


# -- what goes where --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False])
def test_what_came_from_the_disk_does_not_go_back_and_what_came_from_the_remote_store_goes_to_the_disk(
    keeps: bool,
) -> None:
    tiers = with_disk("a", has_remote=True, keeps=keeps)
    complete(tiers, planned_up(tiers, "ab", found="b"))
    assert (waiting(tiers, Tier.DISK), waiting(tiers, Tier.REMOTE)) == ("b", "")
    write_down(tiers)
    tiers.release("load")
    assert (where(tiers, "ab"), sorted(on_disk(tiers))) == ("cc" if keeps else "dd", ["a", "b"])


def test_what_is_stored_anew_after_the_disk_has_lost_it_goes_down_again() -> None:
    tiers = with_disk("a", num_slots=2)
    complete(tiers, planned_up(tiers, "a"))
    tiers.release("load")
    tiers.clear_disk(None)
    assert waiting(tiers) == "", "it came from there"
    store(tiers, "xy")
    write_down(tiers)
    store(tiers, "a")
    assert waiting(tiers) == "a"


# -- several at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [True, False])
def test_a_chunk_is_read_once_for_all_who_want_it_and_pinned_for_each(keeps: bool) -> None:
    tiers = with_disk("abc", keeps=keeps)
    first = planned_up(tiers, "ab", lease_id="first")
    second = planned_up(tiers, "abc", lease_id="second")
    assert (names(first.refs), names(second.refs)) == ("ab", "c")
    assert is_coming_up(tiers, second.keys)
    complete(tiers, second)
    assert is_coming_up(tiers, second.keys), "what the first reads has not come"
    complete(tiers, first)
    assert not is_coming_up(tiers, second.keys)
    assert load(tiers, "ab", lease_id="first") == "ab"
    tiers.release("first")
    assert load(tiers, "abc", lease_id="second") == "abc", "none has left before the second reader came to it"
    tiers.release("second")
    assert (tiers.awaiting, num_leases(tiers)) == ({}, (0, 0))
    assert in_memory(tiers) == ("cba" if keeps else "")


def test_whoever_does_not_wait_any_more_gets_nothing_pinned() -> None:
    tiers = with_disk("ab")
    endings = (
        lambda waiter: stop_waiting(tiers, waiter),
        lambda waiter: tiers.release(waiter.lease_id),
        lambda waiter: tiers.drop_client(waiter.client),
        lambda waiter: load(tiers, "ab", lease_id=waiter.lease_id),
    )
    for end in endings:
        first = planned_up(tiers, "ab", lease_id="first")
        waiter = planned_up(tiers, "ab", lease_id="waiter")
        assert list(tiers.awaiting) == ["waiter"]
        end(waiter)
        assert tiers.awaiting == {}
        complete(tiers, waiter)
        complete(tiers, first)
        assert num_leases(tiers) == (1, 0)
        tiers.release("first")
        plan = tiers.clear_memory(None)
        for rank in tiers.memory.holders:
            tiers.memory.complete_clear(plan.plan_id, rank)


def test_who_waits_for_what_fails_waits_for_nothing() -> None:
    tiers = with_disk("ab")
    first = planned_up(tiers, "ab", lease_id="first")
    second = planned_up(tiers, "ab", lease_id="second")
    complete(tiers, second)
    complete(tiers, first, {0: [True, True], 1: [False, True]})
    assert not is_coming_up(tiers, second.keys)
    assert load(tiers, "ab", lease_id="second") == ""


def test_a_chunk_that_somebody_is_storing_is_not_read_from_below() -> None:
    tiers = with_disk("b")
    plan = tiers.prepare_store(keys_of("a"), client="w", now=0.0, start=0, rank=None, patient=False)
    assert not isinstance(plan, Deferred)
    promotion = planned_up(tiers, "ab", found="a")
    assert names(promotion.refs) == "b", "behind a, which will be there"
    assert not is_coming_up(tiers, keys_of("a"))
    complete(tiers, promotion)
    assert load(tiers, "ab") == ""
    tiers.complete_store(plan.plan_id, tiers.memory.holders, done=[0])
    assert load(tiers, "ab") == "ab"


def test_a_store_of_what_is_coming_up_writes_nothing() -> None:
    tiers = with_disk("ab")
    promotion = planned_up(tiers, "ab")
    assert store(tiers, "abc").refs != () and names(store(tiers, "abc").refs) == ""
    assert waiting(tiers) == "c"
    complete(tiers, promotion, all_good(tiers, promotion.refs))
    assert where(tiers, "abc") == "ccc"
