"""Stores where every rank calls its own engine: a chunk is READY only when the last rank has committed it."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmcache_ray.connector.base import KVConnector
from lmcache_ray.connector.paged import PagedConnector
from lmcache_ray.engine import LMCacheEngine
from tests.unit.engine_builders import KV, World, make_world, poison, random_rows, rows_of

TOKENS = list(range(12))


def store_on(world: World, rank: int, tokens: list[int], rows: np.ndarray) -> int:
    return world.engines[rank].store(tokens, kvcaches=world.kvs[rank], slot_mapping=rows)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_store_one_after_the_other(tmp_path: Path, world_size: int) -> None:
    with make_world(tmp_path, world_size) as world:
        rows = random_rows(12)
        order = random.Random(world_size).sample(range(world_size), world_size)
        for rank in order[:-1]:
            assert store_on(world, rank, TOKENS, rows) == 0
            assert world.engines[rank].lookup(TOKENS) == 0
            world.index().check_integrity()
        assert store_on(world, order[-1], TOKENS, rows) == 12
        assert [store_on(world, rank, TOKENS, rows) for rank in order] == [12] * world_size
        originals = [rows_of(kv, rows) for kv in world.kvs]
        for kv in world.kvs:
            poison(kv)
        assert world.retrieve(TOKENS, rows) == list(range(12))
        assert [rows_of(kv, rows) for kv in world.kvs] == originals
        world.check_idle()


def test_ranks_that_store_prompts_in_different_order(tmp_path: Path) -> None:
    """They share a prefix, which each rank writes once, whichever prompt it comes with."""
    longer = [*TOKENS, 50, 51, 52, 53]
    with make_world(tmp_path, 2) as world:
        rows = random_rows(16)
        assert store_on(world, 0, TOKENS, rows[:12]) == 0
        assert store_on(world, 1, longer, rows) == 12
        assert store_on(world, 0, longer, rows) == 16
        assert store_on(world, 1, TOKENS, rows[:12]) == 12
        world.check_idle()


@pytest.mark.parametrize("use_mla", [False, True])
def test_ranks_that_store_at_the_same_time(tmp_path: Path, use_mla: bool) -> None:
    prompts = [[*TOKENS[: 4 * (number % 3)], *range(100 * number, 100 * number + 8)] for number in range(12)]
    with make_world(tmp_path, 4, use_mla=use_mla, capacity_chunks=64) as world:

        def store_all(engine: LMCacheEngine, kv: KV) -> None:
            rank = engine.metadata.worker_id
            for number in random.Random(rank).sample(range(12), 12):
                engine.store(prompts[number], kvcaches=kv, slot_mapping=random_rows(len(prompts[number]), seed=number))

        world.on_ranks(store_all)
        assert [world.engines[0].lookup(prompt) for prompt in prompts] == [len(prompt) for prompt in prompts]
        world.check_idle()


class FailingConnector:
    """A connector whose memory fails: the copy number `fail_at` (from 0) raises, half done."""

    def __init__(self, inner: KVConnector, fail_at: int) -> None:
        self._inner = inner
        self._copies_left = fail_at

    @property
    def num_slots(self) -> int:
        return self._inner.num_slots

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        self._inner.gather(shard, rows[:2])
        self._count()
        self._inner.gather(shard, rows)

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        self._count()
        self._inner.scatter(shard, rows, first_row)

    def _count(self) -> None:
        self._copies_left -= 1
        if self._copies_left < 0:
            raise BrokenMemoryError("the KV memory is gone")


class BrokenMemoryError(Exception):
    """What a device may raise: an error that is none of ours."""


def with_failing_copy(world: World, rank: int, fail_at: int) -> LMCacheEngine:
    """The engine of a rank, whose own connector fails."""
    connector = FailingConnector(PagedConnector(world.layout.ranks[rank], world.kvs[rank]), fail_at)
    return LMCacheEngine(replace(world.engines[rank]._parts, connector=connector))


@pytest.mark.parametrize("fail_at", [0, 1, 2])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_to_copy_takes_the_chunks_back_for_all(tmp_path: Path, failing: int, fail_at: int) -> None:
    rows = random_rows(12)
    with make_world(tmp_path, 3, capacity_chunks=6, call_timeout_s=30) as world:
        broken = with_failing_copy(world, failing, fail_at)
        for rank in range(3):
            if rank == failing:
                with pytest.raises(BrokenMemoryError):
                    broken.store(TOKENS, slot_mapping=rows)
            else:
                store_on(world, rank, TOKENS, rows)
            world.index().check_integrity()
            assert world.engines[rank].lookup(TOKENS) == 0
        world.let_pass(31)  # ranks that came after the failure have opened the chunks anew, and wait in vain
        world.check_idle()
        assert world.index().counts().free == 6, "no slot leaks"
        assert world.store(TOKENS, rows) == 12
        world.check_idle()


def test_a_failed_copy_of_a_lone_rank_leaves_nothing(tmp_path: Path) -> None:
    rows = random_rows(12)
    with make_world(tmp_path, capacity_chunks=3) as world:
        broken = with_failing_copy(world, 0, 1)
        for _ in range(3):
            with pytest.raises(BrokenMemoryError):
                with_failing_copy(world, 0, 1).store(TOKENS, slot_mapping=rows)
            world.check_idle()
            assert (broken.lookup(TOKENS), world.index().counts().free) == (0, 3)
        assert world.store(TOKENS, rows) == 12


def test_a_failed_read_ends_its_lease(tmp_path: Path) -> None:
    rows = random_rows(12)
    with make_world(tmp_path) as world:
        world.store(TOKENS, rows)
        with pytest.raises(BrokenMemoryError):
            with_failing_copy(world, 0, 1).retrieve(TOKENS, slot_mapping=rows)
        world.check_idle()
        assert world.retrieve(TOKENS, rows) == list(range(12))


def test_a_rank_that_never_comes_holds_no_slot_for_long(tmp_path: Path) -> None:
    rows = random_rows(12)
    with make_world(tmp_path, 2, capacity_chunks=3, call_timeout_s=30) as world:
        assert store_on(world, 0, TOKENS, rows) == 0
        assert world.index().counts().writing == 3
        world.let_pass(31)
        assert world.index().counts().free == 3
        assert store_on(world, 1, TOKENS, rows) == 0, "the late rank opens the chunks anew"
        assert store_on(world, 0, TOKENS, rows) == 12
        world.check_idle()
