"""Prompts that callers hold: made once, used for every call of an engine, extended turn by turn."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_ray.errors import InvalidRequestError
from tests.unit.engine_builders import make_kv, make_world, poison, random_rows, rows_of

SALT = {"cache_salt": "s"}


@pytest.mark.parametrize("configs", [None, SALT])
def test_a_prompt_does_what_its_tokens_do(tmp_path: Path, configs: dict[str, object] | None) -> None:
    tokens, rows = list(range(13)), random_rows(13)
    with make_world(tmp_path) as world:
        (engine,), (kv,) = world.engines, world.kvs
        prompt = engine.prompt(tokens, configs)
        original = rows_of(kv, rows[:12])
        assert engine.store(prompt, kvcaches=kv, slot_mapping=rows) == 12
        assert engine.store(tokens, kvcaches=kv, slot_mapping=rows, request_configs=configs) == 12
        assert engine.lookup(prompt) == engine.lookup(tokens, request_configs=configs) == 12
        assert engine.loadable(prompt, 3) == engine.loadable(tokens, 3, configs) == 9
        poison(kv)
        mask = engine.retrieve(prompt, kvcaches=kv, slot_mapping=rows)
        assert mask.tolist() == [True] * 12 + [False] and rows_of(kv, rows[:12]) == original
        assert engine.clear(prompt).num_removed == 3
        assert engine.lookup(tokens, request_configs=configs) == 0
        world.check_idle()


def test_a_conversation_is_stored_and_found_turn_by_turn(tmp_path: Path) -> None:
    turns, rows = [list(range(6)), list(range(6, 11)), [11], list(range(12, 20))], random_rows(20)
    with make_world(tmp_path) as world:
        (engine,), (kv,) = world.engines, world.kvs
        prompt, tokens = engine.prompt([], SALT), []
        for turn in turns:
            num_cached = engine.lookup(prompt)
            prompt, tokens = prompt.extended(turn), tokens + turn
            assert engine.lookup(prompt) == num_cached == (len(tokens) - len(turn)) // 4 * 4
            mask = [False] * num_cached + [True] * (len(tokens) - num_cached)
            num_ready = engine.store(prompt, mask=mask, kvcaches=kv, slot_mapping=rows[: len(tokens)])
            assert num_ready == len(tokens) // 4 * 4
        assert engine.lookup(tokens, request_configs=SALT) == 20
        assert engine.lookup(tokens) == 0


def test_a_prompt_of_another_model_or_with_further_configs_is_refused_by_every_call(tmp_path: Path) -> None:
    rows = list(range(8))
    with make_world(tmp_path / "a", model="m") as world, make_world(tmp_path / "b", model="n") as other:
        (engine,), (kv,) = world.engines, world.kvs
        cases = [
            (other.engines[0].prompt(range(8)), None, "made for model_name='n'; keys here are made for model_name='m'"),
            (engine.prompt(range(8)), SALT, "request_configs are in the keys of a Prompt already"),
        ]
        for prompt, configs, named in cases:
            for call in (
                lambda p, c: engine.store(p, kvcaches=kv, slot_mapping=rows, request_configs=c),
                lambda p, c: engine.retrieve(p, kvcaches=kv, slot_mapping=rows, request_configs=c),
                lambda p, c: engine.lookup(p, request_configs=c),
                lambda p, c: engine.loadable(p, 0, c),
                lambda p, c: engine.clear(p, request_configs=c),
                lambda p, c: engine.prompt(p, c),
            ):
                with pytest.raises(InvalidRequestError, match=named):
                    call(prompt, configs)
        assert world.index().counts().ready == 0
        world.check_idle()


def test_kv_that_moves_between_two_calls_is_followed(tmp_path: Path) -> None:
    with make_world(tmp_path) as world:
        (engine,), (kv,) = world.engines, world.kvs
        rows = np.arange(8)
        engine.store(range(8), kvcaches=kv, slot_mapping=rows)
        original = rows_of(kv, rows)
        others = make_kv(world.layout.ranks[0], 64, seed=9)
        for tensor, other in zip(kv, others, strict=True):
            tensor.set_(other)
        poison(kv)
        assert engine.retrieve(range(8), kvcaches=kv, slot_mapping=rows).all()
        assert rows_of(others, rows) == original
        kv[1] = torch.zeros_like(kv[1])
        assert engine.store(range(100, 108), kvcaches=kv, slot_mapping=rows) == 8
        expected = rows_of(kv, rows)
        poison(kv)
        engine.retrieve(range(100, 108), kvcaches=kv, slot_mapping=rows)
        assert rows_of(kv, rows) == expected
