"""Memory and disk as one index: what is cached, what stays where it is, what is loaded, and what earlier lives left."""

import pytest

from lmcache_ray.errors import CapacityError, IntegrityError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.policy import POLICIES
from lmcache_ray.index.slot_table import COUNTER_BITS
from lmcache_ray.tiers.backlog import Backlog
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import TieredIndex
from lmcache_ray.tiers.write_behind import complete_disk_writes, next_disk_writes
from tests.unit.index_builders import contents, keys_of, make_index, names
from tests.unit.tier_builders import (
    DISK_EPOCH,
    MUCH,
    all_good,
    below_only,
    bring_up,
    clear_memory,
    in_memory,
    load,
    lookup,
    make_tiers,
    on_disk,
    store,
    waiting,
    where,
    write_down,
)

# -- lookups ----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cached_as_far_as_some_tier_has_each_chunk() -> None:
    tiers = below_only("abcd", num_slots=8)
    assert bring_up(tiers, "ab") == "ab"
    tiers.release("load")
    assert where(tiers, "abcdx") == "ccdd"
    assert lookup(tiers, "abcdx") == 4
    clear_memory(tiers, "a")
    assert where(tiers, "abcd") == "dcdd", "memory may have holes that the disk fills"


def test_a_hole_in_both_ends_the_run() -> None:
    tiers = below_only("abcd")
    assert bring_up(tiers, "abcd") == "abcd"
    tiers.release("load")
    tiers.clear_disk(keys_of("b"))
    clear_memory(tiers, "b")
    assert (where(tiers, "abcd"), lookup(tiers, "abcd")) == ("c", 1)
    store(tiers, "ab")
    assert where(tiers, "abcd") == "cccc"


def test_a_lookup_sees_only_the_tiers_it_names() -> None:
    tiers = below_only("abcd", num_slots=8)
    bring_up(tiers, "ab")
    tiers.release("load")
    tiers.clear_disk(keys_of("a"))
    for within, found in (
        ({Tier.CPU}, 2),
        ({Tier.DISK}, 0),
        ({Tier.CPU, Tier.DISK}, 4),
        ({Tier.REMOTE}, 0),
        ({Tier.REMOTE, Tier.CPU}, 2),
        (set(), 0),
    ):
        assert lookup(tiers, "abcd", within=within) == found, within


def test_without_a_disk_memory_is_all_there_is() -> None:
    tiers = TieredIndex.of_memory(make_index(4))
    store(tiers, "abc")
    assert (lookup(tiers, "abcd"), where(tiers, "abcd"), tiers.num_cached(keys_of("abcd"))) == (3, "ccc", 3)
    assert lookup(tiers, "abc", within={Tier.DISK, Tier.REMOTE}) == 0
    assert lookup(tiers, "abc", "pin", within={Tier.DISK}) == 0 and tiers.memory.counts().leases == 0
    assert tiers.clear_disk(None).refs == ()
    assert tiers.num_behind() == 0


def test_no_more_is_cached_than_memory_can_take_at_once() -> None:
    tiers = below_only("abcdef", num_slots=3)
    assert (where(tiers, "abcdef"), lookup(tiers, "abcdef")) == ("ddd", 3)
    assert tiers.num_cached(keys_of("abcdef")) == 3


def test_a_chunk_that_is_being_written_to_the_disk_is_not_there_yet() -> None:
    tiers = make_tiers(4, 8)
    store(tiers, "ab")
    writes = next_disk_writes(tiers, most=MUCH, now=0.0)
    assert writes is not None
    clear_memory(tiers)
    assert lookup(tiers, "ab") == 0
    complete_disk_writes(tiers, writes, all_good(tiers, writes.targets))
    assert where(tiers, "ab") == "dd"


def test_a_lookup_is_a_use_in_both_tiers_and_counting_is_none() -> None:
    tiers = make_tiers(4, 4)
    store(tiers, "ab")
    store(tiers, "xy")
    write_down(tiers)
    assert (in_memory(tiers), on_disk(tiers)) == ("bayx", "bayx")
    tiers.num_cached(keys_of("ab"))
    assert (in_memory(tiers), on_disk(tiers)) == ("bayx", "bayx")
    lookup(tiers, "ab")
    assert (in_memory(tiers), on_disk(tiers)) == ("yxba", "yxba")


# -- leases -----------------------------------------------------------------------------------------------------------


def test_a_leased_lookup_holds_chunks_in_whichever_tier_they_are() -> None:
    tiers = below_only("abcd", num_slots=4, disk_slots=4)
    bring_up(tiers, "ab")
    tiers.release("load")
    assert lookup(tiers, "abcd", "r") == 4
    assert store(tiers, "wxyz").num_refused == 2, "a and b stay in memory"
    assert write_down(tiers) is None and on_disk(tiers) == "dcba", "and all four on the disk"
    assert tiers.backlogs[Tier.DISK].num_dropped == 2
    assert tiers.release("r") is True and tiers.release("r") is False
    assert store(tiers, "pqrs").num_refused == 0
    assert write_down(tiers) is not None
    assert where(tiers, "abcd") == ""


def test_a_lease_ends_by_time_in_both_tiers() -> None:
    tiers = below_only("ab", num_slots=2, disk_slots=2)
    bring_up(tiers, "ab")
    tiers.release("load")
    lookup(tiers, "ab", "r")
    assert tiers.expire(99.9).lease_ids == ()
    assert store(tiers, "xy", now=99.9).refs == ()
    assert tiers.expire(100.0).lease_ids == ("r",)
    assert names(store(tiers, "xy", now=100.0).refs) == "xy"
    write_down(tiers, now=100.0)
    assert sorted(on_disk(tiers)) == ["x", "y"]


def test_a_client_that_has_ended_holds_nothing_anywhere() -> None:
    tiers = below_only("ab", num_slots=2, disk_slots=2)
    lookup(tiers, "ab", "r")
    assert tiers.disk is not None and tiers.disk.counts().leases == 1
    tiers.drop_client("reader")
    assert (tiers.disk.counts().leases, tiers.memory.counts().leases) == (0, 0)


def test_asking_again_under_the_same_name_holds_what_is_found_then() -> None:
    tiers = below_only("abcd", disk_slots=4)
    lookup(tiers, "abcd", "r")
    lookup(tiers, "a", "r")
    store(tiers, "xyz")
    write_down(tiers)
    assert sorted(on_disk(tiers)) == ["a", "x", "y", "z"]


def test_a_pin_holds_until_it_is_ended_whoever_asked_for_it() -> None:
    tiers = below_only("abc", num_slots=4, disk_slots=4)
    assert tiers.pin(keys_of("abcx"), "pin", now=0.0) == 3
    tiers.expire(1e9)
    tiers.drop_client("reader")
    store(tiers, "wxyz")
    assert write_down(tiers) is not None
    assert on_disk(tiers)[:3] == "cba", "one of four found room"
    assert tiers.release("pin") is True
    tiers.check_integrity()


def test_too_many_pins_are_refused_and_leave_nothing() -> None:
    for in_memory_too in (False, True):
        tiers = below_only("abcd", num_slots=4, disk_slots=4)
        if in_memory_too:
            bring_up(tiers, "abcd")
            tiers.release("load")
        with pytest.raises(CapacityError, match="at most 3 of 4 chunks, so that stores find room: 4 more"):
            tiers.pin(keys_of("abcd"), "pin", now=0.0)
        assert tiers.disk is not None
        assert (tiers.memory.counts().leases, tiers.disk.counts().leases) == (0, 0)
        tiers.check_integrity()


def test_a_pin_of_nothing_is_nothing() -> None:
    tiers = below_only("ab")
    assert tiers.pin(keys_of("xy"), "pin", now=0.0) == 0
    assert tiers.release("pin") is False


# -- loads ------------------------------------------------------------------------------------------------------------


def test_a_load_reads_what_is_in_memory_and_uses_the_disk() -> None:
    tiers = below_only("abcd", num_slots=8)
    bring_up(tiers, "ab")
    assert on_disk(tiers) == "dcba"
    assert load(tiers, "abcd") == "ab"
    assert load(tiers, "abcd", start=1) == "b"
    assert on_disk(tiers) == "dcba", "all four in the prompt's order, tails first"


def test_what_stands_before_the_start_of_a_load_need_only_be_cached() -> None:
    tiers = below_only("abcd", num_slots=8)
    bring_up(tiers, "abcd")
    tiers.release("load")
    clear_memory(tiers, "a")
    assert load(tiers, "abcd", start=1) == "bcd"
    assert load(tiers, "abcd") == ""
    tiers.clear_disk(keys_of("a"))
    assert load(tiers, "abcd", start=1) == "", "what is cached nowhere cannot be read around"


# -- a new life -------------------------------------------------------------------------------------------------------


def earlier(text: str, epoch: int = DISK_EPOCH - 1) -> list[tuple[bytes, int]]:
    """Chunks of an earlier life, the least recently used first."""
    return [(key, (epoch << COUNTER_BITS) + number) for number, key in enumerate(keys_of(text), start=1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_earlier_lives_left_is_cached_and_the_oldest_goes_first(policy: str) -> None:
    tiers = make_tiers(4, 4, policy=policy)
    assert tiers.disk is not None
    assert tiers.disk.adopt(earlier("dcba")) == []
    assert (where(tiers, "abcd"), on_disk(tiers)) == ("dddd", "dcba")
    assert tiers.disk.table.ready_ref(b"a") == ChunkRef(b"a", 3, earlier("dcba")[3][1])
    store(tiers, "xy")
    writes = write_down(tiers)
    assert writes is not None and names(writes.evicted) == "dc"
    assert min(ref.generation for ref in writes.targets) > max(generation for _, generation in earlier("dcba"))


def test_what_earlier_lives_left_can_be_brought_up_and_is_not_stored_again() -> None:
    tiers = make_tiers(4, 4)
    assert tiers.disk is not None
    tiers.disk.adopt(earlier("cba"))
    assert names(store(tiers, "abcd").refs) == "d"
    assert bring_up(tiers, "abc") == "abc"
    assert waiting(tiers) == "d", "what came from there does not go back"


# -- the self-check ---------------------------------------------------------------------------------------------------


def test_a_chunk_that_is_held_back_but_is_not_there_is_a_contradiction() -> None:
    tiers = make_tiers(4, 8)
    tiers.backlogs[Tier.DISK].add([ChunkRef(b"a", 2, 1)])
    with pytest.raises(IntegrityError, match=r"slots \[2\] are held back"):
        tiers.check_integrity()


def test_a_fault_of_either_part_is_found() -> None:
    tiers = make_tiers(4, 8)
    assert tiers.disk is not None
    tiers.disk.table.slot_of[b"ghost"] = 3
    with pytest.raises(IntegrityError, match=b"ghost".hex()):
        tiers.check_integrity()


def test_an_index_without_tiers_below_tells_nobody_what_is_ready() -> None:
    tiers = TieredIndex.of_memory(make_index(4))
    store(tiers, "abcd")
    assert (tiers.memory.table.take_newly_ready(), contents(tiers.memory)) == ([], "dcba")
    assert Backlog().take() == []
