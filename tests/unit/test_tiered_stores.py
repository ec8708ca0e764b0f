"""Stores and clears over memory and disk as one index, and memory that is only where chunks pass through."""

from collections.abc import Sequence

import pytest

from lmcache_ray.index.plans import Deferred, StorePlan
from lmcache_ray.index.window import PlannedRequest, plan_window
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.write_behind import complete_disk_writes, next_disk_writes
from tests.unit.index_builders import keys_of, names
from tests.unit.tier_builders import (
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


def test_a_patient_store_also_waits_for_what_its_caller_has_begun_to_write() -> None:
    tiers = make_tiers(4, 8)
    begun = tiers.prepare_store(keys_of("abc"), client="c", now=0.0, start=0, rank=None, patient=True)
    assert isinstance(begun, StorePlan) and tiers.num_behind() == 0

    def prepare(text: str) -> StorePlan | Deferred:
        return tiers.prepare_store(
            keys_of(text), client="c", now=0.0, start=0, rank=None, patient=True, has_begun=True
        )

    assert prepare("xyz") is Deferred.NOT_WHOLE
    tiers.suspended.add(Tier.DISK)
    cut = prepare("xyz")
    assert isinstance(cut, StorePlan) and names(cut.refs) == "x", "nothing will go down"
    tiers.suspended.clear()
    tiers.memory.abort_store(cut.plan_id)
    tiers.complete_store(begun.plan_id, tiers.memory.holders, done=range(3))
    assert prepare("xyz") is Deferred.NOT_WHOLE
    write_down(tiers)
    whole = prepare("xyz")
    assert isinstance(whole, StorePlan) and names(whole.refs) == "xyz"


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


def test_a_store_does_not_wait_for_the_remote_store_but_lets_go_of_tails() -> None:
    tiers = make_tiers(4, has_remote=True)
    store(tiers, "ab")
    store(tiers, "cd")
    plan = tiers.prepare_store(keys_of("xy"), client="c", now=0.0, start=0, rank=None, patient=True)
    assert isinstance(plan, StorePlan) and names(plan.evicted) == "bd"
    assert (sorted(waiting(tiers, Tier.REMOTE)), tiers.backlogs[Tier.REMOTE].num_dropped) == (["a", "c"], 2)
    on_its_way = [*tiers.backlogs[Tier.REMOTE].take(), *tiers.backlogs[Tier.REMOTE].take()]
    plan = tiers.prepare_store(keys_of("pq"), client="c", now=0.0, start=0, rank=None, patient=True)
    assert isinstance(plan, StorePlan) and plan.num_refused == 2, "what is being copied is not let go"
    assert (names(on_its_way), sorted(waiting(tiers, Tier.REMOTE))) == ("ac", ["a", "c"])


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.REMOTE])
def test_what_a_tier_has_missed_goes_down_when_it_is_used_again(tier: Tier) -> None:
    """A prompt that every request begins with stays in memory for days: one outage must not keep it from a tier."""
    tiers = make_tiers(4, 8, has_remote=True)
    tiers.suspended.add(tier)
    store(tiers, "ab")
    assert waiting(tiers, tier) == ""
    store(tiers, "ab")
    assert waiting(tiers, tier) == "", "it is still out of order"
    tiers.suspended.discard(tier)
    assert waiting(tiers, tier) == "", "whatever is never used again need not go"
    store(tiers, "a")
    assert waiting(tiers, tier) == "a"
    tiers.prepare_load(keys_of("ab"), lease_id="l", client="c", now=0.0)
    assert waiting(tiers, tier) == "ab"
    tiers.prepare_load(keys_of("ab"), lease_id="l", client="c", now=0.0)
    assert tiers.num_behind({tier}) == 2, "once is enough"
    tiers.check_integrity()


def test_what_was_cleared_in_a_tier_does_not_go_there_although_it_was_missed() -> None:
    tiers = make_tiers(4, 8)
    tiers.suspended.add(Tier.DISK)
    store(tiers, "ab")
    tiers.suspended.clear()
    tiers.clear_disk(keys_of("a"))
    store(tiers, "ab")
    assert waiting(tiers) == "b"


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

    def prepare(
        keys: Sequence[bytes], *, lease_id: str, client: str, now: float, defer: bool
    ) -> PlannedRequest | Deferred:
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
