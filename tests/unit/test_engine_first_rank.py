"""Worlds in which rank 0 stores for all (MLA) and every rank calls its own engine."""

import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from lmcache_ray.engine import LMCacheEngine
from lmcache_ray.errors import InvalidRequestError, LMCacheRayError
from tests.unit.engine_builders import KV, World, make_world, poison, random_rows, rows_of

TOKENS, OTHERS = list(range(12)), list(range(100, 112))
ROWS = random_rows(12)
LONG_S = 30.0

Result = TypeVar("Result")


def outcomes(world: World, call: Callable[[LMCacheEngine, KV], Result]) -> list[Result | BaseException]:
    """`call` on every rank at once: what each returned or raised."""
    with ThreadPoolExecutor(len(world.engines)) as threads:
        futures = [threads.submit(call, engine, kv) for engine, kv in zip(world.engines, world.kvs, strict=True)]
        return [future.exception() or future.result() for future in futures]


def counts(world: World, call: Callable[[LMCacheEngine, KV], torch.Tensor]) -> list[int | type[BaseException]]:
    """`call`, a retrieve, on every rank at once: tokens delivered, or the error's type."""
    results = outcomes(world, call)
    return [int(result.sum()) if isinstance(result, torch.Tensor) else type(result) for result in results]


def retrieve(tokens: list[int], rows: np.ndarray = ROWS) -> Callable[[LMCacheEngine, KV], torch.Tensor]:
    return lambda engine, kv: engine.retrieve(tokens, kvcaches=kv, slot_mapping=rows)


def test_only_rank_0_copies_and_every_rank_has_the_bytes(tmp_path: Path) -> None:
    with make_world(tmp_path, 3, use_mla=True) as world:
        original = copy.deepcopy(world.kvs[0])
        for kv in world.kvs[1:]:
            poison(kv)
        stored = world.on_ranks(lambda engine, kv: engine.store(TOKENS, kvcaches=kv, slot_mapping=ROWS))
        assert stored[0] == 12 and set(stored[1:]) <= {0, 12}
        target = random_rows(12, seed=7)
        assert counts(world, retrieve(TOKENS, target)) == [12, 12, 12]
        assert [rows_of(kv, target) for kv in world.kvs] == [rows_of(original, ROWS)] * 3
        assert [engine.lookup(TOKENS) for engine in world.engines] == [12, 12, 12]
        world.check_idle()


@pytest.mark.parametrize("raising", ["slot_mapping", "tokens", "mask", "kvcaches"])
def test_a_failure_at_rank_0_is_a_miss_on_the_others_at_once(tmp_path: Path, raising: str) -> None:
    bad = {"slot_mapping": [*range(11), 99], "tokens": [-1] * 12, "mask": [True, False], "kvcaches": []}[raising]

    def call(engine: LMCacheEngine, kv: KV) -> torch.Tensor:
        arguments = {"tokens": TOKENS, "kvcaches": kv, "slot_mapping": ROWS}
        return engine.retrieve(**{**arguments, **({raising: bad} if engine.metadata.worker_id == 0 else {})})

    with make_world(tmp_path, 3, use_mla=True, call_timeout_s=LONG_S) as world:
        world.store(TOKENS, ROWS)
        begin = time.monotonic()
        failed, *others = outcomes(world, call)
        assert time.monotonic() - begin < LONG_S / 3
        assert isinstance(failed, LMCacheRayError) and isinstance(failed, ValueError)
        assert [int(mask.sum()) for mask in others] == [0, 0]  # type: ignore[union-attr]
        world.check_idle()
        assert counts(world, retrieve(TOKENS)) == [12, 12, 12], "the ranks are still in step"
        world.check_idle()


def test_bad_arguments_of_a_receiver_are_its_own_affair(tmp_path: Path) -> None:
    def call(engine: LMCacheEngine, kv: KV) -> torch.Tensor:
        rows = [-1] * 12 if engine.metadata.worker_id == 1 else ROWS
        return engine.retrieve(TOKENS, kvcaches=kv, slot_mapping=rows)

    with make_world(tmp_path, 3, use_mla=True, call_timeout_s=LONG_S) as world:
        world.store(TOKENS, ROWS)
        world.store(OTHERS, ROWS)
        assert counts(world, call) == [12, InvalidRequestError, 12]
        world.check_idle()
        assert counts(world, retrieve(OTHERS)) == [12, 12, 12]
        world.check_idle()


def test_a_receiver_that_asks_for_another_prompt_gets_a_miss_and_the_ranks_agree_again(tmp_path: Path) -> None:
    def call(engine: LMCacheEngine, kv: KV) -> torch.Tensor:
        tokens = OTHERS if engine.metadata.worker_id == 1 else TOKENS
        return engine.retrieve(tokens, kvcaches=kv, slot_mapping=ROWS)

    with make_world(tmp_path, 2, use_mla=True, call_timeout_s=LONG_S) as world:
        world.store(TOKENS, ROWS)
        world.store(OTHERS, ROWS)
        before = copy.deepcopy(world.kvs[1])
        assert counts(world, call) == [12, 0]
        assert rows_of(world.kvs[1], range(64)) == rows_of(before, range(64)), "no byte of the other prompt is written"
        world.check_idle()
        counts(world, retrieve(TOKENS))  # each rank is told that they were out of step
        assert counts(world, retrieve(TOKENS)) == counts(world, retrieve(OTHERS)) == [12, 12]
        world.check_idle()


def test_receivers_that_come_late_or_early_get_the_same(tmp_path: Path) -> None:
    """Rank 0 never waits, and any number of its loads may lie unread."""
    prompts = [list(range(100 * number, 100 * number + 8)) for number in range(5)]
    with make_world(tmp_path, 2, use_mla=True) as world:
        rows = random_rows(8)
        for prompt in prompts:
            world.store(prompt, rows)
        first, second = world.engines
        for prompt in prompts:
            assert int(first.retrieve(prompt, kvcaches=world.kvs[0], slot_mapping=rows).sum()) == 8
        assert world.index().counts().leases == 5, "the other rank's"
        for prompt in prompts:
            poison(world.kvs[1])
            assert int(second.retrieve(prompt, kvcaches=world.kvs[1], slot_mapping=rows).sum()) == 8
        world.check_idle()
        with ThreadPoolExecutor(1) as threads:
            early = threads.submit(second.retrieve, TOKENS, kvcaches=world.kvs[1], slot_mapping=ROWS)
            first.retrieve(TOKENS, kvcaches=world.kvs[0], slot_mapping=ROWS)
            assert int(early.result().sum()) == 8, "the chunks that it shares with the first prompt"
        world.check_idle()


def test_chunks_that_are_to_be_read_by_a_late_rank_are_not_evicted(tmp_path: Path) -> None:
    with make_world(tmp_path, 2, use_mla=True, capacity_chunks=3) as world:
        world.store(TOKENS, ROWS)
        expected = rows_of(world.kvs[0], ROWS)
        world.engines[0].retrieve(TOKENS, kvcaches=world.kvs[0], slot_mapping=ROWS)
        assert world.store(OTHERS, ROWS) == 0, "all room is leased to rank 1"
        poison(world.kvs[1])
        assert int(world.engines[1].retrieve(TOKENS, kvcaches=world.kvs[1], slot_mapping=ROWS).sum()) == 12
        assert rows_of(world.kvs[1], ROWS) == expected
        world.check_idle()


def test_when_rank_0_stays_silent_the_others_miss_at_their_deadline(tmp_path: Path) -> None:
    with make_world(tmp_path, 2, use_mla=True, call_timeout_s=0.1) as world:
        world.store(TOKENS, ROWS)
        mask = world.engines[1].retrieve(TOKENS, kvcaches=world.kvs[1], slot_mapping=ROWS)
        assert int(mask.sum()) == 0
        first = world.engines[0].retrieve(TOKENS, kvcaches=world.kvs[0], slot_mapping=ROWS)
        assert int(first.sum()) == 12, "its own bytes are there, whether the others come or not"
        assert counts(world, retrieve(TOKENS)) == [12, 12]
        world.check_idle()


def test_when_rank_0_is_closed_the_others_do_not_wait_for_it(tmp_path: Path) -> None:
    with make_world(tmp_path, 3, use_mla=True, call_timeout_s=LONG_S) as world:
        world.store(TOKENS, ROWS)
        with ThreadPoolExecutor(1) as threads:
            begin = time.monotonic()
            waiting = threads.submit(world.engines[1].retrieve, TOKENS, kvcaches=world.kvs[1], slot_mapping=ROWS)
            world.engines[0].close()
            assert int(waiting.result().sum()) == 0
        late = world.engines[2].retrieve(TOKENS, kvcaches=world.kvs[2], slot_mapping=ROWS)
        assert int(late.sum()) == 0 and time.monotonic() - begin < LONG_S / 3


def test_a_closed_receiver_holds_up_nobody(tmp_path: Path) -> None:
    with make_world(tmp_path, 3, use_mla=True, call_timeout_s=LONG_S) as world:
        world.store(TOKENS, ROWS)
        world.engines[0].retrieve(TOKENS, kvcaches=world.kvs[0], slot_mapping=ROWS)
        assert world.index().counts().leases == 2, "those of the two that have not come yet"
        world.engines[2].close()
        assert int(world.engines[1].retrieve(TOKENS, kvcaches=world.kvs[1], slot_mapping=ROWS).sum()) == 12
        assert world.index().counts().leases == 0
        for _ in range(3):
            rest = World(world.engines[:2], world.layout, world.kvs[:2])
            assert counts(rest, retrieve(TOKENS)) == [12, 12]
        assert world.index().counts().leases == 0, "nobody waits for the closed one"
