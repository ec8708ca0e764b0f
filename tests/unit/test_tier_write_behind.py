"""The way down: what is written next, what must go for it, and what comes of ranks that fail or stay silent."""

from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.slot_table import COUNTER_BITS
from lmcache_ray.tiers.recovery import send_down
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import TieredIndex
from lmcache_ray.tiers.write_behind import (
    DiskWrites,
    complete_disk_writes,
    complete_remote_writes,
    next_disk_writes,
    next_remote_writes,
)
from tests.unit.index_builders import keys_of, names
from tests.unit.tier_builders import (
    DISK_EPOCH,
    MUCH,
    all_good,
    in_memory,
    load,
    lookup,
    make_tiers,
    on_disk,
    planned_up,
    store,
    waiting,
    write_down,
)


def next_writes(tiers: TieredIndex, most: int = MUCH) -> DiskWrites:
    writes = next_disk_writes(tiers, most=most, now=0.0)
    assert writes is not None
    tiers.check_integrity()
    return writes


def test_a_write_names_where_the_chunk_is_and_the_file_that_it_becomes() -> None:
    tiers = make_tiers(4, 8)
    plan = store(tiers, "abc")
    writes = next_writes(tiers)
    assert writes.sources == plan.refs
    assert [ref.key for ref in writes.targets] == keys_of("abc")
    assert all(ref.generation >> COUNTER_BITS == DISK_EPOCH for ref in writes.targets)
    assert writes.evicted == ()
    assert waiting(tiers) == "abc", "they stay until they are on the disk"
    assert complete_disk_writes(tiers, writes, all_good(tiers, writes.targets)) == ()
    assert (waiting(tiers), on_disk(tiers)) == ("", "cba")


def test_groups_go_down_in_the_order_of_the_stores_until_there_are_enough() -> None:
    tiers = make_tiers(8, 8)
    for text in ("ab", "cd", "ef"):
        store(tiers, text)
    assert names(next_writes(tiers, most=3).sources) == "abcd"
    assert names(next_writes(tiers, most=3).sources) == "ef"
    assert next_disk_writes(tiers, most=3, now=0.0) is None


def test_a_chunk_counts_only_when_every_rank_has_confirmed_it() -> None:
    tiers = make_tiers(4, 8)
    store(tiers, "abcd")
    writes = next_writes(tiers)
    unwritten = complete_disk_writes(tiers, writes, {0: [True, True, False, True], 1: [True, False, True, True]})
    assert names(unwritten) == "bc"
    assert set(unwritten) <= set(writes.targets)
    assert (sorted(on_disk(tiers)), waiting(tiers)) == (["a", "d"], "")
    tiers.check_integrity()


def test_a_silent_rank_has_written_nothing() -> None:
    tiers = make_tiers(4, 4)
    store(tiers, "ab")
    writes = next_writes(tiers)
    assert complete_disk_writes(tiers, writes, {0: [True, True]}) == writes.targets
    assert (on_disk(tiers), waiting(tiers)) == ("", "")
    assert tiers.disk is not None and tiers.disk.counts().free == 4, "the room is not lost"
    store(tiers, "b")
    writes = next_writes(tiers)
    assert names(writes.sources) == "b", "it is used again, and the disk has missed it"


def test_a_rank_that_could_do_nothing_answers_nothing_about_any_chunk() -> None:
    tiers = make_tiers(4, 4)
    store(tiers, "ab")
    writes = next_writes(tiers)
    assert complete_disk_writes(tiers, writes, {0: [True, True], 1: []}) == writes.targets
    assert tiers.disk is not None and tiers.disk.counts().free == 4, "the room is not lost"


def test_a_failed_chunk_is_written_under_another_name_when_it_is_stored_again() -> None:
    tiers = make_tiers(2, 8)
    store(tiers, "ab")
    first = next_writes(tiers)
    complete_disk_writes(tiers, first, {})
    store(tiers, "xy")
    complete_disk_writes(tiers, next_writes(tiers), {})
    store(tiers, "ab")
    second = next_writes(tiers)
    assert names(second.targets) == "ab"
    assert not {ref.generation for ref in first.targets} & {ref.generation for ref in second.targets}


def test_what_must_go_for_others_is_named_with_its_file() -> None:
    tiers = make_tiers(4, 4)
    store(tiers, "abc")
    first = next_writes(tiers)
    complete_disk_writes(tiers, first, all_good(tiers, first.targets))
    store(tiers, "xyz")
    second = next_writes(tiers)
    assert (names(second.targets), names(second.evicted)) == ("xyz", "cb"), "tails first"
    assert set(second.evicted) <= set(first.targets)
    assert on_disk(tiers) == "a", "they are gone before the ranks are told"


def test_what_finds_no_room_on_the_disk_is_let_go_and_its_head_is_written() -> None:
    tiers = make_tiers(4, 2)
    store(tiers, "abcd")
    writes = next_writes(tiers)
    assert (names(writes.targets), tiers.backlogs[Tier.DISK].num_dropped) == ("ab", 2)
    assert waiting(tiers) == "ab", "c and d are not held back any more"


def test_a_disk_that_is_all_being_read_takes_nothing() -> None:
    tiers = make_tiers(4, 2, keeps=False)
    store(tiers, "ab")
    write_down(tiers)
    lookup(tiers, "ab", "r")
    store(tiers, "xy")
    assert write_down(tiers) is None
    assert (tiers.backlogs[Tier.DISK].num_dropped, waiting(tiers)) == (2, "")
    assert in_memory(tiers) == "", "what no tier takes is not kept by memory that only stages"


def test_one_group_is_not_evicted_for_the_next_of_the_same_call() -> None:
    tiers = make_tiers(4, 3)
    store(tiers, "ab")
    store(tiers, "cd")
    writes = next_writes(tiers)
    assert (names(writes.targets), writes.evicted) == ("abc", ())
    assert tiers.backlogs[Tier.DISK].num_dropped == 1
    complete_disk_writes(tiers, writes, all_good(tiers, writes.targets))
    tiers.check_integrity()


def test_flags_are_told_apart_by_group() -> None:
    tiers = make_tiers(8, 8)
    for text in ("ab", "c", "def"):
        store(tiers, text)
    writes = next_writes(tiers)
    flags = [True, True, False, True, False, True]
    assert names(complete_disk_writes(tiers, writes, {0: flags, 1: [True] * 6})) == "ce"
    assert sorted(on_disk(tiers)) == ["a", "b", "d", "f"]


def test_what_left_memory_while_it_waited_is_not_written() -> None:
    tiers = make_tiers(4, 8)
    store(tiers, "abc")
    plan = tiers.clear_memory(keys_of("b"))
    assert names(plan.refs) == "b"
    assert names(next_writes(tiers).sources) == "ac"


def test_what_has_come_to_the_disk_meanwhile_is_not_written_again() -> None:
    tiers = make_tiers(4, 8)
    store(tiers, "ab")
    first = next_writes(tiers)
    for rank in tiers.memory.holders:
        tiers.memory.complete_clear(tiers.clear_memory(None).plan_id, rank)
    again = store(tiers, "ab")
    assert names(again.refs) == "ab"
    assert next_disk_writes(tiers, most=MUCH, now=0.0) is None, "they are being written already"
    complete_disk_writes(tiers, first, all_good(tiers, first.targets))
    assert (on_disk(tiers), waiting(tiers)) == ("ba", "")


def test_without_a_disk_nothing_waits() -> None:
    tiers = make_tiers(4, 8)
    store(tiers, "ab")
    tiers.disk = None
    assert next_disk_writes(tiers, most=MUCH, now=0.0) is None
    assert waiting(tiers) == ""


def test_a_write_that_nobody_answers_in_time_is_answered_as_failed() -> None:
    tiers = make_tiers(4, 2)
    store(tiers, "ab")
    writes = next_writes(tiers)
    tiers.expire(10.0)
    assert tiers.disk is not None and tiers.disk.counts().quarantined == 2
    assert complete_disk_writes(tiers, writes, all_good(tiers, writes.targets)) == writes.targets, "too late"
    assert (tiers.disk.counts().free, on_disk(tiers), waiting(tiers)) == (2, "", "")


def test_chunks_for_the_remote_store_stay_until_they_are_there_or_will_not_be() -> None:
    tiers = make_tiers(4, has_remote=True)
    first, second = store(tiers, "ab"), store(tiers, "cd")
    refs = next_remote_writes(tiers, most=1)
    assert refs == first.refs
    assert waiting(tiers, Tier.REMOTE) == "abcd"
    complete_remote_writes(tiers, refs)
    assert waiting(tiers, Tier.REMOTE) == "cd"
    assert next_remote_writes(tiers, most=1) == second.refs
    assert next_remote_writes(tiers, most=1) == ()


def test_a_chunk_that_waits_twice_for_the_remote_store_goes_there_once() -> None:
    tiers = make_tiers(4, has_remote=True)
    store(tiers, "ab")
    backlog = tiers.backlogs[Tier.REMOTE]
    backlog.miss(tiers.memory.table.refs([0, 1]))
    assert load(tiers, "ab") == "ab"  # used: what was missed is to go after all, and is still in its first group
    refs = next_remote_writes(tiers, most=MUCH)
    assert names(refs) == "ab"
    complete_remote_writes(tiers, refs)
    assert waiting(tiers, Tier.REMOTE) == ""


def test_after_a_restart_what_was_stored_since_waits_for_the_remote_store_once() -> None:
    tiers = make_tiers(4, has_remote=True)
    store(tiers, "ab")
    send_down(tiers)
    assert waiting(tiers, Tier.REMOTE) == "ab"
    assert load(tiers, "ab") == "ab"
    assert names(next_remote_writes(tiers, most=MUCH)) == "ab"


def test_what_left_memory_does_not_go_to_the_remote_store() -> None:
    tiers = make_tiers(4, has_remote=True)
    store(tiers, "abc")
    tiers.memory.evict([ref for ref, _ in tiers.memory.entries() if ref.key == b"b"])
    assert names(next_remote_writes(tiers, most=MUCH)) == "ac"
    assert waiting(tiers, Tier.REMOTE) == "ac"


def test_memory_that_only_stages_is_empty_when_both_tiers_are_done() -> None:
    tiers = make_tiers(4, 8, has_remote=True, keeps=False)
    store(tiers, "ab")
    refs = next_remote_writes(tiers, most=MUCH)
    write_down(tiers)
    assert in_memory(tiers) == "ba"
    complete_remote_writes(tiers, refs)
    assert in_memory(tiers) == ""


def test_a_chunk_that_is_being_read_can_be_written_and_is_not_taken_for_others() -> None:
    tiers = make_tiers(2, 2)
    store(tiers, "ab")
    write_down(tiers)
    assert load(tiers, "ab") == "ab"
    promotion = planned_up(tiers, "ab", lease_id="other")
    assert promotion.refs == ()
    assert store(tiers, "xy").refs == ()
    assert on_disk(tiers) == "ba"


def test_refs_of_an_earlier_use_of_a_slot_complete_nothing() -> None:
    tiers = make_tiers(2, has_remote=True)
    store(tiers, "ab")
    complete_remote_writes(tiers, [ChunkRef(b"a", 0, 1)])
    assert waiting(tiers, Tier.REMOTE) == "ab", "generations count, not slots"
