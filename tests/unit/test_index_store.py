"""Storing led by one driver: what is reserved, what is evicted for it, and when it is READY."""

import pytest

from lmcache_ray.errors import ConfigError, InvalidRequestError, ProtocolError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import StorePlan
from lmcache_ray.index.policy import make_policy
from lmcache_ray.index.slot_table import SlotState
from tests.unit.index_builders import contents, finish, keys_of, make_index, names, store


def prepare(index: CacheIndex, text: str, start: int = 0) -> StorePlan:
    return index.prepare_store(keys_of(text), client="writer", now=0.0, start=start)


def test_a_chunk_is_ready_only_when_every_holder_has_committed_it() -> None:
    index = make_index(8, holders=(0, 1, 2))
    plan = prepare(index, "abc")
    assert index.lookup(keys_of("abc")) == 0
    index.complete_store(plan.plan_id, [0], done=[0, 1, 2])
    index.complete_store(plan.plan_id, [2], done=[0, 1])
    index.complete_store(plan.plan_id, [1], done=[0])
    assert index.lookup(keys_of("abc")) == 1
    index.complete_store(plan.plan_id, [1], done=[1, 2])
    assert index.lookup(keys_of("abc")) == 2
    assert index.complete_store(plan.plan_id, [2], done=[2]) is True
    assert index.lookup(keys_of("abc")) == 3
    assert index.counts().plans == 0
    index.check_integrity()


def test_only_what_nobody_has_or_writes_is_planned_and_positions_say_where_it_is() -> None:
    index = make_index(8)
    store(index, "ab")
    first = prepare(index, "abc")
    second = prepare(index, "abcde")
    assert (names(first.refs), first.positions, first.num_ready) == ("c", (2,), 2)
    assert (names(second.refs), second.positions, second.num_ready) == ("de", (3, 4), 2)


def test_a_repeated_key_is_planned_once() -> None:
    index = make_index(8)
    plan = prepare(index, "abab")
    assert (names(plan.refs), plan.positions) == ("ab", (0, 1))
    finish(index, plan)
    assert index.lookup(keys_of("abab")) == 4
    index.check_integrity()


def test_no_slot_is_in_two_uses_and_generations_grow_from_the_epoch() -> None:
    index = make_index(3, epoch=5)
    first, second = store(index, "abc"), store(index, "def")
    assert sorted(ref.slot for ref in second.refs) == [0, 1, 2]
    generations = [ref.generation for ref in first.refs + second.refs]
    assert generations == sorted(set(generations))
    assert all(generation >> 40 == 5 and generation < 1 << 62 for generation in generations)
    assert second.plan_id > first.plan_id > 5 << 40


def test_the_last_generation_of_an_epoch_is_the_last() -> None:
    index = make_index(4)
    store(index, "ab")
    index.table.next_generation = (2 << 40) - 1
    with pytest.raises(ProtocolError, match="generation"):
        prepare(index, "cdef")
    index.check_integrity()
    assert contents(index) == "ba" and index.counts().free == 2


def test_eviction_takes_the_least_recently_used_tails_first() -> None:
    index = make_index(6)
    store(index, "abc")
    store(index, "xyz")
    index.lookup(keys_of("abc"))
    plan = store(index, "pq")
    assert names(plan.evicted) == "zy"
    assert index.lookup(keys_of("xyz")) == 1
    assert index.lookup(keys_of("abc")) == 3


def test_evicted_refs_say_what_lay_where_before() -> None:
    index = make_index(2)
    old = store(index, "ab")
    new = store(index, "cd")
    assert set(new.evicted) == set(old.refs)
    assert {ref.slot for ref in new.refs} == {0, 1}


def test_a_lookup_that_does_not_touch_leaves_the_order_alone() -> None:
    index = make_index(4)
    store(index, "ab")
    store(index, "xy")
    assert index.lookup(keys_of("ab"), touch=False) == 2
    assert contents(index) == "bayx"


def test_storing_what_is_there_is_a_use_of_it() -> None:
    index = make_index(4)
    store(index, "ab")
    store(index, "xy")
    assert store(index, "ab").refs == ()
    assert contents(index) == "yxba"


def test_a_prompt_that_grows_leaves_tail_first_all_the_same() -> None:
    index = make_index(8)
    store(index, "ab")
    store(index, "xy")
    store(index, "abcd")
    assert contents(index) == "yxdcba"


@pytest.mark.parametrize("policy", ["LRU", "FIFO", "LFU"])
def test_where_the_middle_was_missing_it_leaves_after_the_tail(policy: str) -> None:
    index = make_index(8, policy=policy)
    plan = prepare(index, "abcd")
    for rank in (0, 1):
        index.complete_store(plan.plan_id, [rank], done=[0, 2, 3], failed=[1])
    assert contents(index) == "dca"
    assert names(store(index, "abcd").refs) == "b"
    assert contents(index) == {"LRU": "dcba", "FIFO": "dcab", "LFU": "bdca"}[policy]
    index.check_integrity()


def test_a_prompt_that_does_not_fit_stores_its_leading_run_without_evicting_its_own_head() -> None:
    index = make_index(5)
    store(index, "ab")
    store(index, "xy")
    plan = store(index, "abcdefg")
    assert (names(plan.refs), plan.positions) == ("cde", (2, 3, 4))
    assert (plan.num_ready, plan.num_refused) == (2, 2)
    assert names(plan.evicted) == "yx"
    assert index.lookup(keys_of("abcdefg")) == 5
    index.check_integrity()


def test_keys_of_the_request_behind_the_refused_one_are_not_evicted_for_it() -> None:
    index = make_index(3)
    plan = prepare(index, "abc")
    for rank in (0, 1):
        index.complete_store(plan.plan_id, [rank], done=[0, 2], failed=[1])
    store(index, "x")
    plan = prepare(index, "abzc")
    assert (names(plan.refs), names(plan.evicted), plan.num_refused) == ("b", "x", 2)


def test_when_everything_is_leased_or_being_written_nothing_is_stored_and_nothing_changes() -> None:
    index = make_index(4)
    store(index, "ab")
    index.pin(keys_of("ab"), "lease", "reader", now=0.0)
    prepare(index, "xy")
    before = list(index.entries())
    plan = prepare(index, "pq")
    assert (plan.refs, plan.evicted, plan.num_refused) == ((), (), 2)
    assert list(index.entries()) == before
    assert index.complete_store(plan.plan_id, [0], done=[]) is False


def test_a_leased_chunk_is_passed_over_until_its_lease_ends() -> None:
    index = make_index(4)
    store(index, "ab")
    store(index, "xy")
    index.pin(keys_of("ab"), "lease", "reader", now=0.0)
    index.lookup(keys_of("xy"))
    assert names(store(index, "pq").evicted) == "yx"
    index.release("lease")
    assert names(store(index, "rs").evicted) == "ba"


def test_storing_from_a_start_needs_the_head_before_it() -> None:
    index = make_index(8)
    plan = prepare(index, "abcd", start=2)
    assert (plan.refs, plan.num_refused) == ((), 0)
    head = prepare(index, "ab")
    assert names(prepare(index, "abcd", start=2).refs) == "cd"
    finish(index, head)
    assert names(prepare(index, "abcdef", start=5).refs) == ""
    with pytest.raises(InvalidRequestError, match="-1"):
        prepare(index, "ab", start=-1)


def test_one_failure_aborts_the_chunk_for_all_and_quarantines_its_slot_until_all_have_answered() -> None:
    index = make_index(2, holders=(0, 1, 2))
    plan = prepare(index, "ab")
    index.complete_store(plan.plan_id, [0], done=[0, 1])
    index.complete_store(plan.plan_id, [1], done=[1], failed=[0])
    assert contents(index, SlotState.WRITING) == "b"
    assert index.counts().quarantined == 1
    assert prepare(index, "c").refs == ()
    assert index.unsettled(2) == [plan.refs[0]] and index.unsettled(0) == index.unsettled(1) == []
    index.complete_store(plan.plan_id, [2], done=[0, 1])
    assert (index.counts().free, index.counts().ready, index.counts().plans) == (1, 1, 0)
    assert names(prepare(index, "c").refs) == "c"
    index.check_integrity()


def test_repeated_and_late_answers_change_nothing() -> None:
    index = make_index(2)
    plan = prepare(index, "ab")
    for _ in range(3):
        assert index.complete_store(plan.plan_id, [0], done=[0, 1]) is True
    index.complete_store(plan.plan_id, [0], done=[], failed=[0, 1])
    assert contents(index, SlotState.WRITING) == "ba"
    index.complete_store(plan.plan_id, [1], done=[0, 1])
    assert index.complete_store(plan.plan_id, [1], done=[], failed=[0]) is False
    assert index.lookup(keys_of("ab")) == 2
    assert index.complete_store(999, [0], done=[0]) is False


def test_a_stale_answer_does_not_touch_the_slots_next_use() -> None:
    index = make_index(1)
    old = prepare(index, "ab")
    assert names(old.refs) == "a"
    index.complete_store(old.plan_id, [0], done=[], failed=[0])
    index.settle(1, old.refs)
    new = prepare(index, "x")
    assert new.refs[0].slot == old.refs[0].slot
    index.complete_store(old.plan_id, [1], done=[0])
    assert index.settle(0, old.refs) == 0
    assert contents(index, SlotState.WRITING) == "x"
    index.check_integrity()


def test_an_open_plans_repeated_answers_do_not_touch_the_next_use_of_a_slot_it_gave_up() -> None:
    index = make_index(2)
    old = prepare(index, "ab")
    for rank in (0, 1):
        index.complete_store(old.plan_id, [rank], done=[], failed=[0])
    new = prepare(index, "x")
    assert new.refs[0].slot == old.refs[0].slot
    index.complete_store(old.plan_id, [0], done=[0])
    index.complete_store(old.plan_id, [1], done=[], failed=[0])
    index.check_integrity()
    index.abort_store(old.plan_id)
    assert contents(index, SlotState.WRITING) == "x"
    finish(index, new)
    assert contents(index) == "x" and index.counts().plans == 0
    index.check_integrity()


@pytest.mark.parametrize(
    ("rank", "done", "failed", "message"),
    [
        (7, [0], [], "rank 7.*0, 1"),
        (0, [0, 2], [], "chunks 0 to 1.*0 to 2"),
        (0, [-1], [], "chunks 0 to 1"),
        (0, [0], [5], "5"),
        (0, [0, 1], [1], "both done and failed"),
    ],
)
def test_an_impossible_answer_is_refused_and_nothing_is_taken_in(
    rank: int, done: list[int], failed: list[int], message: str
) -> None:
    index = make_index(2)
    plan = prepare(index, "ab")
    index.complete_store(plan.plan_id, [1], done=[0, 1])
    with pytest.raises(ProtocolError, match=message):
        index.complete_store(plan.plan_id, [rank], done=done, failed=failed)
    assert contents(index, SlotState.WRITING) == "ba"


def test_ranks_that_answer_alike_answer_at_once() -> None:
    index = make_index(3, holders=(0, 1, 2, 3))
    plan = prepare(index, "abc")
    index.complete_store(plan.plan_id, [0], done=[0], failed=[2])
    index.complete_store(plan.plan_id, [0, 1, 2], done=[0, 1], failed=[2])
    assert contents(index) == ""
    assert index.unsettled(3) == [plan.refs[2]] and index.unsettled(1) == []
    index.check_integrity()
    index.complete_store(plan.plan_id, [1, 3], done=[0, 1, 2])
    assert contents(index) == "ba"
    assert (index.counts().free, index.counts().plans) == (1, 0)
    index.check_integrity()


def test_a_rank_that_has_no_part_spoils_the_answer_of_those_beside_it() -> None:
    index = make_index(2)
    plan = index.prepare_store(keys_of("ab"), client="writer", now=0.0, rank=1)
    with pytest.raises(ProtocolError, match="rank 0 has no part"):
        index.complete_store(plan.plan_id, [1, 0], done=[0, 1])
    assert index.complete_store(plan.plan_id, [1], done=[0, 1]) is True
    index.check_integrity()


def test_abort_frees_at_once_what_was_not_answered() -> None:
    index = make_index(4)
    plan = prepare(index, "abc")
    index.complete_store(plan.plan_id, [0], done=[0, 1])
    index.complete_store(plan.plan_id, [1], done=[0])
    assert index.abort_store(plan.plan_id) is True
    assert contents(index) == "a"
    assert (index.counts().free, index.counts().plans) == (3, 0)
    assert index.abort_store(plan.plan_id) is False
    index.check_integrity()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 0}, "num_slots=0"),
        ({"holders": []}, "holders"),
        ({"holders": [0, 0]}, r"holders.*\[0, 0\]"),
        ({"holders": [-1]}, "holders"),
        ({"epoch": 1 << 22}, "epoch"),
        ({"call_timeout_s": 0.0}, "call_timeout_s"),
        ({"lease_timeout_s": float("nan")}, "lease_timeout_s"),
    ],
)
def test_an_impossible_index_is_refused(changes: dict[str, object], message: str) -> None:
    arguments = {"num_slots": 1, "holders": [0], "epoch": 0, "call_timeout_s": 1.0, "lease_timeout_s": 1.0} | changes
    with pytest.raises(ConfigError, match=message):
        CacheIndex(policy=make_policy("LRU"), **arguments)  # type: ignore[arg-type]
