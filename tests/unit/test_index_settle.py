"""What others left behind: plans past their deadline, lost clients, and slots that wait to be settled."""

from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import Expired, StorePlan
from tests.unit.index_builders import contents, finish, keys_of, make_index, names, store


def prepare(index: CacheIndex, text: str, client: str = "writer", now: float = 0.0) -> StorePlan:
    return index.prepare_store(keys_of(text), client=client, now=now)


def test_past_its_deadline_a_plan_is_aborted_but_its_slots_wait_for_the_writers() -> None:
    index = make_index(2)
    plan = prepare(index, "ab", now=5.0)
    index.complete_store(plan.plan_id, [0], done=[0, 1])
    index.complete_store(plan.plan_id, [1], done=[0])
    assert index.expire(14.9) == Expired((), (), ())
    assert index.expire(15.0) == Expired((), (plan.plan_id,), (plan.refs[1],))
    assert index.expire(99.0) == Expired((), (), ())
    assert contents(index) == "a"
    assert index.unsettled(0) == [] and index.unsettled(1) == [plan.refs[1]]
    assert prepare(index, "xy", now=99.0).num_refused == 1
    index.check_integrity()


def test_a_late_commit_frees_and_makes_nothing_ready() -> None:
    index = make_index(2)
    plan = prepare(index, "ab")
    index.expire(10.0)
    index.complete_store(plan.plan_id, [0], done=[0, 1])
    assert index.counts().quarantined == 2
    assert index.complete_store(plan.plan_id, [1], done=[0], failed=[1]) is True
    assert index.lookup(keys_of("ab")) == 0
    assert (index.counts().free, index.counts().plans) == (2, 0)
    assert index.complete_store(plan.plan_id, [1], done=[0]) is False


def test_plans_end_each_at_its_own_time() -> None:
    index = make_index(8)
    first, second = prepare(index, "a", now=0.0), prepare(index, "b", now=3.0)
    assert index.expire(10.0).plan_ids == (first.plan_id,)
    third = prepare(index, "c", now=10.0)
    assert index.expire(13.0).plan_ids == (second.plan_id,)
    assert index.expire(20.0).plan_ids == (third.plan_id,)


def test_settling_frees_a_slot_when_the_last_rank_has_proven_that_it_does_not_write() -> None:
    index = make_index(4)
    plan = prepare(index, "ab")
    index.expire(10.0)
    assert index.settle(0, index.unsettled(0)) == 2
    assert index.counts().quarantined == 2
    assert index.settle(0, plan.refs) == 0
    assert index.settle(1, plan.refs[:1]) == 1
    assert index.counts().quarantined == 1
    assert index.settle(1, index.unsettled(1)) == 1
    assert (index.counts().free, index.counts().plans) == (4, 0)
    index.check_integrity()


def test_settling_a_chunk_that_is_being_written_aborts_it() -> None:
    index = make_index(4)
    plan = prepare(index, "ab")
    index.complete_store(plan.plan_id, [0], done=[0])
    assert index.settle(0, plan.refs) == 1
    assert names(index.unsettled(1)) == "b"
    index.complete_store(plan.plan_id, [1], done=[0, 1])
    assert contents(index) == "a" and index.counts().free == 3
    index.check_integrity()


def test_settling_does_not_touch_what_is_ready_or_used_again() -> None:
    index = make_index(1)
    old = store(index, "a")
    assert index.settle(0, old.refs) == 0
    new = store(index, "b")
    assert index.settle(0, [*old.refs, *new.refs]) == 0
    assert contents(index) == "b"


def test_a_lost_client_leaves_no_lease_and_no_half_written_chunk() -> None:
    index = make_index(8)
    store(index, "ab")
    index.pin(keys_of("ab"), "mine", "lost", now=0.0)
    index.pin(keys_of("a"), "yours", "alive", now=0.0)
    lost, alive = prepare(index, "cd", "lost"), prepare(index, "xy", "alive")
    index.complete_store(lost.plan_id, [0], done=[0])
    dropped = index.drop_client("lost")
    assert dropped == Expired(("mine",), (lost.plan_id,), lost.refs)
    assert index.drop_client("lost") == Expired((), (), ())
    assert names(index.unsettled(0)) == "d" and names(index.unsettled(1)) == "cd"
    finish(index, alive)
    assert index.lookup(keys_of("xy")) == 2
    for rank in (0, 1):
        index.settle(rank, index.unsettled(rank))
    assert (index.counts().free, index.counts().plans, index.counts().leases) == (4, 0, 1)
    index.check_integrity()
