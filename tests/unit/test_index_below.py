"""What an index does for tiers below it: takes in earlier chunks, tells what is READY, holds back, stores whole."""

import pytest

from lmcache_ray.errors import ProtocolError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import ChunkRef, Deferred, StorePlan
from lmcache_ray.index.policy import POLICIES
from lmcache_ray.index.slot_table import COUNTER_BITS
from lmcache_ray.index.store_planning import TiersBelow
from tests.unit.index_builders import contents, finish, keys_of, make_index, names, store

EPOCH = 3


def earlier(text: str, epoch: int = EPOCH - 1) -> list[tuple[bytes, int]]:
    """Chunks of an earlier life, the least recently used first."""
    return [(key, (epoch << COUNTER_BITS) + number) for number, key in enumerate(keys_of(text), start=1)]


class Below:
    """A tier below, as a test wants it to be."""

    def __init__(self) -> None:
        self.held_back: set[int] = set()
        self.keys: set[bytes] = set()

    def index(self, num_slots: int) -> CacheIndex:
        return make_index(num_slots, below=TiersBelow(self.held_back, self.keys.__contains__))


def try_store(index: CacheIndex, text: str, **wishes: bool) -> StorePlan | Deferred:
    return index.try_store(keys_of(text), client="writer", now=0.0, **wishes)


# -- adopt ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_chunks_of_an_earlier_life_are_cached_under_their_generations(policy: str) -> None:
    index = make_index(4, policy=policy, epoch=EPOCH)
    assert index.adopt(earlier("cba")) == []
    index.check_integrity()
    assert (index.lookup(keys_of("abcd"), touch=False), contents(index)) == (3, "cba")
    generations = {ref.key: ref.generation for ref, _ in index.entries()}
    assert generations == dict(earlier("cba"))


@pytest.mark.parametrize("policy", POLICIES)
def test_of_what_does_not_fit_the_oldest_are_left_out(policy: str) -> None:
    index = make_index(3, policy=policy, epoch=EPOCH)
    assert index.adopt(earlier("abcde")) == [0, 1]
    assert contents(index) == "cde"
    assert index.adopt(earlier("xy", epoch=1)) == [0, 1], "there is no room at all"
    index.check_integrity()


def test_of_a_key_that_comes_twice_the_newest_counts() -> None:
    index = make_index(4, epoch=EPOCH)
    found = [*earlier("ab", epoch=1), *earlier("a", epoch=2)]
    assert index.adopt(found) == [0]
    assert index.table.ready_ref(b"a") == ChunkRef(b"a", 1, found[2][1])
    assert index.adopt([(b"a", 1)]) == [0], "it is there already"
    index.check_integrity()


def test_the_adopted_are_evicted_leased_and_cleared_as_all_others_are() -> None:
    index = make_index(3, epoch=EPOCH)
    index.adopt(earlier("cba"))
    assert index.pin(keys_of("a"), "l", "reader", now=0.0) == 1
    assert names(store(index, "xy").evicted) == "cb"
    assert index.prepare_clear(None).num_kept == 1
    index.release("l")
    assert names(index.prepare_clear(keys_of("a")).refs) == "a"
    index.check_integrity()


def test_new_generations_are_above_all_adopted_ones() -> None:
    index = make_index(3, epoch=EPOCH)
    index.adopt(earlier("a"))
    assert store(index, "b").refs[0].generation > earlier("a")[0][1]


def test_a_generation_that_could_be_issued_again_is_refused_and_nothing_is_taken_in() -> None:
    index = make_index(3, epoch=EPOCH)
    with pytest.raises(ProtocolError, match="is of no earlier life"):
        index.adopt([*earlier("a"), (b"b", (EPOCH << COUNTER_BITS) + 7)])
    index.check_integrity()
    assert (contents(index), index.counts().free) == ("", 3)


def test_nothing_can_be_adopted() -> None:
    index = make_index(3, epoch=EPOCH)
    assert index.adopt([]) == [] and index.counts().free == 3


# -- evict ------------------------------------------------------------------------------------------------------------


def test_given_chunks_can_be_forgotten_at_once() -> None:
    index = make_index(4)
    refs = store(index, "abcd").refs
    assert names(index.evict(refs[1:3])) == "bc"
    assert (contents(index), index.counts().free) == ("da", 2)
    assert index.evict(refs[1:3]) == [], "they are gone already"
    index.check_integrity()


def test_only_the_very_use_of_a_slot_is_forgotten() -> None:
    index = make_index(1)
    (old,) = store(index, "a").refs
    store(index, "b")
    assert index.evict([old]) == [] and contents(index) == "b"


def test_what_is_leased_or_being_written_is_not_forgotten() -> None:
    index = make_index(4)
    ready = store(index, "ab").refs
    index.pin(keys_of("a"), "l", "reader", now=0.0)
    writing = index.prepare_store(keys_of("c"), client="writer", now=0.0).refs
    assert names(index.evict([*ready, *writing])) == "b"
    assert names(index.evict([*ready, *writing], even_leased=True)) == "a"
    assert index.counts().leases == 0, "it held nothing else"
    index.check_integrity()


def test_leases_go_on_without_what_is_forgotten() -> None:
    index = make_index(4)
    refs = store(index, "abc").refs
    index.pin(keys_of("abc"), "all", "reader", now=0.0)
    index.pin(keys_of("a"), "head", "reader", now=0.0)
    index.pin(keys_of("ab"), "kept", "reader", now=0.0)
    assert index.keep("kept", max_slots=2)
    index.evict(refs[:1], even_leased=True)
    index.check_integrity()
    assert (index.counts().leases, index.kept()) == (2, (1, 1))
    assert names(store(index, "xy").refs) == "xy", "the slot is anybody's now"
    assert index.release("kept") and index.release("all") and not index.release("head")
    index.check_integrity()


# -- hold -------------------------------------------------------------------------------------------------------------


def test_ready_chunks_are_held_wherever_they_stand_and_that_is_no_use_of_them() -> None:
    index = make_index(4)
    store(index, "ab")
    store(index, "cd")
    index.prepare_clear(keys_of("b"))
    before = contents(index)
    index.hold(keys_of("abcx"), "l", "reader", now=0.0)
    assert contents(index) == before
    assert names(store(index, "xyz").evicted) == "d", "a and c are held"
    index.check_integrity()


def test_a_hold_lasts_its_own_time_and_replaces_the_lease_of_its_name() -> None:
    index = make_index(4)
    store(index, "ab")
    index.hold(keys_of("ab"), "l", "reader", now=0.0)
    assert index.expire(99.0).lease_ids == ()
    index.hold(keys_of("a"), "l", "reader", now=99.0, timeout_s=1.0)
    assert index.expire(99.9).lease_ids == () and index.expire(100.0).lease_ids == ("l",)
    index.hold(keys_of("ab"), "l", "reader", now=100.0)
    index.hold([], "l", "reader", now=100.0)
    assert index.counts().leases == 0


# -- what is newly READY ----------------------------------------------------------------------------------------------


def test_what_has_become_ready_is_told_once_and_in_order() -> None:
    index = Below().index(8)
    first = index.prepare_store(keys_of("ab"), client="writer", now=0.0)
    second = index.prepare_store(keys_of("cd"), client="writer", now=0.0)
    index.complete_store(first.plan_id, [0], done=[0, 1])
    assert index.table.take_newly_ready() == []
    finish(index, second)
    index.complete_store(first.plan_id, [1], done=[1], failed=[0])
    assert names(index.table.take_newly_ready()) == "cdb"
    assert index.table.take_newly_ready() == []


def test_what_is_not_there_any_more_is_not_told() -> None:
    index = Below().index(4)
    plan = store(index, "abc")
    index.evict(plan.refs[:1])
    index.prepare_clear(keys_of("b"))
    assert names(index.table.take_newly_ready()) == "c"


def test_adopted_chunks_are_not_news() -> None:
    index = make_index(4, epoch=EPOCH, below=TiersBelow((), lambda key: False))
    index.adopt(earlier("ab"))
    assert index.table.take_newly_ready() == []


# -- stores over a tier below -----------------------------------------------------------------------------------------


def test_what_is_held_back_is_no_victim() -> None:
    below = Below()
    index = below.index(3)
    refs = store(index, "abc").refs
    below.held_back.update(ref.slot for ref in refs[1:])
    plan = store(index, "xyz")
    assert (names(plan.evicted), plan.num_refused) == ("a", 2)
    below.held_back.clear()
    assert names(store(index, "yz").evicted) == "cb"


def test_a_deferring_store_waits_for_what_is_held_back() -> None:
    below = Below()
    index = below.index(2)
    below.held_back.update(ref.slot for ref in store(index, "ab").refs)
    assert try_store(index, "x", defer=True) is Deferred.ROOM_IN_USE


def test_what_is_below_is_not_stored_unless_it_is_wanted_here_too() -> None:
    below = Below()
    index = below.index(4)
    below.keys.update(keys_of("ac"))
    plan = try_store(index, "abcd")
    assert isinstance(plan, StorePlan) and (names(plan.refs), plan.positions, plan.num_ready) == ("bd", (1, 3), 0)
    index.abort_store(plan.plan_id)
    plan = try_store(index, "abcd", copy_up=True)
    assert isinstance(plan, StorePlan) and names(plan.refs) == "abcd"


def test_a_store_that_must_be_whole_is_deferred_without_a_trace() -> None:
    below = Below()
    index = below.index(3)
    below.held_back.update(ref.slot for ref in store(index, "a").refs)
    before, counts = list(index.entries()), index.counts()
    assert try_store(index, "xyz", whole=True) is Deferred.NOT_WHOLE
    request = index.prepare_request(keys_of("xyz"), lease_id="l", client="c", now=0.0, defer=False, whole=True)
    assert request is Deferred.NOT_WHOLE
    assert (list(index.entries()), index.counts()) == (before, counts)
    plan = try_store(index, "xy", whole=True)
    assert isinstance(plan, StorePlan) and names(plan.refs) == "xy"


class NeverLookedAt(set[int]):
    """Slots that are only counted."""

    def __contains__(self, slot: object) -> bool:
        raise AssertionError(f"slot {slot} was looked at")


def test_that_not_all_can_fit_is_known_without_a_look_at_what_is_held_back() -> None:
    """A large memory in which nearly everything waits would be looked through for each store that waits for room."""
    held_back = NeverLookedAt()
    index = make_index(4, below=TiersBelow(held_back, lambda key: False))
    store(index, "abcd")
    held_back.update(range(3))
    assert try_store(index, "xy", whole=True) is Deferred.NOT_WHOLE


def test_what_is_below_needs_no_room() -> None:
    below = Below()
    index = below.index(2)
    below.held_back.update(ref.slot for ref in store(index, "a").refs)
    below.keys.update(keys_of("xz"))
    plan = try_store(index, "xyz", whole=True)
    assert isinstance(plan, StorePlan) and names(plan.refs) == "y"


def test_an_unwhole_store_keeps_the_leading_part_also_around_what_is_below() -> None:
    below = Below()
    index = below.index(2)
    below.keys.update(keys_of("b"))
    plan = try_store(index, "abcd")
    assert isinstance(plan, StorePlan) and (names(plan.refs), plan.num_refused) == ("ac", 1)


def test_a_key_before_the_start_may_be_below() -> None:
    below = Below()
    index = below.index(4)
    below.keys.update(keys_of("a"))
    for text, stored in (("abc", "bc"), ("xbc", "")):
        plan = index.prepare_store(keys_of(text), client="writer", now=0.0, start=1)
        assert names(plan.refs) == stored
        index.abort_store(plan.plan_id)
