"""One chunking rule for lookup, store and retrieve, and where a retrieve may and may not write."""

import copy
from pathlib import Path

import numpy as np
import pytest

from tests.unit.engine_builders import POISON, make_world, poison, random_rows, rows_of

C = 4
LENGTHS = [0, 1, C - 1, C, C + 1, 2 * C - 1, 129 * C]


@pytest.mark.parametrize(("world_size", "use_mla"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("save_unfull_chunk", [False, True])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_lookup_store_and_retrieve_count_alike(
    tmp_path: Path, num_tokens: int, save_unfull_chunk: bool, world_size: int, use_mla: bool
) -> None:
    num_rows = max(num_tokens, C) + C
    expected = num_tokens if save_unfull_chunk else num_tokens // C * C
    tokens, rows = list(range(num_tokens)), random_rows(num_tokens, num_rows)
    with make_world(
        tmp_path,
        world_size,
        use_mla=use_mla,
        num_rows=num_rows,
        save_unfull_chunk=save_unfull_chunk,
        capacity_chunks=130,
    ) as world:
        engine = world.engines[0]
        assert engine.lookup(tokens) == 0
        assert world.retrieve(tokens, rows) == []
        assert world.store(tokens, rows) == expected
        assert world.store(tokens, rows) == expected, "stored again: it is cached"
        assert engine.lookup(tokens) == expected
        originals = [rows_of(kv, rows[:expected]) for kv in world.kvs]
        for kv in world.kvs:
            poison(kv)
        assert world.retrieve(tokens, rows) == list(range(expected))
        assert [rows_of(kv, rows[:expected]) for kv in world.kvs] == originals
        assert world.index().counts().ready == -(-expected // C)
        assert engine.clear(tokens).num_removed == -(-expected // C)
        world.check_idle()


def test_the_tail_of_a_longer_prompt_is_not_that_of_a_shorter_one(tmp_path: Path) -> None:
    """A partial chunk is found by the very prompt that it ends; a longer one shares the full chunks only."""
    with make_world(tmp_path, save_unfull_chunk=True) as world:
        assert world.store(list(range(7)), random_rows(7)) == 7
        found = [world.engines[0].lookup(list(range(length))) for length in (4, 6, 7, 8)]
        assert found == [4, 4, 7, 4]


@pytest.mark.parametrize("use_mla", [False, True])
@pytest.mark.parametrize("save_unfull_chunk", [False, True])
def test_a_retrieve_may_start_anywhere_and_writes_nothing_below(
    tmp_path: Path, save_unfull_chunk: bool, use_mla: bool
) -> None:
    num_tokens = 3 * C + 2
    cached = num_tokens if save_unfull_chunk else 3 * C
    tokens, rows = list(range(num_tokens)), random_rows(num_tokens)
    with make_world(tmp_path, 2, use_mla=use_mla, save_unfull_chunk=save_unfull_chunk) as world:
        world.store(tokens, rows)
        originals = copy.deepcopy(world.kvs)
        for start in range(num_tokens + 1):
            for kv in world.kvs:
                poison(kv)
            mask = np.arange(num_tokens) >= start
            assert world.retrieve(tokens, rows, mask=mask) == list(range(start, cached))
            wanted = rows[start:cached]
            others = np.setdiff1d(np.arange(64), wanted)
            for kv, original in zip(world.kvs, originals, strict=True):
                assert rows_of(kv, wanted) == rows_of(original, wanted), f"start {start}"
                assert set(rows_of(kv, others)) == {POISON}, f"start {start}"
        world.check_idle()


def test_only_the_cached_prefix_of_a_longer_prompt_is_delivered(tmp_path: Path) -> None:
    with make_world(tmp_path) as world:
        rows = random_rows(20)
        world.store(list(range(8)), rows[:8])
        original = copy.deepcopy(world.kvs[0])
        poison(world.kvs[0])
        assert world.retrieve(list(range(20)), rows) == list(range(8))
        assert rows_of(world.kvs[0], rows[:8]) == rows_of(original, rows[:8])
        assert set(rows_of(world.kvs[0], rows[8:])) == {POISON}


@pytest.mark.parametrize("use_mla", [False, True])
def test_a_masked_store_continues_what_is_cached_and_nothing_else(tmp_path: Path, use_mla: bool) -> None:
    tokens, rows = list(range(12)), random_rows(12)
    with make_world(tmp_path, 2, use_mla=use_mla) as world:
        from_second_chunk = [False] * 4 + [True] * 8
        assert world.store(tokens, rows, mask=from_second_chunk) == 0, "its head is not cached"
        assert world.index().counts().ready == 0
        assert world.store(tokens[:4], rows[:4]) == 4
        assert world.store(tokens, rows, mask=from_second_chunk) == 12
        assert world.store(tokens, rows, mask=[False] * 12) == 12, "nothing to store: all is cached"
        original = copy.deepcopy(world.kvs)
        for kv in world.kvs:
            poison(kv)
        assert world.retrieve(tokens, rows) == list(range(12))
        assert [rows_of(kv, rows) for kv in world.kvs] == [rows_of(kv, rows) for kv in original]
        world.check_idle()


def test_short_hits_are_not_retrieved_below_the_minimum(tmp_path: Path) -> None:
    with make_world(tmp_path, min_retrieve_tokens=6) as world:
        tokens, rows, engine = list(range(12)), random_rows(12), world.engines[0]
        world.store(tokens, rows)
        assert engine.lookup(tokens) == 12
        assert world.retrieve(tokens, rows, mask=np.arange(12) >= 6) == list(range(6, 12))
        assert engine.loadable(tokens, 6) == 5
        poison(world.kvs[0])
        assert world.retrieve(tokens, rows, mask=np.arange(12) >= 7) == []
        assert engine.loadable(tokens, 7) == 0
        assert set(rows_of(world.kvs[0], rows)) == {POISON}
        world.check_idle()
