"""Loading: which run is pinned, and what a lease is worth."""

import pytest

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import Deferred, LoadPlan
from tests.unit.index_builders import contents, finish, keys_of, make_index, names, store


def load(index: CacheIndex, text: str, lease_id: str = "lease", start: int = 0, now: float = 0.0) -> LoadPlan:
    return index.prepare_load(keys_of(text), lease_id=lease_id, client="reader", now=now, start=start)


def test_a_load_names_the_slots_that_the_store_wrote() -> None:
    index = make_index(8)
    stored = store(index, "abc")
    plan = load(index, "abcd")
    assert plan.refs == stored.refs and plan.start == 0


def test_refs_begin_at_start_but_the_run_is_counted_from_the_first_key() -> None:
    index = make_index(8)
    store(index, "abc")
    assert names(load(index, "abcd", start=1).refs) == "bc"
    assert load(index, "abcd", start=3).refs == ()
    assert load(index, "xbc", start=1).refs == ()
    with pytest.raises(InvalidRequestError, match="-2"):
        load(index, "abc", start=-2)


def test_a_load_pins_its_refs_only_and_uses_the_whole_run() -> None:
    index = make_index(6)
    store(index, "abc")
    store(index, "xyz")
    load(index, "abc", start=1)
    assert contents(index) == "zyxcba"
    assert names(store(index, "pqrs").evicted) == "zyxa"


def test_a_load_of_nothing_makes_no_lease() -> None:
    index = make_index(4)
    assert load(index, "ab").refs == ()
    assert index.counts().leases == 0
    assert index.release("lease") is False


def test_pin_is_a_lookup_with_a_lease() -> None:
    index = make_index(2)
    store(index, "ab")
    assert index.pin(keys_of("abc"), "request", "engine", now=0.0) == 2
    assert index.pin(keys_of("abc"), "request", "engine", now=50.0) == 2
    assert store(index, "x").num_refused == 1
    assert index.counts().leases == 1
    assert index.release("request") is True
    assert names(store(index, "x").refs) == "x"


def test_pinning_is_a_use() -> None:
    index = make_index(4)
    store(index, "ab")
    store(index, "xy")
    index.pin(keys_of("ab"), "request", "engine", now=0.0)
    assert contents(index) == "yxba"


def test_what_is_leased_is_kept_until_time_is_up_or_the_client_is_gone() -> None:
    index = make_index(2)
    store(index, "a")
    store(index, "b")
    load(index, "a", "first", now=0.0)
    load(index, "b", "second", now=9.0)
    assert index.renew("first", now=5.0) is True
    assert index.expire(14.0).lease_ids == ()
    assert index.expire(15.0).lease_ids == ("first",)
    assert names(store(index, "xy", now=15.0).evicted) == "a"
    assert index.drop_client("reader").lease_ids == ("second",)
    assert index.renew("second", now=0.0) is False
    index.check_integrity()


def test_a_load_ends_with_its_call_and_a_pinned_lookup_lasts_longer() -> None:
    index = make_index(4)
    store(index, "abcd")
    index.pin(keys_of("a"), "request", "engine", now=0.0)
    plan = load(index, "b", "load")
    index.share(plan, "shared load", client="reader", now=0.0)
    load(index, "abcd", "whole load", now=1.0)
    assert index.expire(9.9).lease_ids == ()
    assert index.expire(10.0).lease_ids == ("load", "shared load")
    assert index.expire(11.0).lease_ids == ("whole load",)
    assert index.expire(99.0).lease_ids == ()
    assert index.expire(100.0).lease_ids == ("request",)


def test_a_deferring_load_stops_at_a_key_that_is_being_written_and_changes_nothing() -> None:
    index = make_index(8)
    store(index, "a")
    store(index, "x")
    writing = index.prepare_store(keys_of("abc"), client="writer", now=0.0)
    order = contents(index)
    deferred = index.prepare_request(keys_of("abc"), lease_id="l", client="reader", now=0.0, defer=True)
    assert deferred is Deferred.KEY_BEING_WRITTEN
    assert contents(index) == order and index.counts().leases == 0
    assert names(load(index, "abc").refs) == "a"
    finish(index, writing)
    assert not index.table.is_run_being_written(keys_of("abc"))
    assert names(load(index, "abc").refs) == "abc"


def test_a_deferring_load_stopped_by_an_unknown_key_does_not_wait() -> None:
    index = make_index(8)
    index.prepare_store(keys_of("b"), client="writer", now=0.0)
    assert not index.table.is_run_being_written(keys_of("xb"))
    planned = index.prepare_request(keys_of("xb"), lease_id="l", client="reader", now=0.0, defer=True)
    assert not isinstance(planned, Deferred) and planned[0].refs == ()


def test_a_shared_load_stays_pinned_until_its_last_lease_ends() -> None:
    index = make_index(1)
    store(index, "a")
    plan = load(index, "a", "mine")
    index.share(plan, "yours", client="reader", now=0.0)
    index.release("mine")
    assert store(index, "b").refs == (), "there is no room: a is still read"
    index.release("yours")
    assert names(store(index, "b").evicted) == "a"


def test_sharing_a_load_is_no_further_use_of_it() -> None:
    """In a first-rank world every rank reads under a lease of its own; LFU must not count each of them."""
    index = make_index(2, policy="LFU")
    store(index, "a")
    store(index, "b")
    plan = load(index, "a", "mine")
    for lease_id in ("yours", "theirs", "ours"):
        index.share(plan, lease_id, client="reader", now=0.0)
    for _ in range(2):
        load(index, "b", "mine")
    for lease_id in ("mine", "yours", "theirs", "ours"):
        index.release(lease_id)
    assert names(store(index, "c").evicted) == "a"
