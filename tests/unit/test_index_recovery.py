"""What an index becomes after the coordinator or a rank has died: chunks that all holders have alike, no others."""

from collections.abc import Iterable

import pytest

from lmcache_ray.index.arena_report import ArenaReport, ViewedSlots
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import ChunkRef, StorePlan
from lmcache_ray.index.policy import make_policy
from lmcache_ray.index.recovery import (
    UNKNOWN_KEY,
    Rebuilt,
    leave_out,
    rebuild,
    rejoin,
    restore,
    settle_returned,
)
from lmcache_ray.index.slot_table import COUNTER_BITS, SlotState

NUM_SLOTS = 8
FIRST = (1 << COUNTER_BITS) + 1


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def ref(number: int, slot: int, generation: int) -> ChunkRef:
    return ChunkRef(key(number), slot, FIRST + generation)


def make_index(epoch: int, holders: tuple[int, ...] = (0, 1)) -> CacheIndex:
    return CacheIndex(NUM_SLOTS, holders, make_policy("LRU"), epoch=epoch, call_timeout_s=10, lease_timeout_s=100)


def rebuilt_of(*reports: ArenaReport, cleared: Iterable[ChunkRef] = ()) -> Rebuilt:
    return rebuild(dict(enumerate(reports)), is_cleared=set(cleared).__contains__)


def stored(index: CacheIndex, *numbers: int) -> StorePlan:
    """A store that every holder has carried out."""
    plan = index.prepare_store([key(number) for number in numbers], client="driver", now=0.0)
    index.complete_store(plan.plan_id, index.holders, done=range(len(plan.refs)))
    index.check_integrity()
    return plan


# -- the coordinator returns ------------------------------------------------------------------------------------------


def test_only_what_all_holders_have_alike_is_kept() -> None:
    same = ref(1, 0, 0)
    a = ArenaReport(committed=(same, ref(2, 1, 1), ref(3, 2, 2), ref(4, 3, 3)))
    b = ArenaReport(committed=(same, ref(2, 4, 1), ref(3, 2, 9), ref(5, 3, 3)))
    rebuilt = rebuilt_of(a, b)
    assert rebuilt.kept == (same,)
    assert set(rebuilt.useless[0]) == set(a.committed) - {same} and set(rebuilt.useless[1]) == set(b.committed) - {same}


def test_of_a_key_in_two_slots_the_newer_is_kept() -> None:
    old, new = ref(1, 0, 0), ref(1, 5, 7)
    rebuilt = rebuilt_of(ArenaReport(committed=(new, old)), ArenaReport(committed=(old, new)))
    assert rebuilt.kept == (new,) and rebuilt.useless == {0: (old,), 1: (old,)}


def test_what_was_cleared_while_a_rank_was_away_does_not_come_back() -> None:
    gone, kept = ref(1, 0, 0), ref(2, 1, 1)
    rebuilt = rebuilt_of(ArenaReport(committed=(gone, kept)), cleared=[gone])
    assert rebuilt.kept == (kept,) and rebuilt.useless == {0: (gone,)}


def test_a_restored_index_evicts_the_oldest_first_and_issues_newer_generations() -> None:
    refs = tuple(ref(number, NUM_SLOTS - 1 - number, number) for number in range(6))
    report = ArenaReport(committed=refs)
    index = make_index(epoch=2)
    restore(index, rebuilt_of(report, report), now=0.0)
    index.check_integrity()
    assert [found for found, _ in index.entries()] == list(refs)
    plan = stored(index, 100, 101, 102)
    assert [found.key for found in plan.evicted] == [key(0)]
    assert min(found.generation for found in plan.refs) > max(found.generation for found in refs)
    assert index.lookup([key(number) for number in range(1, 6)]) == 5


def test_a_slot_that_somebody_may_still_write_is_used_only_after_the_ranks_that_said_so_have_settled_it() -> None:
    busy = (3, FIRST + 4)
    index = make_index(epoch=2)
    rebuilt = rebuilt_of(ArenaReport(unfinished=(busy,)), ArenaReport(unfinished=((3, FIRST + 9),)))
    restore(index, rebuilt, now=0.0)
    index.check_integrity()
    assert index.counts().quarantined == 1 and index.counts().free == NUM_SLOTS - 1
    owed = ChunkRef(UNKNOWN_KEY, 3, FIRST + 9)
    assert index.unsettled(0) == index.unsettled(1) == [owed]
    assert len(index.prepare_store([key(n) for n in range(20)], client="c", now=0.0).refs) == NUM_SLOTS - 1
    index.settle(0, [owed])
    assert index.counts().quarantined == 1
    index.settle(1, [owed])
    index.check_integrity()
    assert index.counts().quarantined == 0 and index.counts().free == 1


def test_views_hold_their_slots_again_until_their_client_ends() -> None:
    refs = tuple(ref(number, number, number) for number in range(NUM_SLOTS))
    shown = ViewedSlots("client", "lease", tuple((found.slot, found.generation) for found in refs[:2]))
    report = ArenaReport(committed=refs, viewed=(shown,))
    index = make_index(epoch=2, holders=(0,))
    restore(index, rebuilt_of(report), now=0.0)
    index.expire(1e9)
    plan = index.prepare_store([key(n) for n in range(50, 70)], client="c", now=0.0)
    assert {found.slot for found in plan.evicted} == set(range(2, NUM_SLOTS))
    index.drop_client("client")
    index.check_integrity()
    assert index.counts().leases == 0


def test_a_viewed_chunk_that_another_rank_lacks_stays_in_place_and_is_found_by_nobody() -> None:
    lonely = ref(1, 0, 0)
    shown = ViewedSlots("client", "lease", ((lonely.slot, lonely.generation),))
    index = make_index(epoch=2)
    rebuilt = rebuilt_of(ArenaReport(committed=(lonely,), viewed=(shown,)), ArenaReport())
    assert rebuilt.useless[0] == (), "its bytes stay where they are"
    restore(index, rebuilt, now=0.0)
    index.check_integrity()
    assert index.lookup([lonely.key]) == 0
    plan = index.prepare_store([key(n) for n in range(20)], client="c", now=0.0)
    assert lonely.slot not in {found.slot for found in plan.refs}
    index.release("lease")
    assert index.counts().leases == 0


def test_what_is_cleared_while_the_ranks_free_the_rest_is_left_out_but_stays_for_those_who_look_at_it() -> None:
    gone, looked_at, kept = ref(1, 0, 0), ref(2, 1, 1), ref(3, 2, 2)
    shown = ViewedSlots("client", "lease", ((looked_at.slot, looked_at.generation),))
    rebuilt = rebuilt_of(ArenaReport(committed=(gone, looked_at, kept), viewed=(shown,)))
    assert set(rebuilt.kept) == {gone, looked_at, kept}
    index = make_index(epoch=2, holders=(0,))
    restore(index, leave_out(rebuilt, {gone, looked_at}.__contains__), now=0.0)
    index.check_integrity()
    assert [index.lookup([one.key]) for one in (gone, looked_at, kept)] == [0, 0, 1]
    plan = index.prepare_store([key(n) for n in range(50, 70)], client="c", now=0.0)
    assert looked_at.slot not in {found.slot for found in plan.refs}


# -- a rank returns ---------------------------------------------------------------------------------------------------


def test_a_rank_that_has_everything_changes_nothing() -> None:
    index = make_index(epoch=1)
    refs = stored(index, 1, 2).refs
    assert rejoin(index, 1, ArenaReport(committed=refs)).lost == ()
    assert index.lookup([key(1), key(2)]) == 2


def test_what_a_returned_rank_lacks_is_cached_no_more_even_if_leased() -> None:
    index = make_index(epoch=1)
    refs = stored(index, 1, 2, 3).refs
    index.pin([key(1), key(2), key(3)], "lease", "driver", 0.0)
    rejoined = rejoin(index, 1, ArenaReport(committed=(refs[0], refs[2])))
    index.check_integrity()
    assert rejoined.lost == (refs[1],)
    assert index.lookup([key(1), key(2), key(3)]) == 1 and index.lookup([key(3)]) == 1


def test_a_view_outlives_the_chunk_that_another_rank_has_lost() -> None:
    index = make_index(epoch=1)
    refs = stored(index, 1).refs
    plan = index.prepare_load([key(1)], lease_id="view", client="driver", now=0.0)
    assert plan.refs == refs and index.keep("view", max_slots=6)
    rejoin(index, 1, ArenaReport())
    index.check_integrity()
    assert index.lookup([key(1)]) == 0
    store = index.prepare_store([key(n) for n in range(50, 70)], client="c", now=0.0)
    assert refs[0].slot not in {found.slot for found in store.refs}


@pytest.mark.parametrize("has_committed", [True, False])
def test_a_write_counts_if_the_rank_had_committed_it_before_it_died(has_committed: bool) -> None:
    index = make_index(epoch=1)
    plan = index.prepare_store([key(1)], client="driver", now=0.0)
    index.complete_store(plan.plan_id, [0], done=[0])
    rejoined = rejoin(index, 1, ArenaReport(committed=plan.refs if has_committed else ()))
    assert rejoined.useless == ()
    settle_returned(index, 1, ())
    index.check_integrity()
    assert index.lookup([key(1)]) == int(has_committed)
    assert index.counts().plans == index.counts().quarantined == index.counts().writing == 0


def test_the_others_have_still_to_answer_for_a_write_that_the_returned_rank_has_committed() -> None:
    index = make_index(epoch=1)
    plan = index.prepare_store([key(1)], client="driver", now=0.0)
    rejoined = rejoin(index, 1, ArenaReport(committed=plan.refs))
    settle_returned(index, 1, ())
    assert rejoined.useless == () and index.lookup([key(1)]) == 0
    index.complete_store(plan.plan_id, [0], done=[0])
    assert index.lookup([key(1)]) == 1
    index.check_integrity()


def test_a_slot_with_another_writer_is_not_settled_by_the_ranks_return() -> None:
    index = make_index(epoch=1)
    plan = index.prepare_store([key(1)], client="driver", now=0.0)
    (slot, generation) = plan.refs[0][1:]
    rejoin(index, 1, ArenaReport(unfinished=((slot, generation),)))
    settle_returned(index, 1, ((slot, generation),))
    index.abort_store(plan.plan_id)
    index.check_integrity()
    assert index.counts().plans == 0


def test_a_clear_during_its_absence_is_complete_when_the_rank_has_freed_what_it_held() -> None:
    index = make_index(epoch=1)
    refs = stored(index, 1, 2).refs
    clear = index.prepare_clear()
    index.complete_clear(clear.plan_id, 0)
    assert index.counts().quarantined == 2
    rejoined = rejoin(index, 1, ArenaReport(committed=refs))
    assert rejoined.useless == refs and rejoined.lost == ()
    settle_returned(index, 1, ())
    index.check_integrity()
    assert index.counts().free == NUM_SLOTS and index.counts().plans == 0
    assert not any(state is SlotState.READY for _, state in index.entries())
