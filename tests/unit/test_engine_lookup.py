"""Lookups that pin, what an engine may load, and clearing."""

from pathlib import Path

import pytest

from tests.unit.engine_builders import World, make_world, random_rows

A, B, D = list(range(0, 12)), list(range(100, 112)), list(range(200, 212))


def store(world: World, tokens: list[int]) -> int:
    return world.store(tokens, random_rows(len(tokens)))


@pytest.mark.parametrize("use_mla", [False, True])
def test_a_pinned_prefix_stays_until_it_is_unpinned(tmp_path: Path, use_mla: bool) -> None:
    with make_world(tmp_path, 2, use_mla=use_mla, capacity_chunks=5) as world:
        engine, rows = world.engines[0], random_rows(12)
        store(world, A)
        assert engine.lookup(A[:8], lookup_id="r1", pin=True) == 8
        assert store(world, B) == 12
        assert (engine.lookup(A), engine.lookup(B)) == (8, 12), "the unpinned tail went"
        assert world.retrieve(A, rows, req_id="r1") == list(range(8))
        assert world.index().counts().leases == 1, "a retrieve does not consume the pin"
        assert store(world, D) == 12
        assert (engine.lookup(A), engine.lookup(B)) == (8, 0)
        engine.lookup_unpin("r1")
        engine.lookup_unpin("r1")
        engine.lookup_unpin("never heard of")
        assert store(world, list(range(500, 520))) == 20, "the whole cache can be had again"
        assert engine.lookup(A) == 0
        world.check_idle()


def test_with_everything_pinned_a_store_answers_at_once_that_it_stored_nothing(tmp_path: Path) -> None:
    with make_world(tmp_path, capacity_chunks=3) as world:
        engine = world.engines[0]
        store(world, A)
        assert engine.lookup(A, lookup_id="r", pin=True) == 12
        assert store(world, B) == 0
        assert store(world, [*A, 1, 2, 3, 4]) == 12, "what was cached before still counts"
        engine.lookup_unpin("r")
        assert store(world, B) == 12
        world.check_idle()


def test_asking_again_renews_and_replaces_the_pin(tmp_path: Path) -> None:
    with make_world(tmp_path, capacity_chunks=3) as world:
        engine = world.engines[0]
        store(world, A)
        for _ in range(3):
            engine.lookup(A, lookup_id="r", pin=True)
        assert world.index().counts().leases == 1
        assert engine.lookup(A[:4], lookup_id="r", pin=True) == 4
        assert store(world, B) == 8, "only the first chunk of A is pinned now"
        assert engine.lookup([], lookup_id="r", pin=True) == 0, "nothing found: nothing pinned"
        assert store(world, B) == 12
        world.check_idle()


def test_all_ranks_speak_of_the_same_pins(tmp_path: Path) -> None:
    with make_world(tmp_path, 2) as world:
        store(world, A)
        world.engines[0].lookup(A, lookup_id="r", pin=True)
        world.engines[1].lookup(A, lookup_id="r", pin=True)
        assert world.index().counts().leases == 1
        world.engines[1].lookup_unpin("r")
        world.check_idle()


def test_a_lookup_without_a_pin_pins_nothing(tmp_path: Path) -> None:
    with make_world(tmp_path) as world:
        store(world, A)
        assert world.engines[0].lookup(A, lookup_id="r") == 12
        world.check_idle()


def test_lookups_look_where_they_are_told(tmp_path: Path) -> None:
    with make_world(tmp_path) as world:
        store(world, A)
        found = {
            tier: world.engines[0].lookup(A, search_range=[tier])
            for tier in ("cpu", "LocalCPUBackend", "disk", "LocalDiskBackend", "remote", "RemoteBackend")
        }
        assert found == {tier: 12 if "cpu" in tier.lower() else 0 for tier in found}
        assert world.engines[0].lookup(A, search_range=["disk", "cpu"]) == 12
        assert world.engines[0].lookup(A, search_range=[]) == 0


@pytest.mark.parametrize("use_mla", [False, True])
def test_loadable_is_never_the_whole_prompt_and_never_negative(tmp_path: Path, use_mla: bool) -> None:
    with make_world(tmp_path, 2, use_mla=use_mla) as world:
        engine = world.engines[0]
        store(world, A[:8])
        assert [engine.loadable(A, computed) for computed in range(13)] == [8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0]
        assert [engine.loadable(A[:8], computed) for computed in range(9)] == [7, 6, 5, 4, 3, 2, 1, 0, 0]
        assert engine.loadable([], 0) == 0
        assert engine.loadable(B, 0) == 0


@pytest.mark.parametrize(("use_mla", "per_rank"), [(False, [3, 3]), (True, [3, 0])])
def test_clear_forgets_a_prompt_or_everything(tmp_path: Path, use_mla: bool, per_rank: list[int]) -> None:
    with make_world(tmp_path, 2, use_mla=use_mla) as world:
        engine = world.engines[1]
        store(world, A)
        store(world, B)
        nothing = {"cpu": [0, 0]}
        result = engine.clear(A)
        assert (result.removed, result.kept, result.pending) == ({"cpu": per_rank}, nothing, ())
        assert (result.num_removed, result.num_kept) == (3, 0)
        assert (engine.lookup(A), engine.lookup(B)) == (0, 12)
        assert engine.clear(locations=["disk", "RemoteBackend"]).removed == nothing
        assert engine.clear([]).num_removed == 0
        assert engine.lookup(B) == 12
        assert engine.clear(locations=["LocalCPUBackend"]).num_removed == 3
        assert engine.lookup(B) == 0
        shard = world.engines[0]._parts.shard
        assert shard is not None and shard.slots.num_committed == 0, "the bytes are given up before clear returns"
        assert store(world, A) == 12, "what was cleared can be stored again"
        world.check_idle()


def test_clear_keeps_what_is_leased_and_says_so(tmp_path: Path) -> None:
    with make_world(tmp_path, 2) as world:
        engine = world.engines[0]
        store(world, A)
        store(world, B)
        engine.lookup(A[:8], lookup_id="r", pin=True)
        result = engine.clear()
        assert (result.num_removed, result.num_kept) == (4, 2)
        assert result.kept == {"cpu": [2, 2]}
        assert (engine.lookup(A), engine.lookup(B)) == (8, 0)
        engine.lookup_unpin("r")
        assert engine.clear(A).num_removed == 2
        world.check_idle()


def test_clearing_everything_takes_no_request(tmp_path: Path) -> None:
    with make_world(tmp_path) as world, pytest.raises(ValueError, match="request_configs"):
        world.engines[0].clear(request_configs={"cache_salt": "s"})


def test_a_prompt_that_does_not_fit_is_stored_as_far_as_it_does(tmp_path: Path) -> None:
    """The head is never given up for the tail: all of it is found afterwards."""
    tokens = list(range(40))
    with make_world(tmp_path, 2, capacity_chunks=5) as world:
        store(world, B)
        assert world.store(tokens, random_rows(40)) == 20
        assert world.engines[0].lookup(tokens) == 20
        assert world.store(tokens, random_rows(40)) == 20
        world.check_idle()


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO"])
def test_under_every_policy_a_full_cache_gives_way_to_the_new_prompt(tmp_path: Path, policy: str) -> None:
    with make_world(tmp_path, capacity_chunks=6, cache_policy=policy) as world:
        for number in range(6):
            tokens = list(range(1000 * number, 1000 * number + 12))
            assert store(world, tokens) == 12
            assert world.engines[0].lookup(tokens) == 12
        assert world.index().counts().ready == 6
        world.check_idle()
