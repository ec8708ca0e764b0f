"""Storing where every rank asks for itself: the first opens the writes, the others join them by key."""

import pytest

from lmcache_ray.errors import ProtocolError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import StorePlan
from lmcache_ray.index.slot_table import SlotState
from tests.unit.index_builders import contents, keys_of, make_index, names, store


def prepare(index: CacheIndex, text: str, rank: int, now: float = 0.0) -> StorePlan:
    return index.prepare_store(keys_of(text), client=f"rank {rank}", now=now, rank=rank)


def commit(index: CacheIndex, plan: StorePlan, rank: int) -> None:
    index.complete_store(plan.plan_id, [rank], done=range(len(plan.refs)))


def test_ranks_get_the_same_slots_and_generations_and_a_chunk_waits_for_all_of_them() -> None:
    index = make_index(8, holders=(0, 1, 2))
    plans = {rank: prepare(index, "abc", rank) for rank in (1, 0)}
    assert plans[0].refs == plans[1].refs and plans[0].positions == (0, 1, 2)
    commit(index, plans[1], 1)
    commit(index, plans[0], 0)
    assert index.lookup(keys_of("abc")) == 0
    index.check_integrity()
    plans[2] = prepare(index, "abc", 2)
    assert plans[2].refs == plans[0].refs
    commit(index, plans[2], 2)
    assert index.lookup(keys_of("abc")) == 3
    assert index.counts().plans == 0
    index.check_integrity()


def test_a_rank_is_handed_a_chunk_once() -> None:
    index = make_index(8)
    first = prepare(index, "ab", 0)
    assert prepare(index, "ab", 0).refs == ()
    commit(index, first, 0)
    assert prepare(index, "ab", 0).refs == ()
    assert names(prepare(index, "abc", 0).refs) == "c"


def test_a_joining_plan_mixes_joined_and_new_chunks_in_key_order() -> None:
    index = make_index(8)
    store(index, "a")
    prepare(index, "acb", 0)
    plan = prepare(index, "axbycz", 1)
    assert (names(plan.refs), plan.positions) == ("xbycz", (1, 2, 3, 4, 5))
    index.check_integrity()


def test_a_joining_plan_ends_where_a_new_key_finds_no_room() -> None:
    index = make_index(3)
    prepare(index, "abd", 0)
    plan = prepare(index, "abcd", 1)
    assert (names(plan.refs), plan.num_refused) == ("ab", 2)
    assert names(prepare(index, "abd", 1).refs) == "d"
    index.check_integrity()


def test_a_joining_plan_begins_at_its_start() -> None:
    index = make_index(8)
    prepare(index, "abc", 0)
    plan = index.prepare_store(keys_of("abcd"), client="rank 1", now=0.0, rank=1, start=2)
    assert (names(plan.refs), plan.positions) == ("cd", (2, 3))
    assert names(prepare(index, "abcd", 1).refs) == "ab"


def test_what_a_driver_led_plan_writes_is_not_joined() -> None:
    index = make_index(8)
    index.prepare_store(keys_of("ab"), client="driver", now=0.0)
    assert names(prepare(index, "abc", 0).refs) == "c"
    assert index.prepare_store(keys_of("abc"), client="driver", now=0.0).refs == ()


def test_a_rank_that_holds_no_chunks_gets_an_empty_plan_and_uses_nothing() -> None:
    index = make_index(8, holders=(0,))
    store(index, "ab")
    store(index, "xy")
    plan = prepare(index, "abc", 3)
    assert (plan.refs, plan.num_ready, plan.num_refused) == ((), 2, 0)
    assert contents(index) == "bayx"


def test_a_single_holder_is_ready_by_itself() -> None:
    index = make_index(8, holders=(0,))
    commit(index, prepare(index, "ab", 0), 0)
    assert index.lookup(keys_of("ab")) == 2


def test_a_failure_before_others_join_frees_the_slot_at_once() -> None:
    index = make_index(8)
    plan = prepare(index, "ab", 0)
    index.complete_store(plan.plan_id, [0], done=[0], failed=[1])
    assert contents(index, SlotState.WRITING) == "a"
    assert index.counts().free == 7 and index.counts().quarantined == 0
    other = prepare(index, "ab", 1)
    assert names(other.refs) == "ab" and other.refs[1] != plan.refs[1]
    index.check_integrity()


def test_a_failure_after_others_joined_waits_for_those_only() -> None:
    index = make_index(8, holders=(0, 1, 2))
    plans = [prepare(index, "a", rank) for rank in (0, 1)]
    index.complete_store(plans[0].plan_id, [0], done=[], failed=[0])
    assert index.counts().quarantined == 1
    assert index.unsettled(1) == list(plans[0].refs) and index.unsettled(2) == []
    commit(index, plans[1], 1)
    assert (index.counts().free, index.counts().plans) == (8, 0)


def test_a_rank_cannot_answer_for_another_ranks_plan() -> None:
    index = make_index(8)
    plan = prepare(index, "a", 0)
    with pytest.raises(ProtocolError, match="rank 1 has no part"):
        index.complete_store(plan.plan_id, [1], done=[0])


def test_chunks_that_nobody_else_joins_expire_and_are_free_at_once() -> None:
    index = make_index(8)
    plan = prepare(index, "ab", 0)
    commit(index, plan, 0)
    assert index.expire(9.9).aborted == ()
    expired = index.expire(10.0)
    assert expired.plan_ids == (plan.plan_id,) and expired.aborted == plan.refs
    assert (index.counts().free, index.counts().plans) == (8, 0)
    index.check_integrity()


def test_the_openers_deadline_ends_the_write_for_those_who_joined_late() -> None:
    index = make_index(8)
    opened = prepare(index, "a", 0, now=0.0)
    joined = prepare(index, "a", 1, now=9.0)
    commit(index, opened, 0)
    assert index.expire(10.0).aborted == opened.refs
    assert index.unsettled(1) == list(joined.refs)
    index.check_integrity()
    commit(index, joined, 1)
    assert index.lookup(keys_of("a")) == 0
    assert (index.counts().free, index.counts().plans) == (8, 0)


def test_a_joiner_that_is_lost_takes_down_only_what_it_owes() -> None:
    index = make_index(8)
    opened = prepare(index, "ab", 0)
    joined = prepare(index, "ab", 1)
    index.complete_store(joined.plan_id, [1], done=[0])
    dropped = index.drop_client("rank 1")
    assert names(dropped.aborted) == "b" and dropped.plan_ids == (joined.plan_id,)
    commit(index, opened, 0)
    assert index.lookup(keys_of("ab")) == 1
    assert index.settle(1, index.unsettled(1)) == 1
    assert (index.counts().free, index.counts().plans) == (7, 0)
    index.check_integrity()


def test_abort_takes_back_only_the_ranks_own_part() -> None:
    index = make_index(8)
    opened = prepare(index, "ab", 0)
    joined = prepare(index, "ab", 1)
    index.complete_store(opened.plan_id, [0], done=[0])
    index.abort_store(opened.plan_id)
    assert contents(index, SlotState.WRITING) == "a"
    assert names(index.unsettled(1)) == "b"
    commit(index, joined, 1)
    assert contents(index) == "a" and index.counts().free == 7
    index.check_integrity()
