"""Arguments that cannot be meant are refused by name with nothing half done, and so are calls on a closed engine."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_ray.engine import LMCacheEngine
from lmcache_ray.errors import ClosedError, InvalidRequestError, LayoutError
from tests.unit.engine_builders import World, make_world, random_rows, rows_of

TOKENS = list(range(8))
ROWS = list(range(8))

BAD_CALLS = [
    ({"mask": [True] * 7}, InvalidRequestError, r"mask has shape \(7,\)"),
    ({"mask": [True] * 9}, InvalidRequestError, "each of 8 tokens"),
    ({"mask": [True, False, *[True] * 6]}, InvalidRequestError, r"mask\[1\] is False after mask\[0\] is True"),
    ({"mask": [False, True, False, *[True] * 5]}, InvalidRequestError, r"mask\[2\] is False after mask\[1\]"),
    ({"mask": [0] * 4 + [1] * 4}, InvalidRequestError, r"mask\[0\] is 0"),
    ({"mask": np.ones(8)}, InvalidRequestError, "float64"),
    ({"slot_mapping": ROWS[:-1]}, InvalidRequestError, "7 entries for 8 tokens"),
    ({"slot_mapping": [*ROWS[:-1], -1]}, InvalidRequestError, r"slot_mapping\[7\] is -1"),
    ({"slot_mapping": [*ROWS[:-1], 64]}, InvalidRequestError, r"slot_mapping\[7\] is 64.*0 to 63"),
    ({"slot_mapping": [*ROWS[:-1], 3]}, InvalidRequestError, r"slot_mapping\[7\] is 3, which an earlier"),
    ({"slot_mapping": None}, InvalidRequestError, "slot_mapping is missing"),
    ({"slot_mapping": torch.tensor(ROWS).to_sparse()}, InvalidRequestError, "slot_mapping is a torch tensor.*sparse"),
    ({"mask": torch.ones(8, dtype=torch.bool).to_sparse()}, InvalidRequestError, "mask is a torch tensor.*sparse"),
    ({"kvcaches": [torch.zeros(2, 16, 4, 2, 4).half().to_sparse()] * 2}, LayoutError, r"kvcaches\[0\] is.*sparse"),
    ({"kvcaches": None}, InvalidRequestError, "kvcaches is missing"),
    ({"kvcaches": []}, LayoutError, "kvcaches has 0 layers.*has 2"),
    ({"kvcaches": [torch.zeros(2, 16, 4, 2, 4)] * 2}, LayoutError, r"kvcaches\[0\] has dtype torch.float32"),
]


@pytest.mark.parametrize(("change", "error", "named"), BAD_CALLS)
@pytest.mark.parametrize("method", ["store", "retrieve"])
def test_bad_arguments_change_nothing(
    tmp_path: Path, method: str, change: dict[str, object], error: type[Exception], named: str
) -> None:
    with make_world(tmp_path) as world:
        kv = world.kvs[0]
        world.store(TOKENS[:4], np.arange(4))
        before = copy.deepcopy(kv)
        arguments = {"kvcaches": kv, "slot_mapping": ROWS, **change}
        with pytest.raises(error, match=named):
            getattr(world.engines[0], method)(TOKENS, **arguments)
        assert rows_of(kv, range(64)) == rows_of(before, range(64))
        assert world.index().counts().ready == 1
        world.check_idle()


def test_a_store_begins_at_a_chunk_and_a_retrieve_anywhere(tmp_path: Path) -> None:
    with make_world(tmp_path) as world:
        world.store(TOKENS, np.arange(8))
        with pytest.raises(InvalidRequestError, match=r"begins with 3 False.*chunk_size=4"):
            world.engines[0].store(TOKENS, mask=[False] * 3 + [True] * 5, kvcaches=world.kvs[0], slot_mapping=ROWS)
        assert world.retrieve(TOKENS, np.arange(8), mask=[False] * 3 + [True] * 5) == list(range(3, 8))


@pytest.mark.parametrize("num_computed", [-1, 9, True, 1.0, None])
def test_a_count_of_computed_tokens_that_cannot_be(tmp_path: Path, num_computed: object) -> None:
    with make_world(tmp_path) as world, pytest.raises(InvalidRequestError, match="num_computed must be within 0 to 8"):
        world.engines[0].loadable(TOKENS, num_computed)  # type: ignore[arg-type]


@pytest.mark.parametrize("tiers", ["cpu", ["gpu"], ["cpu", "LocalGPUBackend"]])
def test_unknown_tiers_are_refused_even_for_an_empty_prompt(tmp_path: Path, tiers: object) -> None:
    with make_world(tmp_path) as world:
        for tokens in (TOKENS, []):
            with pytest.raises(InvalidRequestError, match="search_range"):
                world.engines[0].lookup(tokens, search_range=tiers)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequestError, match="locations"):
                world.engines[0].clear(tokens, tiers)  # type: ignore[arg-type]


@pytest.mark.parametrize("lookup_id", [None, "", 7])
def test_a_pin_needs_a_name(tmp_path: Path, lookup_id: object) -> None:
    with make_world(tmp_path) as world:
        world.store(TOKENS, np.arange(8))
        with pytest.raises(InvalidRequestError, match="lookup_id"):
            world.engines[0].lookup(TOKENS, pin=True, lookup_id=lookup_id)  # type: ignore[arg-type]
        world.check_idle()


CALLS: list[Callable[[LMCacheEngine, World], object]] = [
    lambda engine, world: engine.store(TOKENS, kvcaches=world.kvs[0], slot_mapping=ROWS),
    lambda engine, world: engine.retrieve(TOKENS, kvcaches=world.kvs[0], slot_mapping=ROWS),
    lambda engine, world: engine.prompt(TOKENS),
    lambda engine, world: engine.lookup(TOKENS),
    lambda engine, world: engine.lookup_unpin("r"),
    lambda engine, world: engine.loadable(TOKENS, 0),
    lambda engine, world: engine.clear(),
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("use_mla", [False, True])
def test_a_closed_engine_refuses_every_call(
    tmp_path: Path, call: Callable[[LMCacheEngine, World], object], use_mla: bool
) -> None:
    with make_world(tmp_path, 2, use_mla=use_mla) as world:
        assert all(engine.is_healthy() for engine in world.engines)
        world.close()
        world.close()
        for rank, engine in enumerate(world.engines):
            assert not engine.is_healthy() and "closed" in repr(engine)
            with pytest.raises(ClosedError, match=f"rank {rank} is closed"):
                call(engine, world)


def test_nothing_is_left_in_the_arena_directory_even_while_the_engine_runs(tmp_path: Path) -> None:
    with make_world(tmp_path, 2) as world:
        world.store(TOKENS, random_rows(8))
        assert list(tmp_path.iterdir()) == []
