"""The disk tier of one process: what goes down and up, and ranks that are silent or say what stands in their way."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_ray.errors import DirectoryTakenError, StorageError
from lmcache_ray.index.plans import Deferred, StorePlan
from lmcache_ray.storage.disk_space import disk_capacity
from lmcache_ray.tiers.calls import RankAnswer
from lmcache_ray.tiers.spec import Tier
from tests.unit.tier_worlds import CALL_S, LAYOUT, PATIENCE_S, RANKS, World, keys_of, open_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with open_world(tmp_path) as world:
        yield world


# -- down and up ------------------------------------------------------------------------------------------------------


def test_what_is_stored_lies_in_the_files_of_every_rank_and_comes_back(world: World) -> None:
    assert world.store(1, 2, 3) == 3
    assert (world.num_files(), world.num_waiting()) == ([0, 0], 3)
    assert world.write_down() == 1
    assert (world.num_files(), world.num_waiting(), world.where(1, 2, 3)) == ([3, 3], 0, "ccc")
    world.forget_memory()
    assert world.where(1, 2, 3, 4) == "ddd"
    assert world.load(1, 2, 3) == 0, "nothing is in memory"
    assert world.promote(1, 2, 3, 4) == 3
    assert (world.load(1, 2, 3, 4), world.where(1, 2, 3)) == (3, "ccc")
    assert world.write_down() == 0, "what came from there does not go back"
    traffic = world.disk.traffic
    assert (traffic.written, traffic.read, traffic.failed, traffic.dropped) == (3, 3, 0, 0)
    assert world.tiers.problems() == []
    world.check()


def test_few_at_a_time_if_that_is_wanted(tmp_path: Path) -> None:
    with open_world(tmp_path, chunks_at_once=2) as world:
        for number in (1, 2, 3, 4):
            world.store(number)
        assert world.write_down() == 2
        assert world.num_files() == [4, 4]


def test_room_on_the_disk_is_made_by_deleting_files(tmp_path: Path) -> None:
    max_nbytes = 2**18
    capacity = min(disk_capacity(max_nbytes, LAYOUT, rank) for rank in RANKS)
    with open_world(tmp_path, max_nbytes=max_nbytes) as world:
        for number in range(capacity + 3):
            assert world.store(number) == 1
            world.write_down()
            world.check()
        assert world.num_files() == [capacity, capacity]
        assert (world.disk.traffic.written, world.disk.traffic.evicted) == (capacity + 3, 3)
        assert [world.where(number) for number in range(4)] == ["", "", "", "d"]


def test_memory_that_only_stages_is_given_up_when_the_files_are_there(tmp_path: Path) -> None:
    with open_world(tmp_path, keeps=False) as world:
        world.store(1, 2)
        assert world.where(1, 2) == "cc"
        world.write_down()
        assert world.where(1, 2) == "dd"
        assert (world.promote(1, 2), world.load(1, 2)) == (2, 2)
        assert world.where(1, 2) == "dd", "after the load it is as before"
        world.check()


def test_a_store_that_must_wait_finds_room_when_others_have_gone_down(world: World) -> None:
    world.store(1, 2, 3, 4)
    keys = keys_of(5, 6)
    assert world.service.prepare_store(keys, client="w", start=0, rank=None, patient=True) is Deferred.NOT_WHOLE
    writer = threading.Timer(0.05, world.write_down)
    writer.start()
    world.tiers.promoter.wait_for_room(PATIENCE_S)
    writer.join()
    plan = world.service.prepare_store(keys, client="w", start=0, rank=None, patient=True)
    assert isinstance(plan, StorePlan) and len(plan.refs) == 2


# -- ranks that are silent --------------------------------------------------------------------------------------------


def test_a_rank_that_does_not_hear_of_a_write_makes_it_count_nowhere(world: World) -> None:
    world.ranks.deaf.add(1)
    world.store(1, 2)
    world.write_down()
    assert world.num_files() == [0, 0], "what rank 0 has written is of no use"
    assert (world.disk.traffic.written, world.disk.traffic.failed) == (0, 2)
    assert world.tiers.problems() == ["the disk tier is out of order: rank 1 did not answer in 5 s (for 0 s)"]
    assert world.load(1, 2) == 2, "memory has them"
    world.check()


def test_a_write_that_is_done_but_not_confirmed_is_deleted_when_the_rank_answers_again(world: World) -> None:
    world.ranks.silent.add(1)
    world.store(1, 2)
    world.write_down()
    assert world.num_files() == [0, 0], "it heard of the deletion, too"
    world.ranks.silent.clear()
    world.ranks.deaf.add(1)
    world.now += 60.0
    world.disk.resume()
    assert world.tiers.problems(), "it is still away"
    world.check()


def test_what_a_silent_rank_has_not_deleted_is_deleted_with_its_next_deletions(world: World) -> None:
    world.store(1, 2, 3)
    world.write_down()
    world.ranks.deaf.add(1)
    result = world.tiers.clear(keys_of(1, 2), [Tier.DISK])
    assert (result.removed[Tier.DISK], result.pending_ranks) == (2, (1,))
    assert (world.num_files(), world.where(1, 2, 3)) == ([1, 3], "ccc")
    world.ranks.deaf.clear()
    assert world.tiers.clear(keys_of(3), [Tier.DISK]).pending_ranks == ()
    assert world.num_files() == [0, 0]


def test_while_a_rank_is_silent_nothing_is_held_back_and_stores_go_on(world: World) -> None:
    world.ranks.deaf.add(0)
    world.store(1, 2, 3, 4)
    world.write_down()
    assert world.disk.traffic.dropped == 0 and world.num_waiting() == 0
    for number in range(10, 20):
        assert world.store(number, number + 100) == 2
        assert world.num_waiting() == 0
        assert world.load(number, number + 100) == 2
    assert world.write_down() == 0
    world.check()


def test_after_the_pause_the_ranks_are_asked_and_the_tier_comes_back(world: World) -> None:
    world.ranks.deaf.add(1)
    world.store(1)
    world.write_down()
    world.ranks.asked.clear()
    world.disk.resume()
    assert world.ranks.asked == [], "not so soon"
    world.now += 1.0
    world.disk.resume()
    assert world.ranks.asked == ["probe_disk"] and world.tiers.problems()
    world.ranks.deaf.clear()
    world.now += 1.5
    world.disk.resume()
    assert world.ranks.asked == ["probe_disk"], "the second pause is longer"
    world.now += 0.5
    world.disk.resume()
    assert world.tiers.problems() == []
    world.store(2)
    assert world.num_waiting() == 1
    world.write_down()
    assert (world.num_files(), world.where(2)) == ([1, 1], "c")
    world.check()


def test_what_waits_when_the_tier_fails_is_let_go(tmp_path: Path) -> None:
    with open_world(tmp_path, chunks_at_once=1) as world:
        for number in (1, 2, 3):
            world.store(number)
        world.ranks.deaf.add(1)
        assert world.disk.write_some() is True
        assert (world.num_waiting(), world.disk.traffic.failed, world.disk.traffic.dropped) == (0, 1, 2)
        assert world.disk.write_some() is False
        assert world.store(4, 5, 6, 7) == 4, "they are evicted from memory like all others"
        world.check()


def test_a_rank_that_cannot_be_asked_for_chunks_makes_misses_and_leaves_the_files(world: World) -> None:
    world.store(1, 2)
    world.write_down()
    world.forget_memory()
    world.ranks.deaf.add(1)
    assert (world.promote(1, 2), world.load(1, 2)) == (0, 0)
    assert (world.where(1, 2), world.disk.traffic.read) == ("", 0), "nobody waits for that disk twice"
    assert "rank 1 did not answer" in world.tiers.problems()[0]
    world.ranks.deaf.clear()
    with world.service.at_now() as (index, _):
        assert index.memory.counts().writing == 2, "rank 1 may still be at it"
    world.now += CALL_S
    with world.service.at_now() as (index, _):
        assert index.memory.settle(1, index.memory.unsettled(1)) == 2
    world.disk.resume()
    assert (world.where(1, 2), world.tiers.problems()) == ("dd", []), "it has proved itself"
    assert (world.promote(1, 2), world.load(1, 2)) == (2, 2)
    world.check()


def test_a_write_whose_answer_is_lost_in_an_error_costs_no_room(world: World) -> None:
    def fail(rank: int, answer: RankAnswer) -> RankAnswer:
        raise ConnectionError("the message was lost")

    world.ranks.spoilt["write_disk"] = fail
    world.store(1, 2)
    with pytest.raises(ConnectionError):
        world.disk.write_some()
    world.disk.suspend("it failed")
    assert world.num_waiting() == 0
    world.check()
    world.ranks.spoilt.clear()
    world.now += 60.0
    world.disk.resume()
    world.store(3)
    world.write_down()
    assert world.where(3) == "c" and world.disk.traffic.written == 1


# -- ranks that say what stands in their way --------------------------------------------------------------------------


def full(rank: int, answer: RankAnswer) -> RankAnswer:
    """Rank 1 has no room on its device, after the first chunk."""
    if rank == 0:
        return answer
    return RankAnswer(outcomes=answer.outcomes[:1], problem="No space left on device")


def test_a_full_disk_takes_what_all_ranks_have_written_and_no_more(world: World) -> None:
    world.ranks.spoilt = {"write_disk": full, "probe_disk": full}
    world.store(1, 2, 3)
    world.write_down()
    world.forget_memory()
    assert (world.where(1, 2, 3), world.num_files()) == ("d", [1, 1])
    assert world.tiers.problems() == ["the disk tier is out of order: rank 1: No space left on device (for 0 s)"]
    assert (world.promote(1), world.load(1)) == (1, 1), "what is there can be read"
    assert world.tiers.problems(), "that does not make room"
    world.now += 1.0
    world.disk.resume()
    assert "for 1 s" in world.tiers.problems()[0]
    world.ranks.spoilt.clear()
    world.now += 30.0
    world.disk.resume()
    assert world.tiers.problems() == []
    world.store(1, 2, 3)
    world.write_down()
    assert world.num_files() == [3, 3]
    world.check()


def test_a_directory_that_cannot_be_used_at_the_start_is_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.write_text("a file")
    with open_world(root) as world:
        assert "out of order" in world.tiers.problems()[0] and str(root) in world.tiers.problems()[0]
        assert (world.store(1, 2), world.num_waiting(), world.load(1, 2)) == (2, 0, 2)
        assert world.tiers.clear(None).removed == {Tier.CPU: 2, Tier.DISK: 0}
        root.unlink()
        world.now += 1.0
        world.disk.resume()
        assert world.tiers.problems() == []
        world.store(1, 2)
        world.write_down()
        assert world.num_files() == [2, 2]


def test_a_directory_of_another_world_is_refused_with_its_name(tmp_path: Path) -> None:
    with open_world(tmp_path):
        other = World(tmp_path, life="life 2")
        with pytest.raises(DirectoryTakenError, match="world"):
            other.disk.open(CALL_S)
        other.close()
    with open_world(tmp_path, life="life 2") as other:
        assert other.tiers.problems() == []


def test_a_tier_that_fails_after_it_was_suspended_by_an_error_comes_back_as_well(world: World) -> None:
    world.disk.suspend("StorageError: something")
    assert world.tiers.problems() == ["the disk tier is out of order: StorageError: something (for 0 s)"]
    world.store(1)
    assert world.num_waiting() == 0
    world.now += 1.0
    world.disk.resume()
    world.store(2)
    assert (world.num_waiting(), world.tiers.problems()) == (1, [])


# -- the tier's own thread --------------------------------------------------------------------------------------------


def test_closing_copies_down_what_waits(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tiers.open(CALL_S)
    for number in range(4):
        world.store(number)
    world.close()
    assert world.num_files() == [4, 4]
    world.close()
    with open_world(tmp_path, life="life 2") as world:
        assert [world.where(number) for number in range(4)] == ["d"] * 4


def test_closing_does_not_wait_for_what_will_never_be_written(tmp_path: Path) -> None:
    """All four are let go by a disk that has no room for them; nobody has to tell the one who waits."""
    world = World(tmp_path, max_nbytes=2**18)
    world.disk.open(CALL_S)
    capacity = min(disk_capacity(2**18, LAYOUT, rank) for rank in RANKS)
    for number in range(capacity):
        world.store(number)
        world.write_down()
        world.forget_memory()
        assert world.service.lookup(keys_of(number), client="reader", lease_id=f"r{number}") == 1
    waited = threading.Event()

    def wait() -> None:
        assert world.service.wait_until(lambda index: not index.num_behind(), PATIENCE_S)
        waited.set()

    world.store(100, 101)
    assert world.num_waiting() == 2
    waiter = threading.Thread(target=wait)
    waiter.start()
    assert world.disk.write_some() is False
    assert waited.wait(PATIENCE_S)
    waiter.join()
    assert world.disk.traffic.dropped == 2
    world.close()


def test_an_error_that_nobody_foresaw_stands_in_the_health_and_the_thread_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path)
    failed = threading.Event()

    def fail(rank: int, answer: RankAnswer) -> RankAnswer:
        failed.set()
        raise StorageError("a bug")

    world.ranks.spoilt["write_disk"] = fail
    world.tiers.open(CALL_S)
    world.store(1)
    assert failed.wait(PATIENCE_S)
    assert world.service.wait_until(lambda index: Tier.DISK in index.suspended, PATIENCE_S)
    assert world.tiers.problems() == ["the disk tier is out of order: StorageError: a bug (for 0 s)"]
    assert world.store(2, 3, 4, 5) == 4
    world.ranks.spoilt.clear()
    world.now += 60.0
    assert world.service.wait_until(lambda index: Tier.DISK not in index.suspended, PATIENCE_S)
    world.store(6)
    assert world.service.wait_until(lambda index: not index.num_behind(), PATIENCE_S)
    assert world.num_files() == [2, 2], "what was written before the error is of no use"
    world.tiers.clear(keys_of(6), [Tier.DISK])
    assert world.num_files() == [0, 0], "and goes with the next deletion"
    world.close()
