"""What is the same prompt, whatever it is made of, and what never is."""

from array import array
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_ray.errors import InvalidRequestError
from tests.unit.engine_builders import make_world, random_rows, rows_of

TOKENS = list(range(1000, 1012))


def test_lists_arrays_and_tensors_are_the_same_tokens_and_rows(tmp_path: Path) -> None:
    rows = random_rows(12)
    forms = [
        TOKENS,
        tuple(TOKENS),
        range(1000, 1012),
        np.array(TOKENS, np.int32),
        torch.tensor(TOKENS),
        array("q", TOKENS),
    ]
    mappings = [
        rows.tolist(),
        tuple(rows.tolist()),
        rows,
        rows.astype(np.int32),
        torch.from_numpy(rows),
        torch.from_numpy(rows),
    ]
    masks = [None, [True] * 12, (True,) * 12, np.ones(12, bool), torch.ones(12, dtype=torch.bool), None]
    with make_world(tmp_path) as world:
        engine, kv = world.engines[0], world.kvs[0]
        original = rows_of(kv, rows)
        for number, (tokens, mapping, mask) in enumerate(zip(forms, mappings, masks, strict=True)):
            engine.clear()
            assert engine.store(tokens, mask=mask, kvcaches=kv, slot_mapping=mapping) == 12
            assert [engine.lookup(form) for form in forms] == [12] * 6
            other = (number + 1) % 6
            mask_out = engine.retrieve(forms[other], masks[other], kvcaches=tuple(kv), slot_mapping=mappings[other])
            assert mask_out.device.type == "cpu" and mask_out.dtype == torch.bool and bool(mask_out.all())
            assert rows_of(kv, rows) == original


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"cache_salt": ""}),
        ({}, {"cache_salt": "tenant"}),
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({}, {"lora_id": 1}),
        ({"lora_id": 1}, {"lora_id": "1"}),
        ({"cache_salt": "1"}, {"lora_id": "1"}),
        ({}, {"media": [(0, 4, "cat")]}),
        ({"media": [(0, 4, "cat")]}, {"media": [(0, 4, "dog")]}),
        ({"media": [(0, 4, "cat")]}, {"media": [(0, 3, "cat")]}),
        ({"media": [(0, 4, "cat")]}, {"media": [(1, 4, "cat")]}),
    ],
)
def test_requests_that_differ_never_share(
    tmp_path: Path, one: Mapping[str, object], other: Mapping[str, object]
) -> None:
    with make_world(tmp_path) as world:
        engine, rows = world.engines[0], random_rows(12)
        assert world.store(TOKENS, rows, request_configs=one) == 12
        assert engine.lookup(TOKENS, request_configs=one) == 12
        assert engine.lookup(TOKENS, request_configs=other) == 0
        assert world.retrieve(TOKENS, rows, request_configs=other) == []
        assert engine.loadable(TOKENS, 0, one) == 11 and engine.loadable(TOKENS, 0, other) == 0
        assert engine.clear(TOKENS, request_configs=other).num_removed == 0
        assert engine.clear(TOKENS, request_configs=one).num_removed == 3


@pytest.mark.parametrize("other", [{"model": "n"}, {"model_revision": "r2"}, {"chunk_size": 2}])
def test_another_model_revision_or_chunk_size_has_other_keys(tmp_path: Path, other: dict[str, object]) -> None:
    """Keys are compared, because two engines with such a difference share no index."""
    with (
        make_world(tmp_path, model_revision="r1") as world,
        make_world(tmp_path, **{"model_revision": "r1", **other}) as twin,
    ):
        keys, others = (engine._parts.hasher.keys(TOKENS) for engine in (world.engines[0], twin.engines[0]))
        assert set(keys).isdisjoint(others)


def test_prompts_share_their_common_chunks_only(tmp_path: Path) -> None:
    with make_world(tmp_path) as world:
        engine, rows = world.engines[0], random_rows(12)
        world.store(TOKENS, rows)
        for first_other in range(13):
            tokens = [*TOKENS[:first_other], *range(12 - first_other)]
            assert engine.lookup(tokens) == first_other // 4 * 4


def test_ready_made_hashes_name_the_same_chunks(tmp_path: Path) -> None:
    with make_world(tmp_path) as world:
        engine, kv, rows = world.engines[0], world.kvs[0], random_rows(12)
        keys = engine._parts.hasher.keys(TOKENS)
        assert engine.store(hashes=keys[:2], offsets=[4, 4], kvcaches=kv, slot_mapping=rows[:8]) == 8
        assert engine.lookup(TOKENS) == 8
        assert engine.lookup(hashes=keys, offsets=[4, 4, 4]) == 8
        mask = [False] * 8 + [True] * 4
        assert engine.store(None, keys, [4, 4, 4], mask, kvcaches=kv, slot_mapping=rows) == 12
        assert engine.lookup(hashes=keys, offsets=[4, 4, 4]) == engine.lookup(TOKENS) == 12
        world.check_idle()


def test_hashes_of_a_foreign_scheme_work_without_tokens(tmp_path: Path) -> None:
    with make_world(tmp_path, save_unfull_chunk=True) as world:
        engine, kv = world.engines[0], world.kvs[0]
        keys = [bytes([number]) * 32 for number in range(2)]
        assert engine.store(hashes=keys, offsets=[4, 3], kvcaches=kv, slot_mapping=random_rows(7)) == 7
        assert engine.lookup(hashes=keys, offsets=[4, 3]) == 7
        assert engine.lookup(hashes=keys[::-1], offsets=[4, 4]) == 8, "a key is a key, wherever it stands"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "tokens.*hashes"),
        ({"tokens": TOKENS, "hashes": [b"k" * 32], "offsets": [4]}, "exactly one"),
        ({"hashes": [b"k" * 32]}, "offsets is missing"),
        ({"hashes": [b"k" * 32], "offsets": [4, 4]}, "1 hashes but 2 offsets"),
        ({"hashes": [b"short"], "offsets": [4]}, r"hashes\[0\]"),
        ({"hashes": [b"k" * 32], "offsets": [5]}, r"offsets\[0\] is 5"),
        ({"hashes": [b"k" * 32], "offsets": [3]}, r"offsets\[0\] is 3.*save_unfull_chunk"),
        ({"tokens": TOKENS, "offsets": [4, 4, 4]}, "`offsets`"),
        ({"hashes": [b"k" * 32], "offsets": [4], "request_configs": {"cache_salt": "s"}}, "request_configs"),
        ({"tokens": TOKENS, "request_configs": {"cache_sault": "s"}}, "cache_sault.*did you mean 'cache_salt'"),
        ({"tokens": [1, 2, -3]}, r"tokens\[2\] is -3"),
        ({"tokens": [1, True]}, r"tokens\[1\] is True"),
        ({"tokens": "abc"}, "tokens is 'abc'"),
    ],
)
def test_a_prompt_that_cannot_be_meant_is_refused_by_name(
    tmp_path: Path, arguments: dict[str, object], named: str
) -> None:
    with make_world(tmp_path) as world:
        with pytest.raises(InvalidRequestError, match=named):
            world.engines[0].lookup(**arguments)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match=named):
            world.engines[0].store(**arguments, kvcaches=world.kvs[0], slot_mapping=random_rows(12))  # type: ignore[arg-type]
        world.check_idle()
