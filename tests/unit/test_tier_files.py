"""The disk tier's files: lost, damaged, cleared while they are written, checked, and found by the next life."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_ray.tiers.calls import RankAnswer
from lmcache_ray.tiers.spec import Tier
from tests.unit.stored_chunks import chunk_of
from tests.unit.tier_worlds import CALL_S, PATIENCE_S, RANKS, Held, World, keys_of, open_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_world(tmp_path) as world:
        yield world


# -- lost and damaged files -------------------------------------------------------------------------------------------


def test_a_chunk_without_its_file_is_forgotten_on_every_rank_and_repaired_by_the_next_store(world: World) -> None:
    world.store(1, 2, 3)
    world.write_down()
    world.forget_memory()
    (lost,) = [path for path in world.files(1) if chunk_of(2).key.hex() in path.name]
    lost.unlink()
    assert (world.promote(1, 2, 3), world.load(1, 2, 3)) == (2, 1)
    assert world.num_files() == [2, 2], "the other rank's half is of no use"
    traffic = world.disk.traffic
    assert (traffic.missing, traffic.read, traffic.damaged) == (1, 2, 0)
    assert world.store(1, 2, 3) == 3
    world.write_down()
    assert world.num_files() == [3, 3]
    world.check()


def test_a_damaged_file_is_a_miss_and_is_counted_once(world: World) -> None:
    world.store(1)
    world.write_down()
    world.forget_memory()
    for rank in RANKS:
        (path,) = world.files(rank)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert (world.promote(1), world.load(1)) == (0, 0)
    assert (world.disk.traffic.damaged, world.num_files()) == (1, [0, 0])
    world.check()


def test_a_chunk_that_only_one_rank_could_read_does_not_count_as_read(world: World) -> None:
    def rank_1_does_nothing(rank: int, answer: RankAnswer) -> RankAnswer:
        return RankAnswer(bytes(len(answer.outcomes))) if rank == 1 else answer

    world.store(1)
    world.write_down()
    world.forget_memory()
    world.ranks.spoilt["read_disk"] = rank_1_does_nothing
    assert (world.promote(1), world.where(1)) == (0, "d")
    traffic = world.disk.traffic
    assert (traffic.read, traffic.missing, traffic.damaged, traffic.unreadable) == (0, 0, 0, 0)


def test_a_check_finds_what_is_wrong_in_both_directions_and_repairs_it(world: World) -> None:
    world.store(1, 2)
    world.write_down()
    assert world.disk.check(repair=False, timeout_s=CALL_S) == []
    world.files(1)[0].unlink()
    stray = world.files(0)[0]
    stray.with_name(stray.name.replace("1.kv", "f.kv")).write_bytes(stray.read_bytes())
    found = world.disk.check(repair=False, timeout_s=CALL_S)
    assert len(found) == 2 and found[0].startswith("rank 0: ") and found[1].startswith("rank 1: ")
    assert len(world.disk.check(repair=True, timeout_s=CALL_S)) == 2
    assert world.disk.check(repair=False, timeout_s=CALL_S) == []
    assert world.num_files() == [1, 1]
    world.ranks.deaf.add(0)
    assert world.disk.check(repair=False, timeout_s=CALL_S) == ["rank 0 did not answer in 5 s"]
    world.check()


# -- clears -----------------------------------------------------------------------------------------------------------


def test_a_clear_counts_each_chunk_once_and_says_what_it_did_in_each_tier(world: World) -> None:
    world.store(1, 2)
    world.write_down()
    world.store(1, 2, 3)
    world.service.lookup(keys_of(1), client="reader", lease_id="r")
    result = world.tiers.clear(None)
    assert result.removed == {Tier.CPU: 2, Tier.DISK: 1} and result.kept == {Tier.CPU: 1, Tier.DISK: 1}
    assert (result.num_removed, result.num_kept, result.pending_ranks) == (2, 1, ())
    assert (world.num_files(), world.num_waiting(), world.where(1, 2, 3)) == ([1, 1], 0, "c")
    world.service.release(["r"])
    assert world.tiers.clear(None, [Tier.DISK]).removed == {Tier.CPU: 0, Tier.DISK: 1}
    assert (world.num_files(), world.where(1)) == ([0, 0], "c")
    world.check()


def test_a_chunk_that_is_cleared_while_it_is_written_has_no_file_afterwards(world: World) -> None:
    world.store(1, 2)
    world.ranks.held["write_disk"] = held = Held()
    writer = threading.Thread(target=world.write_down)
    writer.start()
    assert held.is_reached.wait(PATIENCE_S)
    world.tiers.clear(keys_of(1))
    held.may_go_on.set()
    writer.join()
    world.forget_memory()
    assert (world.where(1), world.where(2), world.num_files()) == ("", "d", [1, 1])
    world.check()


# -- lives ------------------------------------------------------------------------------------------------------------


def test_the_next_life_finds_what_all_ranks_have_and_deletes_the_rest(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:
        world.store(1, 2, 3)
        world.write_down()
        lost = world.files(1)[0]
    lost.unlink()
    with open_world(tmp_path, life="life 2") as world:
        assert world.num_files() == [2, 2]
        there = [number for number in (1, 2, 3) if world.where(number)]
        assert [world.where(number) for number in there] == ["d", "d"]
        assert (world.promote(there[0]), world.load(there[0])) == (1, 1)
        assert world.store(1, 2, 3) == 3
        world.write_down()
        assert world.num_files() == [3, 3]
        world.check()


def test_the_order_of_use_survives(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:
        for number in (1, 2, 3):
            world.store(number)
            world.write_down()
        world.service.lookup(keys_of(1), client="reader", lease_id=None)
    with open_world(tmp_path, life="life 2") as world, world.service.at_now() as (index, _):
        assert index.disk is not None
        assert [ref.key for ref, _ in index.disk.entries()] == keys_of(2, 3, 1)


def test_generations_of_a_rank_that_was_away_are_not_given_out_again(tmp_path: Path) -> None:
    generations = []
    for life in ("life 1", "life 2", "life 3"):
        with open_world(tmp_path, life=life) as world:
            world.store(1)
            world.write_down()
            with world.service.at_now() as (index, _):
                assert index.disk is not None
                generations += [ref.generation for ref, _ in index.disk.entries()]
            for path in world.files(0):
                path.unlink()
    assert len(set(generations)) == 3 and generations == sorted(generations)


def test_a_write_that_was_under_way_when_the_disk_failed_does_not_end_the_outage(world: World) -> None:
    assert world.store(1) == 1
    world.write_down()
    world.forget_memory()
    assert world.store(2) == 1
    writing = world.ranks.held["write_disk"] = Held()
    thread = threading.Thread(target=world.write_down)
    thread.start()
    assert writing.is_reached.wait(PATIENCE_S)
    world.ranks.silent = {0}
    assert world.promote(1) == 0
    world.ranks.silent = set()
    writing.may_go_on.set()
    thread.join(PATIENCE_S)
    assert world.where(1) == "", "nobody reads from a disk that has just failed"
    world.now += 60.0
    world.disk.resume()
    assert world.where(1) == "d"
    assert world.store(3) == 1
    assert world.num_waiting() == 1, "what is stored now goes down again"
    world.write_down()
    assert world.num_waiting() == 0


def test_what_is_cleared_before_anybody_has_seen_the_disk_is_not_found_there(tmp_path: Path) -> None:
    with open_world(tmp_path) as world:
        assert world.store(1, 2, 3) == 3
        world.write_down()
    later = World(tmp_path, life="life 2")
    counts = later.tiers.clear(keys_of(2), [Tier.DISK])
    assert counts.pending_ranks == RANKS, "nothing has been deleted yet"
    later.disk.open(CALL_S)
    assert (later.where(1), later.where(2), later.where(3)) == ("d", "", "d")
    assert later.num_files() == [2, 2]
    later.check()
    later.close()
