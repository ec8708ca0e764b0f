"""One engine that acts for a whole in-process world."""

import copy
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_ray.errors import ClosedError, InvalidRequestError, LayoutError
from lmcache_ray.world_engine import WorldEngine
from tests.unit.engine_builders import World, make_kv, make_world, poison, random_rows, rows_of

TOKENS, ROWS = list(range(12)), random_rows(12)


@contextmanager
def acting_for(world: World, worker_id: int = 0) -> Iterator[WorldEngine]:
    engine = WorldEngine([engine._parts for engine in world.engines], worker_id, world.kvs)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("use_mla", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_store_and_retrieve_act_on_every_rank(tmp_path: Path, world_size: int, use_mla: bool) -> None:
    with make_world(tmp_path, world_size, use_mla=use_mla) as world, acting_for(world, world_size - 1) as engine:
        assert engine.metadata.worker_id == world_size - 1
        originals = [rows_of(kv, ROWS) for kv in world.kvs]
        assert engine.store(TOKENS, slot_mapping=ROWS) == 12
        assert engine.lookup(TOKENS) == 12 and engine.loadable(TOKENS, 0) == 11
        for kv in world.kvs:
            poison(kv)
        mask = engine.retrieve(TOKENS, [False] * 2 + [True] * 10, slot_mapping=ROWS)
        assert mask.nonzero().flatten().tolist() == list(range(2, 12))
        for kv, original in zip(world.kvs, originals, strict=True):
            assert rows_of(kv, ROWS[2:]) == rows_of_range(original, kv, 2)
        assert engine.clear().num_removed == 3
        world.check_idle()


def rows_of_range(original: bytes, kv: list, start: int) -> bytes:  # type: ignore[type-arg]
    """The part of `rows_of(kv, ROWS)` that is of tokens from `start` on."""
    planes = sum(tensor.shape[0] for tensor in kv)
    per_plane = np.frombuffer(original, np.uint8).reshape(planes, len(ROWS), -1)
    return per_plane[:, start:].tobytes()


def test_kv_of_the_caller_in_place_of_the_worlds_own(tmp_path: Path) -> None:
    with make_world(tmp_path, 2) as world, acting_for(world) as engine:
        others = [make_kv(world.layout.ranks[rank], 64, seed=10 + rank) for rank in range(2)]
        expected = [rows_of(kv, ROWS) for kv in others]
        assert engine.store(TOKENS, kvcaches=others, slot_mapping=ROWS) == 12
        assert int(engine.retrieve(TOKENS, slot_mapping=ROWS).sum()) == 12
        assert [rows_of(kv, ROWS) for kv in world.kvs] == expected


def test_a_world_of_one_takes_its_tensors_as_they_are(tmp_path: Path) -> None:
    with make_world(tmp_path) as world, acting_for(world) as engine:
        (kv,) = world.kvs
        for caches in (kv, [kv], tuple(kv), dict(enumerate(kv)), None):
            assert engine.store(TOKENS, kvcaches=caches, slot_mapping=ROWS) == 12  # type: ignore[arg-type]
            assert int(engine.retrieve(TOKENS, kvcaches=caches, slot_mapping=ROWS).sum()) == 12  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["one rank's tensors", "too few", "too many", "a mapping", "a tensor", "a number"])
def test_kv_for_another_number_of_ranks(tmp_path: Path, wrong: str) -> None:
    with make_world(tmp_path, 2) as world, acting_for(world) as engine:
        caches: dict[str, object] = {
            "one rank's tensors": world.kvs[0],
            "too few": world.kvs[:1],
            "too many": [*world.kvs, world.kvs[0]],
            "a mapping": dict(enumerate(world.kvs)),
            "a tensor": torch.stack(world.kvs[0]).to_sparse(),
            "a number": 7,
        }
        with pytest.raises(InvalidRequestError, match=r"one list of tensors for each of 2 ranks; got \w+"):
            engine.store(TOKENS, kvcaches=caches[wrong], slot_mapping=ROWS)  # type: ignore[arg-type]
        world.check_idle()


@pytest.mark.parametrize("use_mla", [False, True])
def test_a_bad_call_raises_once_and_leaves_the_world_in_step(tmp_path: Path, use_mla: bool) -> None:
    with make_world(tmp_path, 3, use_mla=use_mla) as world, acting_for(world) as engine:
        engine.store(TOKENS, slot_mapping=ROWS)
        before = copy.deepcopy(world.kvs)
        with pytest.raises(InvalidRequestError, match=r"slot_mapping\[11\]"):
            engine.retrieve(TOKENS, slot_mapping=[*range(11), -1])
        with pytest.raises(LayoutError, match="kvcaches has 0 layers"):
            engine.retrieve(TOKENS, kvcaches=[world.kvs[0], [], world.kvs[2]], slot_mapping=ROWS)
        assert rows_of(world.kvs[1], range(64)) == rows_of(before[1], range(64))
        for _ in range(2):
            assert int(engine.retrieve(TOKENS, slot_mapping=ROWS).sum()) == 12
        world.check_idle()


@pytest.mark.parametrize("use_mla", [False, True])
def test_a_prompt_is_read_once_for_all_ranks(tmp_path: Path, use_mla: bool) -> None:
    with make_world(tmp_path, 3, use_mla=use_mla) as world, acting_for(world) as engine:
        salt = {"cache_salt": "s"}
        prompt = engine.prompt(TOKENS, salt)
        assert engine.store(hashes=list(prompt.keys), offsets=[4, 4, 4], slot_mapping=ROWS) == 12
        assert engine.lookup(TOKENS, request_configs=salt) == 12 and engine.lookup(TOKENS) == 0
        assert int(engine.retrieve(prompt, slot_mapping=ROWS).sum()) == 12
        for call in (engine.store, engine.retrieve):
            with pytest.raises(InvalidRequestError, match=r"tokens\[1\] is -1"):
                call([0, -1], slot_mapping=[0, 1])
        assert int(engine.retrieve(TOKENS, slot_mapping=ROWS, request_configs=salt).sum()) == 12
        world.check_idle()


@pytest.mark.parametrize("use_mla", [False, True])
def test_callers_from_many_threads_all_get_their_prompt(tmp_path: Path, use_mla: bool) -> None:
    """The ranks of a first-rank world take the same steps in the same order, so no call is answered with another's."""
    prompts = [list(range(100 * number, 100 * number + 8)) for number in range(8)]
    with make_world(tmp_path, 3, use_mla=use_mla, num_rows=64) as world, acting_for(world) as engine:

        def use(number: int) -> int:
            rows = np.arange(8 * number, 8 * number + 8)
            engine.store(prompts[number], slot_mapping=rows)
            return min(int(engine.retrieve(prompts[number], slot_mapping=rows).sum()) for _ in range(10))

        before = copy.deepcopy(world.kvs)
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(use, range(8))) == [8] * 8
        assert [rows_of(kv, range(64)) for kv in world.kvs] == [rows_of(kv, range(64)) for kv in before]
        world.check_idle()


def test_close_ends_every_rank_and_its_threads(tmp_path: Path) -> None:
    with make_world(tmp_path, 3, use_mla=True) as world:
        engine = WorldEngine([engine._parts for engine in world.engines], 1, world.kvs)
        engine.store(TOKENS, slot_mapping=ROWS)
        engine.close()
        engine.close()
        assert not engine.is_healthy() and not any(rank.is_healthy() for rank in engine.engines)
        for call in (engine.store, engine.retrieve):
            with pytest.raises(ClosedError):
                call(TOKENS, slot_mapping=ROWS)
        with pytest.raises(ClosedError):
            engine.lookup(TOKENS)
        deadline = time.monotonic() + 5
        while any(thread.name.startswith("rank") for thread in threading.enumerate()):
            assert time.monotonic() < deadline, "threads are left"
            time.sleep(0.005)
