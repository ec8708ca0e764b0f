"""Windows: planning many requests in one go decides exactly what planning them one by one does."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import Deferred, StorePlan
from lmcache_ray.index.policy import POLICIES
from lmcache_ray.index.window import plan_window
from tests.unit.index_builders import contents, finish, keys_of, make_index, names, store

Prompt = list[bytes]


def prompt_of(path: str) -> Prompt:
    """Chained keys: a chunk's key is its whole prefix, as with real digests."""
    return [path[: end + 1].encode() for end in range(len(path))]


@dataclass
class Outcome:
    """What one run decided: per request (hit chunks, stored keys, evicted keys, refused), and what is left."""

    decisions: list[tuple[int, list[bytes], list[bytes], int]]
    final_order: list[bytes]
    num_windows: int


def occupied_index(num_slots: int, policy: str, num_leased: int, num_quarantined: int) -> CacheIndex:
    """An index in which others hold some chunks under a lease, and some slots wait to be settled, all the time."""
    index = make_index(num_slots, holders=(0, 1), policy=policy)
    broken = index.prepare_store([b"broken%d" % n for n in range(num_quarantined)], client="other", now=0.0)
    leased = [b"leased%d" % n for n in range(num_leased)]
    finish(index, index.prepare_store(leased, client="other", now=0.0))
    index.pin(leased, "other's lease", "other", now=0.0)
    index.complete_store(broken.plan_id, [0], done=[], failed=range(len(broken.refs)))
    return index


def run(index: CacheIndex, prompts: list[Prompt], window: int) -> Outcome:
    """Plan up to `window` requests at a time, then finish them."""
    decisions, position, num_windows = [], 0, 0
    while position < len(prompts):
        batch = prompts[position : position + window]
        lease_ids = [f"load {position + offset}" for offset in range(len(batch))]
        planned, stopped_by = plan_window(index.prepare_request, batch, client="replay", now=0.0, lease_ids=lease_ids)
        index.check_integrity()
        assert 1 <= len(planned) <= len(batch)
        assert (stopped_by is None) is (len(planned) == len(batch))
        for load, plan in planned:
            stored, evicted = [ref.key for ref in plan.refs], [ref.key for ref in plan.evicted]
            decisions.append((len(load.refs), stored, evicted, plan.num_refused))
            finish(index, plan)
            index.release(load.lease_id)
        position += len(planned)
        num_windows += 1
    return Outcome(decisions, [ref.key for ref, _ in index.entries()], num_windows)


def run_one_by_one(index: CacheIndex, prompts: list[Prompt]) -> Outcome:
    """The reference: separate loads and stores, each finished before the next."""
    decisions = []
    for prompt in prompts:
        load = index.prepare_load(prompt, lease_id="load", client="replay", now=0.0)
        plan = finish(index, index.prepare_store(prompt, client="replay", now=0.0))
        index.release("load")
        stored, evicted = [ref.key for ref in plan.refs], [ref.key for ref in plan.evicted]
        decisions.append((len(load.refs), stored, evicted, plan.num_refused))
    return Outcome(decisions, [ref.key for ref, _ in index.entries()], len(prompts))


@settings(max_examples=150, deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    num_slots=st.integers(5, 40),
    occupied=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    paths=st.lists(st.text("ab", min_size=1, max_size=12), max_size=60),
    window=st.sampled_from([2, 7, 64]),
)
def test_any_window_decides_the_same(
    policy: str, num_slots: int, occupied: tuple[int, int], paths: list[str], window: int
) -> None:
    prompts = [prompt_of(path) for path in paths]
    expected = run_one_by_one(occupied_index(num_slots, policy, *occupied), prompts)
    for size in (1, window):
        outcome = run(occupied_index(num_slots, policy, *occupied), prompts, size)
        assert outcome.decisions == expected.decisions
        assert outcome.final_order == expected.final_order


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_window_64_decides_as_window_1_on_a_chat_like_workload(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    num_slots = rng.randint(12, 40)
    paths: list[str] = []
    for _ in range(400):
        grown = rng.choice(paths[-12:]) if paths and rng.random() < 0.6 else rng.choice("xyz")
        paths.append((grown + "".join(rng.choices("abcdef", k=rng.randint(0, 4))))[:12])
    prompts = [prompt_of(path) for path in paths]
    single = run(make_index(num_slots, policy=policy), prompts, 1)
    wide = run(make_index(num_slots, policy=policy), prompts, 64)
    assert wide.decisions == single.decisions
    assert wide.final_order == single.final_order
    assert any(evicted for _, _, evicted, _ in single.decisions) and any(hit for hit, *_ in single.decisions)
    assert wide.num_windows < 0.8 * single.num_windows, "windows that always hold one request prove nothing"


def plan_and_reason(index: CacheIndex, *texts: str) -> tuple[list[StorePlan], Deferred | None]:
    lease_ids = [str(number) for number in range(len(texts))]
    prompts = [keys_of(text) for text in texts]
    planned, stopped_by = plan_window(index.prepare_request, prompts, client="c", now=0.0, lease_ids=lease_ids)
    return [stored for _, stored in planned], stopped_by


def plan(index: CacheIndex, *texts: str) -> list[StorePlan]:
    return plan_and_reason(index, *texts)[0]


def test_unrelated_requests_share_a_window() -> None:
    plans, stopped_by = plan_and_reason(make_index(9), "abc", "def", "ghi")
    assert ([names(stored.refs) for stored in plans], stopped_by) == (["abc", "def", "ghi"], None)


def test_a_request_that_must_load_what_an_earlier_one_stores_ends_the_window() -> None:
    index = make_index(9)
    plans, stopped_by = plan_and_reason(index, "ab", "xy", "abc", "z")
    assert ([names(stored.refs) for stored in plans], stopped_by) == (["ab", "xy"], Deferred.KEY_BEING_WRITTEN)
    assert index.counts().leases == 0
    assert contents(index) == "" and index.counts().writing == 4


def test_a_request_that_would_evict_what_an_earlier_one_stores_or_loads_ends_the_window() -> None:
    index = make_index(4)
    plans, stopped_by = plan_and_reason(index, "ab", "cd", "ef")
    assert (len(plans), stopped_by) == (2, Deferred.ROOM_IN_USE)
    index = make_index(4)
    store(index, "ab")
    assert len(plan(index, "ab", "cd", "ef")) == 2


def test_a_deferred_store_leaves_no_trace_of_its_request() -> None:
    index = make_index(4)
    store(index, "ab")
    writing = index.prepare_store(keys_of("cd"), client="c", now=0.0)
    before, counts = list(index.entries()), index.counts()
    outcome = index.prepare_request(keys_of("abefg"), lease_id="l", client="c", now=0.0, defer=True)
    assert outcome is Deferred.ROOM_IN_USE
    assert index.try_store(keys_of("abefg"), client="c", now=0.0, defer=True) is Deferred.ROOM_IN_USE
    assert list(index.entries()) == before and index.counts() == counts
    finish(index, writing)
    planned = index.prepare_request(keys_of("abefg"), lease_id="l", client="c", now=0.0, defer=True)
    assert not isinstance(planned, Deferred) and names(planned[1].evicted) == "dc"


def test_refusing_room_is_deferred_while_slots_wait_to_be_settled() -> None:
    index = occupied_index(3, "LRU", num_leased=0, num_quarantined=1)
    assert index.try_store(keys_of("abc"), client="c", now=0.0, defer=True) is Deferred.ROOM_IN_USE
    index.settle(1, index.unsettled(1))
    planned = index.try_store(keys_of("abcd"), client="c", now=0.0, defer=True)
    assert isinstance(planned, StorePlan) and planned.num_refused == 1


def test_the_first_request_is_planned_whatever_is_unfinished() -> None:
    index = make_index(2)
    index.prepare_store(keys_of("ab"), client="c", now=0.0)
    assert [stored.num_refused for stored in plan(index, "xy", "z")] == [2]


def test_no_requests_need_no_plans_and_each_needs_a_lease_id() -> None:
    assert plan(make_index(2)) == []
    with pytest.raises(InvalidRequestError, match=r"1 requests.*not 0"):
        plan_window(make_index(2).prepare_request, [keys_of("a")], client="c", now=0.0, lease_ids=[])
