"""Clearing: gone for lookups at once, free for others only when every rank has forgotten it."""

import pytest

from lmcache_ray.errors import ProtocolError
from lmcache_ray.index.plans import ChunkRef
from tests.unit.index_builders import contents, finish, keys_of, make_index, names, store


def test_cleared_chunks_are_unknown_at_once_and_free_when_every_holder_has_answered() -> None:
    index = make_index(3)
    stored = store(index, "abc")
    plan = index.prepare_clear()
    assert sorted(plan.refs) == sorted(stored.refs) and plan.num_kept == 0
    assert index.lookup(keys_of("abc")) == 0
    assert store(index, "a").num_refused == 1
    assert index.complete_clear(plan.plan_id, 0) is True
    assert index.complete_clear(plan.plan_id, 0) is True
    assert (index.counts().quarantined, index.counts().plans) == (3, 1)
    index.check_integrity()
    assert index.complete_clear(plan.plan_id, 1) is True
    assert (index.counts().free, index.counts().plans) == (3, 0)
    assert index.complete_clear(plan.plan_id, 1) is False
    assert names(store(index, "abc").refs) == "abc"


def test_given_keys_only_those_are_cleared_and_unknown_ones_are_ignored() -> None:
    index = make_index(8)
    store(index, "abcd")
    plan = index.prepare_clear(keys_of("cczd"))
    assert names(plan.refs) == "cd"
    assert contents(index) == "ba"


def test_leased_chunks_are_kept_and_counted() -> None:
    index = make_index(8)
    store(index, "abc")
    index.pin(keys_of("ab"), "lease", "reader", now=0.0)
    plan = index.prepare_clear()
    assert (names(plan.refs), plan.num_kept) == ("c", 2)
    assert index.lookup(keys_of("abc")) == 2


def test_what_is_being_written_does_not_appear_after_the_clear() -> None:
    index = make_index(4)
    store(index, "a")
    writing = index.prepare_store(keys_of("abc"), client="writer", now=0.0)
    index.complete_store(writing.plan_id, [0], done=[0])
    plan = index.prepare_clear()
    assert (names(plan.refs), plan.num_kept) == ("a", 0)
    assert plan.aborted == writing.refs
    for rank in (0, 1):
        index.complete_clear(plan.plan_id, rank)
    assert names(index.unsettled(0)) == "c" and names(index.unsettled(1)) == "bc"
    index.check_integrity()
    finish(index, writing)
    assert index.lookup(keys_of("abc")) == 0
    assert (index.counts().free, index.counts().plans) == (4, 0)


def test_a_store_plan_cannot_answer_for_a_clear() -> None:
    index = make_index(4)
    storing = index.prepare_store(keys_of("ab"), client="writer", now=0.0)
    for rank in (0, 1):
        index.complete_store(storing.plan_id, [rank], done=[0])
    plan = index.prepare_clear(keys_of("a"))
    index.check_integrity()
    index.complete_store(storing.plan_id, [0], done=[0])
    index.complete_store(storing.plan_id, [1], done=[], failed=[0])
    index.check_integrity()
    index.abort_store(storing.plan_id)
    assert index.unsettled(0) == index.unsettled(1) == list(plan.refs)
    assert (index.counts().quarantined, index.counts().plans) == (1, 1)
    index.check_integrity()


def test_an_empty_clear_is_finished() -> None:
    index = make_index(4)
    plan = index.prepare_clear()
    assert plan.refs == () and index.counts().plans == 0
    assert index.complete_clear(plan.plan_id, 0) is False


def test_a_rank_that_was_absent_settles_what_it_was_to_clear() -> None:
    index = make_index(4)
    store(index, "ab")
    first, second = index.prepare_clear(keys_of("a")), index.prepare_clear(keys_of("b"))
    for plan in (first, second):
        index.complete_clear(plan.plan_id, 0)
    assert sorted(index.unsettled(1)) == sorted(first.refs + second.refs)
    index.settle(1, first.refs)
    assert (index.counts().free, index.counts().plans) == (3, 1)
    index.check_integrity()
    index.settle(1, index.unsettled(1))
    assert (index.counts().free, index.counts().plans) == (4, 0)


def test_only_holders_clear() -> None:
    index = make_index(4)
    store(index, "a")
    plan = index.prepare_clear()
    with pytest.raises(ProtocolError, match="rank 5 holds no chunks"):
        index.complete_clear(plan.plan_id, 5)
    with pytest.raises(ProtocolError, match="slot 4"):
        index.settle(0, [ChunkRef(b"a", 4, 1)])
