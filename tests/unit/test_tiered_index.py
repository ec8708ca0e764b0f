"""Memory and disk as one index: what is cached, what stays where it is, what is stored, cleared and taken over."""

import pytest

from lmcache_ray.errors import CapacityError, IntegrityError
from lmcache_ray.index.plans import ChunkRef, Deferred, StorePlan
from lmcache_ray.index.policy import POLICIES
from lmcache_ray.index.slot_table import COUNTER_BITS
from lmcache_ray.index.window import plan_window
from lmcache_ray.tiers.backlog import Backlog
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import TieredIndex
from lmcache_ray.tiers.write_behind import complete_disk_writes, next_disk_writes
from tests.unit.index_builders import contents, keys_of, make_index, names
from tests.unit.tier_builders import (
    DISK_EPOCH,
    MUCH,
    all_good,
    bring_up,
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


def below_only(text: str, num_slots: int = 4, disk_slots: int = 8) -> TieredIndex:
    """These are on the disk, and nothing is in memory."""
    tiers = make_tiers(num_slots, disk_slots)
    for begin in range(0, len(text), num_slots):
        store(tiers, text[: begin + num_slots])
        write_down(tiers)
        clear_memory(tiers)
    assert (in_memory(tiers), sorted(on_disk(tiers))) == ("", sorted(text))
    return tiers


def clear_memory(tiers: TieredIndex, text: str | None = None) -> str:
    """Clear memory on every rank: the letters that went."""
    plan = tiers.clear_memory(None if text is None else keys_of(text))
    for rank in tiers.memory.holders:
        tiers.memory.complete_clear(plan.plan_id, rank)
    tiers.check_integrity()
    return names(plan.refs)


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


# -- stores -----------------------------------------------------------------------------------------------------------


def test_what_is_stored_waits_for_the_disk_and_cannot_be_evicted_before() -> None:
    tiers = make_tiers(4, 8)
    store(tiers, "abcd")
    assert (waiting(tiers), tiers.num_behind()) == ("abcd", 4)
    assert store(tiers, "xy").num_refused == 2
    write_down(tiers)
    assert (waiting(tiers), tiers.num_behind(), on_disk(tiers)) == ("", 0, "dcba")
    assert names(store(tiers, "xy").evicted) == "dc"


def test_a_patient_store_is_deferred_rather_than_cut_while_chunks_wait() -> None:
    tiers = make_tiers(4, 8)
    store(tiers, "abc")
    before = list(tiers.memory.entries())
    keys = keys_of("wxyz")
    for _ in range(2):
        found = tiers.prepare_store(keys, client="c", now=0.0, start=0, rank=None, patient=True)
        assert found is Deferred.NOT_WHOLE
    assert list(tiers.memory.entries()) == before and tiers.memory.counts().plans == 0
    write_down(tiers)
    plan = tiers.prepare_store(keys, client="c", now=0.0, start=0, rank=None, patient=True)
    assert isinstance(plan, StorePlan) and names(plan.refs) == "wxyz"


def test_a_patient_store_that_can_never_be_whole_is_cut_when_nothing_waits() -> None:
    tiers = make_tiers(2, 8)
    plan = tiers.prepare_store(keys_of("wxyz"), client="c", now=0.0, start=0, rank=None, patient=True)
    assert isinstance(plan, StorePlan) and (names(plan.refs), plan.num_refused) == ("wx", 2)


def test_an_impatient_store_is_cut_at_once() -> None:
    tiers = make_tiers(4, 8)
    store(tiers, "abc")
    plan = tiers.prepare_store(keys_of("wxyz"), client="c", now=0.0, start=0, rank=None, patient=False)
    assert isinstance(plan, StorePlan) and (names(plan.refs), plan.num_refused) == ("w", 3)


def test_what_is_on_the_disk_is_not_stored_again() -> None:
    tiers = below_only("ab", num_slots=4)
    plan = store(tiers, "abcd")
    assert (names(plan.refs), plan.positions, plan.num_ready) == ("cd", (2, 3), 2)
    assert (where(tiers, "abcd"), waiting(tiers)) == ("ddcc", "dc")
    again = store(tiers, "abcd")
    assert (again.refs, again.num_ready) == ((), 4)


def test_a_store_behind_a_start_that_is_on_the_disk() -> None:
    tiers = below_only("ab", num_slots=4)
    assert names(store(tiers, "abcd", start=2).refs) == "cd"
    tiers = below_only("a", num_slots=4)
    assert store(tiers, "abcd", start=2).refs == (), "b is nowhere: what follows would never be found"


def test_a_store_is_a_use_of_what_is_on_the_disk() -> None:
    tiers = make_tiers(4, 4)
    store(tiers, "ab")
    store(tiers, "xy")
    write_down(tiers)
    store(tiers, "ab")
    assert on_disk(tiers) == "yxba"


def test_ranks_that_store_by_themselves_send_a_chunk_down_when_the_last_has_it() -> None:
    tiers = make_tiers(4, 8)
    keys = keys_of("ab")
    plans = [tiers.prepare_store(keys, client=f"{rank}", now=0.0, start=0, rank=rank, patient=False) for rank in (0, 1)]
    for rank, plan in enumerate(plans):
        assert isinstance(plan, StorePlan) and waiting(tiers) == ""
        tiers.complete_store(plan.plan_id, [rank], done=range(2))
    assert waiting(tiers) == "ab"


def test_a_chunk_that_failed_on_a_rank_does_not_go_down() -> None:
    tiers = make_tiers(4, 8)
    plan = tiers.prepare_store(keys_of("abc"), client="c", now=0.0, start=0, rank=None, patient=False)
    assert isinstance(plan, StorePlan)
    tiers.complete_store(plan.plan_id, [0], done=[0, 1, 2])
    tiers.complete_store(plan.plan_id, [1], done=[0, 2], failed=[1])
    assert waiting(tiers) == "ac"
    assert tiers.complete_store(plan.plan_id, [1], done=[]) is False


def test_every_tier_below_gets_what_is_stored() -> None:
    tiers = make_tiers(4, 8, has_remote=True)
    store(tiers, "abcd")
    assert (waiting(tiers, Tier.DISK), waiting(tiers, Tier.REMOTE)) == ("abcd", "abcd")
    assert (tiers.num_behind(), tiers.num_behind({Tier.DISK}), tiers.num_behind(set())) == (8, 4, 0)
    tiers.backlogs[Tier.REMOTE].drop_all()
    assert waiting(tiers) == "abcd"


def test_a_store_does_not_wait_for_the_remote_store_but_lets_go_of_what_has_waited_longest() -> None:
    tiers = make_tiers(4, has_remote=True)
    store(tiers, "ab")
    store(tiers, "cd")
    plan = tiers.prepare_store(keys_of("xy"), client="c", now=0.0, start=0, rank=None, patient=True)
    assert isinstance(plan, StorePlan) and names(plan.evicted) == "ba"
    assert (waiting(tiers, Tier.REMOTE), tiers.backlogs[Tier.REMOTE].num_dropped) == ("cd", 2)
    on_its_way = tiers.backlogs[Tier.REMOTE].take()
    plan = tiers.prepare_store(keys_of("pq"), client="c", now=0.0, start=0, rank=None, patient=True)
    assert isinstance(plan, StorePlan) and plan.num_refused == 2, "what is being copied is not let go"
    assert (names(on_its_way), waiting(tiers, Tier.REMOTE)) == ("cd", "cd")


def test_nothing_is_let_go_for_a_store_that_finds_room() -> None:
    tiers = make_tiers(4, has_remote=True)
    store(tiers, "abc")
    assert names(store(tiers, "x").refs) == "x"
    assert waiting(tiers, Tier.REMOTE) == "abcx"


def test_a_tier_that_is_out_of_order_holds_nothing_back() -> None:
    tiers = make_tiers(2, 8, has_remote=True)
    tiers.suspended.add(Tier.DISK)
    store(tiers, "ab")
    assert (waiting(tiers, Tier.DISK), waiting(tiers, Tier.REMOTE)) == ("", "ab")
    tiers.backlogs[Tier.REMOTE].drop_all()
    assert names(store(tiers, "xy").evicted) == "ba"
    unopened = make_tiers(2, 8)
    unopened.disk = None
    store(unopened, "ab")
    assert waiting(unopened) == "" and names(store(unopened, "xy").evicted) == "ba"


def test_a_window_is_planned_as_for_memory_alone() -> None:
    tiers = below_only("ab", num_slots=8)

    def prepare(keys: list[bytes], *, lease_id: str, client: str, now: float, defer: bool):  # type: ignore[no-untyped-def]
        return tiers.prepare_request(keys, lease_id=lease_id, client=client, now=now, defer=defer, patient=False)

    prompts = [keys_of(text) for text in ("abc", "xy", "xyz", "q")]
    planned, stopped_by = plan_window(prepare, prompts, client="c", now=0.0, lease_ids=["1", "2", "3", "4"])
    assert stopped_by is Deferred.KEY_BEING_WRITTEN
    assert [(names(load.refs), names(plan.refs), plan.num_ready) for load, plan in planned] == [
        ("", "c", 2),
        ("", "xy", 0),
    ]


def test_a_patient_request_is_deferred_rather_than_cut() -> None:
    tiers = make_tiers(3, 8)
    store(tiers, "ab")
    keys = keys_of("xyz")
    found = tiers.prepare_request(keys, lease_id="l", client="c", now=0.0, defer=False, patient=True)
    assert found is Deferred.NOT_WHOLE and tiers.memory.counts().leases == 0
    write_down(tiers)
    found = tiers.prepare_request(keys, lease_id="l", client="c", now=0.0, defer=False, patient=True)
    assert not isinstance(found, Deferred) and names(found[1].refs) == "xyz"


# -- memory that only stages ------------------------------------------------------------------------------------------


def test_memory_that_only_stages_lets_go_of_what_has_been_copied() -> None:
    tiers = make_tiers(4, 8, keeps=False)
    store(tiers, "abc")
    assert (in_memory(tiers), where(tiers, "abc")) == ("cba", "ccc")
    write_down(tiers)
    assert (in_memory(tiers), where(tiers, "abc")) == ("", "ddd")


def test_memory_that_only_stages_keeps_what_is_being_read() -> None:
    tiers = make_tiers(4, 8, keeps=False)
    store(tiers, "abc")
    assert load(tiers, "ab") == "ab"
    write_down(tiers)
    assert in_memory(tiers) == "ba"
    tiers.release("load")
    assert in_memory(tiers) == ""
    for end in (lambda: tiers.expire(1e6), lambda: tiers.drop_client("reader")):
        bring_up(tiers, "abc")
        assert in_memory(tiers) == "cba"
        end()
        assert in_memory(tiers) == ""


def test_memory_that_only_stages_keeps_nothing_that_no_tier_takes() -> None:
    tiers = make_tiers(4, 8, keeps=False)
    tiers.suspended.add(Tier.DISK)
    store(tiers, "abc")
    assert (in_memory(tiers), where(tiers, "abc")) == ("", "")
    tiers.suspended.clear()
    store(tiers, "abc")
    tiers.clear_disk(None)
    assert in_memory(tiers) == "", "what was to go to the disk only is not cached after the disk is cleared"


def test_memory_that_only_stages_waits_for_the_slowest_tier() -> None:
    tiers = make_tiers(4, 8, has_remote=True, keeps=False)
    store(tiers, "abc")
    write_down(tiers)
    assert in_memory(tiers) == "cba", "the remote store has not got them"
    tiers.backlogs[Tier.REMOTE].drop_all()
    tiers.trim()
    assert in_memory(tiers) == ""


# -- clears -----------------------------------------------------------------------------------------------------------


def test_a_clear_of_memory_leaves_the_disk_and_the_other_way_round() -> None:
    tiers = make_tiers(4, 8)
    store(tiers, "abcd")
    write_down(tiers)
    assert clear_memory(tiers, "bcx") == "bc"
    assert where(tiers, "abcd") == "cddc"
    plan = tiers.clear_disk(keys_of("abx"))
    assert (names(plan.refs), plan.num_kept) == ("ab", 0)
    assert where(tiers, "abcd") == "c"
    assert sorted(on_disk(tiers)) == ["c", "d"]
    assert names(tiers.clear_disk(None).refs) == "cd"
    tiers.check_integrity()


def test_what_is_cleared_from_memory_does_not_go_down_any_more() -> None:
    tiers = make_tiers(4, 8, has_remote=True)
    store(tiers, "abcd")
    clear_memory(tiers, "bc")
    assert (waiting(tiers), waiting(tiers, Tier.REMOTE)) == ("ad", "ad")
    write_down(tiers)
    assert sorted(on_disk(tiers)) == ["a", "d"]


def test_what_waits_for_the_disk_does_not_appear_there_after_it_was_cleared() -> None:
    tiers = make_tiers(4, 8, has_remote=True)
    store(tiers, "abcd")
    tiers.clear_disk(keys_of("bc"))
    assert (waiting(tiers), waiting(tiers, Tier.REMOTE)) == ("ad", "abcd")
    tiers.clear_disk(None)
    assert (waiting(tiers), where(tiers, "abcd"), write_down(tiers)) == ("", "cccc", None)


def test_a_clear_of_the_disk_ends_the_writes_under_way() -> None:
    tiers = make_tiers(4, 8)
    store(tiers, "abc")
    writes = next_disk_writes(tiers, most=MUCH, now=0.0)
    assert writes is not None
    plan = tiers.clear_disk(keys_of("b"))
    assert (names(plan.refs), names(plan.aborted)) == ("", "b")
    assert names(complete_disk_writes(tiers, writes, all_good(tiers, writes.targets))) == "b", "its file must go"
    assert sorted(on_disk(tiers)) == ["a", "c"]
    tiers.check_integrity()


def test_leased_chunks_are_kept_where_they_are_leased() -> None:
    tiers = below_only("abcd", num_slots=8)
    bring_up(tiers, "ab")
    tiers.release("load")
    lookup(tiers, "abc", "r")
    assert clear_memory(tiers) == ""
    plan = tiers.clear_disk(None)
    assert (names(plan.refs), names(plan.kept)) == ("d", "abc")
    assert where(tiers, "abcd") == "ccd"


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
    with pytest.raises(IntegrityError, match="ghost".encode().hex()):
        tiers.check_integrity()


def test_an_index_without_tiers_below_tells_nobody_what_is_ready() -> None:
    tiers = TieredIndex.of_memory(make_index(4))
    store(tiers, "abcd")
    assert (tiers.memory.table.take_newly_ready(), contents(tiers.memory)) == ([], "dcba")
    assert Backlog().take() == []
