"""The shared door to the index: time, leases by name, clearing on ranks, many threads at once."""

import random
import threading
from collections.abc import Sequence

import pytest

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import ChunkRef, IndexCounts
from lmcache_ray.index_service import IndexService, LeaseNames, rank_client
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.local_index import LocalIndex
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tier_service import TierService
from lmcache_ray.tiers.tiered_index import TieredIndex
from tests.unit.index_builders import keys_of, make_index

CALL_S, LEASE_S = 10.0, 100.0  # those of make_index


class Ranks:
    """Records what ranks are told to free; those in `absent` do not answer."""

    def __init__(self, *absent: int) -> None:
        self.absent = set(absent)
        self.freed: dict[int, list[bytes]] = {}

    def free_slots(self, ranks: Sequence[int], refs: Sequence[ChunkRef]) -> set[int]:
        present = set(ranks) - self.absent
        for rank in present:
            self.freed.setdefault(rank, []).extend(ref.key for ref in refs)
        return present


class Door:
    """A service over an index of two ranks, memory alone, with a clock that stands still until it is moved."""

    def __init__(self, num_slots: int = 4, *absent: int) -> None:
        self.now = 0.0
        self.ranks = Ranks(*absent)
        index = TieredIndex.of_memory(make_index(num_slots))
        self.service = IndexService(index, clock=self.clock, free_slots=self.ranks.free_slots)
        self.tiers = TierService(self.service, disk=None, remote=None, call_timeout_s=CALL_S, clock=self.clock)
        self.client = self.client_of("client")

    def clock(self) -> float:
        return self.now

    def client_of(self, name: str) -> LocalIndex:
        return LocalIndex(self.service, self.tiers, name, timeout_s=CALL_S)

    def index(self) -> CacheIndex:
        with self.service.at_now() as (index, now):
            assert now == self.now
            index.check_integrity()
            return index.memory

    def counts(self) -> IndexCounts:
        return self.index().counts()

    def store(self, text: str, *, start: int = 0) -> int:
        keys = keys_of(text)
        plan = self.client.prepare_store(keys, start=start, rank=None)
        return self.client.complete_store(plan, keys, {rank: [True] * len(plan.refs) for rank in (0, 1)})


def cleared(num_removed: int, num_kept: int, *pending: int) -> TierClearCounts:
    """What a clear of memory alone answers."""
    return TierClearCounts({Tier.CPU: num_removed}, {Tier.CPU: num_kept}, num_removed, num_kept, pending)


@pytest.fixture
def door() -> Door:
    return Door()


def test_a_store_is_ready_when_all_acknowledgements_are_in(door: Door) -> None:
    keys = keys_of("abc")
    plan = door.client.prepare_store(keys, start=0, rank=None)
    assert plan.num_ready == 0 and len(plan.refs) == 3
    assert door.client.complete_store(plan, keys, {0: [True] * 3}) == 0
    assert door.client.complete_store(plan, keys, {1: [True, False, True]}) == 1
    assert (door.client.lookup(keys, None), door.counts().ready, door.counts().plans) == (1, 2, 0)


def test_both_ranks_can_answer_in_one_message(door: Door) -> None:
    assert door.store("abc") == 3
    assert door.store("abcd", start=3) == 4
    assert door.counts().ready == 4


def test_a_kept_load_outlasts_time_eviction_and_clear_and_ends_with_its_client(door: Door) -> None:
    door.store("ab")
    plan = door.client.prepare_load(keys_of("ab"), start=0, lease_ids=["views"])
    assert door.service.keep("views", max_slots=2) is True
    assert door.service.keep("unknown", max_slots=2) is False
    door.now = 1e9
    assert door.store("wxyz") == 2
    assert door.client.clear(None) == cleared(2, 2)
    assert (door.index().kept(), door.client.lookup(keys_of("ab"), None)) == ((1, len(plan.refs)), 2)
    door.service.drop_client("client")
    assert (door.index().kept(), door.counts().leases) == ((0, 0), 0)


def test_a_lease_that_was_given_up_before_it_was_there_is_not_kept(door: Door) -> None:
    """As when a call is overtaken by what its caller sends after its deadline: nobody would ever end the lease."""
    door.store("ab")
    door.service.release(["late"])
    door.client.prepare_load(keys_of("ab"), start=0, lease_ids=["late"])
    assert door.service.keep("late", max_slots=2) is False
    assert door.counts().leases == 1
    door.now = CALL_S
    assert door.counts().leases == 0, "it has ended by time"
    door.service.release([f"unknown {number}" for number in range(10_000)])
    door.client.prepare_load(keys_of("ab"), start=0, lease_ids=["late"])
    assert door.service.keep("late", max_slots=2) is True, "it is not remembered for ever"


def test_a_load_that_is_planned_again_after_its_release_is_not_kept(door: Door) -> None:
    door.store("ab")
    for is_kept in (True, False):  # the second time its request has come twice
        door.service.prepare_load(keys_of("ab"), client="driver", start=0, lease_ids=["views"])
        assert door.service.keep("views", max_slots=2) is is_kept
        door.service.release(["views"])


def test_ranks_that_ask_for_themselves_get_the_same_slots(door: Door) -> None:
    keys = keys_of("ab")
    plans = [door.client.prepare_store(keys, start=0, rank=rank) for rank in (1, 0)]
    assert plans[0].refs == plans[1].refs
    assert door.client.complete_store(plans[0], keys, {1: [True, True]}) == 0
    assert door.client.complete_store(plans[1], keys, {0: [True, True]}) == 2


def test_a_lease_ends_by_the_clock_unless_asked_for_again(door: Door) -> None:
    door.store("ab")
    assert door.client.lookup(keys_of("ab"), "lookup/r") == 2
    door.now += LEASE_S - 1
    assert door.counts().leases == 1
    assert door.client.lookup(keys_of("ab"), "lookup/r") == 2
    door.now += LEASE_S - 1
    assert door.counts().leases == 1, "asking again renewed it"
    door.now += 1
    assert door.counts().leases == 0


def test_pinned_chunks_give_way_only_after_the_lease_has_expired(door: Door) -> None:
    door.store("abcd")
    door.client.lookup(keys_of("abcd"), "lookup/r")
    assert door.store("wxyz") == 0
    door.now += LEASE_S
    assert door.store("wxyz") == 4
    assert door.client.lookup(keys_of("abcd"), None) == 0


def test_a_load_is_pinned_once_under_each_name(door: Door) -> None:
    door.store("abc")
    plan = door.client.prepare_load(keys_of("abcx"), start=1, lease_ids=["one", "two"])
    assert ([ref.key for ref in plan.refs], plan.start) == (keys_of("bc"), 1)
    assert door.counts().leases == 2
    door.client.release(["one", "one", "never"])
    assert door.counts().leases == 1
    assert door.client.clear(None) == cleared(1, 2)
    door.client.release(["two"])
    assert door.client.clear(None) == cleared(2, 0)


def test_a_load_of_nothing_pins_nothing(door: Door) -> None:
    door.store("ab")
    for keys, start in (("xy", 0), ("ab", 2), ("", 0)):
        assert door.client.prepare_load(keys_of(keys), start=start, lease_ids=["one", "two"]).refs == ()
    assert door.counts().leases == 0


def test_a_rank_that_never_reads_its_load_holds_no_lease_after_the_call_is_over(door: Door) -> None:
    door.store("abcd")
    door.client.prepare_load(keys_of("abcd"), start=0, lease_ids=["rank 0's", "rank 1's"])
    door.client.release(["rank 0's"])
    assert door.store("wxyz") == 0, "rank 1 may still read"
    door.now += CALL_S
    assert door.counts().leases == 0
    assert door.store("wxyz") == 4


def test_the_lease_of_a_rank_ends_at_once_with_that_rank(door: Door) -> None:
    door.store("ab")
    door.client.prepare_load(keys_of("ab"), start=0, lease_ids=["of 0", "of 1", "of 2"])
    door.client.release(["of 0"])
    door.service.drop_client(rank_client(2))
    assert door.counts().leases == 1
    door.service.drop_client(rank_client(1))
    assert door.counts().leases == 0


def test_no_load_is_pinned_for_a_rank_that_has_ended_for_good(door: Door) -> None:
    door.store("ab")
    door.client.prepare_load(keys_of("ab"), start=0, lease_ids=["of 0", "of 1", "of 2"])
    door.service.rank_lost(1)
    assert door.counts().leases == 2
    door.client.release(["of 0", "of 2"])
    door.client.prepare_load(keys_of("ab"), start=0, lease_ids=["of 0", "of 1", "of 2"])
    assert door.counts().leases == 2


def test_the_first_lease_of_a_load_is_the_callers_own(door: Door) -> None:
    door.store("ab")
    door.client.prepare_load(keys_of("ab"), start=0, lease_ids=["of 0", "of 1"])
    door.service.drop_client(rank_client(0))
    assert door.counts().leases == 2, "this caller is not rank 0's engine"
    door.service.drop_client("client")
    assert door.counts().leases == 1


def test_a_store_that_nobody_answers_for_ends_by_the_clock(door: Door) -> None:
    plan = door.client.prepare_store(keys_of("ab"), start=0, rank=None)
    door.now += CALL_S
    counts = door.counts()
    assert (counts.writing, counts.quarantined, counts.free) == (0, 2, 2), "a rank may still be writing"
    late = door.client.complete_store(plan, keys_of("ab"), {rank: [True, True] for rank in (0, 1)})
    assert (late, door.counts().free) == (0, 4)


def test_clear_frees_the_slots_on_every_rank_before_it_returns(door: Door) -> None:
    door.store("abcd")
    assert door.client.clear(keys_of("bdx")) == cleared(2, 0)
    assert door.ranks.freed == {0: keys_of("bd"), 1: keys_of("bd")}
    assert (door.counts().ready, door.counts().free, door.counts().plans) == (2, 2, 0)
    assert door.client.clear([]) == cleared(0, 0)
    assert door.client.clear(None) == cleared(2, 0)
    assert door.client.clear(None) == cleared(0, 0)


def test_clear_has_the_ranks_drop_what_is_being_written_too(door: Door) -> None:
    door.store("a")
    writing = door.client.prepare_store(keys_of("abc"), start=0, rank=None)
    assert door.client.clear(None) == cleared(1, 0)
    assert {rank: sorted(keys) for rank, keys in door.ranks.freed.items()} == dict.fromkeys((0, 1), keys_of("abc"))
    assert door.counts().quarantined == 2, "their writers have not answered"
    assert door.client.complete_store(writing, keys_of("abc"), {rank: [True, True] for rank in (0, 1)}) == 0
    assert door.counts().free == 4


def test_ranks_out_of_reach_are_pending_and_their_slots_unused() -> None:
    door = Door(4, 1)
    door.store("abc")
    assert door.client.clear(None) == cleared(3, 0, 1)
    assert door.client.lookup(keys_of("abc"), None) == 0
    assert (door.counts().quarantined, door.counts().free) == (3, 1)
    assert door.store("abc") == 1, "the rest finds no room yet"


def test_leases_of_loads_are_never_those_of_lookups_or_of_other_clients() -> None:
    names = [LeaseNames("rank0", "world"), LeaseNames("rank1", "world")]
    made = [name.for_load() for _ in range(3) for name in names]
    assert len(set(made)) == 6
    assert names[0].for_lookup("rank0/0") not in made


def test_a_lookup_id_means_one_lease_within_its_scope_and_nothing_outside() -> None:
    rank0, rank1, other = LeaseNames("rank0", "world"), LeaseNames("rank1", "world"), LeaseNames("driver", "driver")
    assert rank0.for_lookup("r") == rank1.for_lookup("r") != other.for_lookup("r")


def test_clients_of_different_scopes_do_not_end_each_others_lookups(door: Door) -> None:
    door.store("abcd")
    names = [LeaseNames(scope, scope) for scope in ("one", "other")]
    clients = [door.client_of(scope) for scope in ("one", "other")]
    for client, name, text in zip(clients, names, ("ab", "abcd"), strict=True):
        assert client.lookup(keys_of(text), name.for_lookup("r")) == len(text)
    clients[0].release([names[0].for_lookup("r")])
    assert clients[1].clear(None) == cleared(0, 4), "the other's four are still pinned"
    clients[0].lookup(keys_of("a"), names[0].for_lookup("r"))
    door.service.drop_client("one")
    assert door.counts().leases == 1
    clients[1].release([names[1].for_lookup("r")])
    assert clients[1].clear(None) == cleared(4, 0)


@pytest.mark.parametrize("lookup_id", ["", None, 7])
def test_a_lookup_id_is_a_text(lookup_id: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"lookup_id.*non-empty"):
        LeaseNames("rank0", "world").for_lookup(lookup_id)  # type: ignore[arg-type]


def test_many_threads_at_once_keep_the_index_sound() -> None:
    door = Door(8)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        client = door.client_of(f"client {seed}")
        try:
            for step in range(150):
                keys = keys_of("abcdefgh"[: rng.randint(1, 8)] + rng.choice("xyz"))
                lease = f"{seed}/{step % 2}"
                plan = client.prepare_store(keys, start=0, rank=None)
                assert client.lookup(keys, lease) <= len(keys)
                client.complete_store(plan, keys, {rank: [rng.random() < 0.9 for _ in plan.refs] for rank in (0, 1)})
                load = client.prepare_load(keys, start=0, lease_ids=[f"load {seed}"])
                assert [ref.key for ref in load.refs] == keys[: len(load.refs)]
                client.release([lease, f"load {seed}"])
                if rng.random() < 0.1:
                    client.clear(None)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    counts = door.counts()
    assert (counts.leases, counts.plans, counts.writing, counts.quarantined) == (0, 0, 0, 0)
