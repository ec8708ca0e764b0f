"""A call's prompt: its chunks, their tokens and rows, and what an engine may still load of it."""

import numpy as np
import pytest

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.keys import ChunkHasher
from lmcache_ray.prompt import Prompt, loadable_tokens, read_prompt

FULL = ChunkHasher("m", chunk_size=4)
PARTIAL = ChunkHasher("m", chunk_size=4, keep_partial=True)


def test_a_prompt_counts_tokens_past_its_last_chunk() -> None:
    prompt = read_prompt(FULL, range(10))
    assert (prompt.num_tokens, prompt.spans) == (10, [(0, 4), (4, 8)])
    assert prompt.keys == FULL.keys(range(10))
    assert [prompt.tokens_in(count) for count in range(3)] == [0, 4, 8]
    prompt = read_prompt(PARTIAL, range(10))
    assert prompt.spans[-1] == (8, 10) and prompt.tokens_in(3) == 10


@pytest.mark.parametrize("hasher", [FULL, PARTIAL])
def test_an_empty_prompt_has_no_chunks(hasher: ChunkHasher) -> None:
    prompt = read_prompt(hasher, [])
    assert (prompt.num_tokens, prompt.keys, prompt.spans, prompt.tokens_in(0)) == (0, [], [], 0)


def test_rows_of_chunks_are_cut_below_the_start() -> None:
    prompt, rows = read_prompt(PARTIAL, range(10)), np.arange(100, 110)
    assert [part.tolist() for part in prompt.rows(rows, [0, 2])] == [[100, 101, 102, 103], [108, 109]]
    assert [part.tolist() for part in prompt.rows(rows, [1, 2], start=6)] == [[106, 107], [108, 109]]
    assert prompt.rows(rows, []) == []


def test_hashes_with_offsets_make_the_prompt_that_the_tokens_make() -> None:
    made = read_prompt(PARTIAL, range(10))
    assert read_prompt(PARTIAL, None, hashes=made.keys, offsets=[4, 4, 2]) == made
    assert read_prompt(FULL, None, hashes=[], offsets=[]) == Prompt(0, [], [])


def test_salt_is_part_of_the_keys() -> None:
    salted = read_prompt(FULL, range(8), request_configs={"cache_salt": "s"})
    assert salted.spans == read_prompt(FULL, range(8)).spans
    assert set(salted.keys).isdisjoint(read_prompt(FULL, range(8)).keys)


def test_a_prompt_is_named_in_one_way() -> None:
    keys = FULL.keys(range(8))
    with pytest.raises(InvalidRequestError, match="exactly one of the two"):
        read_prompt(FULL, None)
    with pytest.raises(InvalidRequestError, match="exactly one of the two"):
        read_prompt(FULL, range(8), hashes=keys, offsets=[4, 4])
    with pytest.raises(InvalidRequestError, match="`offsets`"):
        read_prompt(FULL, range(8), offsets=[4, 4])
    with pytest.raises(InvalidRequestError, match="request_configs"):
        read_prompt(FULL, None, hashes=keys, offsets=[4, 4], request_configs={"lora_id": 1})


@pytest.mark.parametrize("num_tokens", range(6))
def test_loadable_leaves_the_last_token_and_what_is_computed(num_tokens: int) -> None:
    for num_hits in range(num_tokens + 1):
        for num_computed in range(num_tokens + 1):
            wanted = set(range(num_computed, num_hits)) - {num_tokens - 1}
            assert loadable_tokens(num_hits, num_tokens, num_computed) == len(wanted)


@pytest.mark.parametrize("num_computed", [-1, 4, True, 2.0, "1", None])
def test_a_number_of_computed_tokens_is_within_the_prompt(num_computed: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"within 0 to 3.*got {num_computed!r}"):
        loadable_tokens(3, 3, num_computed)  # type: ignore[arg-type]
