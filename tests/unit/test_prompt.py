"""A call's prompt: its chunks, their tokens and rows, and what an engine may still load of it."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.keys import ChunkHasher
from lmcache_ray.prompt import Prompt, loadable_tokens, read_prompt

FULL = ChunkHasher("m", chunk_size=4)
PARTIAL = ChunkHasher("m", chunk_size=4, keep_partial=True)
ONE_TOKEN = ChunkHasher("m", chunk_size=1)


def test_a_prompt_counts_tokens_past_its_last_chunk() -> None:
    prompt = read_prompt(FULL, range(10))
    assert (prompt.num_tokens, prompt.spans) == (10, [(0, 4), (4, 8)])
    assert list(prompt.keys) == FULL.keys(range(10))
    assert [prompt.tokens_in(count) for count in range(3)] == [0, 4, 8]
    assert [prompt.start_of(position) for position in range(2)] == [0, 4]
    prompt = read_prompt(PARTIAL, range(10))
    assert prompt.spans[-1] == (8, 10) and prompt.tokens_in(3) == 10


@pytest.mark.parametrize("hasher", [FULL, PARTIAL])
def test_an_empty_prompt_has_no_chunks(hasher: ChunkHasher) -> None:
    prompt = read_prompt(hasher, [])
    assert (prompt.num_tokens, prompt.keys, prompt.spans, prompt.tokens_in(0)) == (0, (), [], 0)


def test_rows_of_chunks_are_cut_below_the_start() -> None:
    prompt, rows = read_prompt(PARTIAL, range(10)), np.arange(100, 110)
    assert [part.tolist() for part in prompt.rows(rows, [0, 2])] == [[100, 101, 102, 103], [108, 109]]
    assert [part.tolist() for part in prompt.rows(rows, [1, 2], start=6)] == [[106, 107], [108, 109]]
    assert prompt.rows(rows, []) == []


def test_hashes_with_offsets_make_the_prompt_that_the_tokens_make() -> None:
    made = read_prompt(PARTIAL, range(10))
    assert read_prompt(PARTIAL, None, hashes=made.keys, offsets=[4, 4, 2]) == made
    assert read_prompt(FULL, None, hashes=[], offsets=[]) == Prompt(0, (), FULL)


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


def hashing_all(hasher: ChunkHasher, tokens: list[int], configs: dict[str, object]) -> Prompt:
    """What `extended` must come to."""
    return read_prompt(hasher, tokens, request_configs=configs)


@given(st.data())
def test_a_prompt_that_grows_has_the_keys_of_the_whole(data: st.DataObject) -> None:
    turns = data.draw(st.lists(st.lists(st.integers(0, 2**63 - 1), max_size=11), min_size=1, max_size=5))
    configs = data.draw(st.sampled_from([{}, {"cache_salt": "s", "media": [(1, 2, "a"), (7, 9, 3), (30, 4, "b")]}]))
    hasher = data.draw(st.sampled_from([FULL, PARTIAL, ONE_TOKEN]))
    prompt, tokens = read_prompt(hasher, turns[0], request_configs=configs), list(turns[0])
    for turn in turns[1:]:
        before, prompt = prompt, prompt.extended(turn)
        assert before == hashing_all(hasher, tokens, configs)  # a value: growing makes another
        tokens += turn
        assert prompt == hashing_all(hasher, tokens, configs)
        assert prompt.spans == hasher.spans(len(tokens))


@given(st.data())
def test_media_of_each_turn_give_the_keys_of_all_media_at_once(data: st.DataObject) -> None:
    tokens: list[int] = []
    media: list[tuple[int, int, int]] = []
    prompt = read_prompt(PARTIAL, [])
    for turn in range(data.draw(st.integers(1, 4))):
        length = data.draw(st.integers(0, 10))
        start = max([len(tokens) + data.draw(st.integers(0, 5)), *(start + length for start, length, _ in media)])
        new = [(start, data.draw(st.integers(1, 7)), turn)] if data.draw(st.booleans()) else []
        prompt = prompt.extended([turn] * length, media=new)
        tokens += [turn] * length
        media += new
        assert prompt == hashing_all(PARTIAL, tokens, {"media": media})


def test_growing_reads_and_hashes_no_old_token() -> None:
    tokens = np.arange(10)
    prompt = read_prompt(PARTIAL, tokens)
    tokens[:] = 0  # what the caller does with them afterwards is nothing to the prompt
    assert prompt.growth is not None and len(prompt.growth.tail) == 2 * 8
    forged = replace(prompt, keys=(b"x" * 32, b"y" * 32, prompt.keys[2]))
    grown = forged.extended([10, 11, 12])
    assert grown.keys[:2] == forged.keys[:2]
    assert list(grown.keys[2:]) == PARTIAL.keys([8, 9, 10, 11, 12], after=forged.keys[:2])


def test_media_of_a_turn_lie_in_it() -> None:
    prompt = read_prompt(FULL, range(6), request_configs={"media": [(4, 4, "a")]})
    with pytest.raises(InvalidRequestError, match=r"media\[0\] begins at token 5; accepted: 6 and on"):
        prompt.extended([6, 7], media=[(5, 1, "b")])
    with pytest.raises(InvalidRequestError, match=r"media\[1\] begins at 7, before media\[0\] ends at 8"):
        prompt.extended([6, 7], media=[(7, 1, "b")])
    with pytest.raises(InvalidRequestError, match=r"tokens\[1\] is -7"):
        prompt.extended([6, -7])


def test_a_prompt_stands_for_its_tokens() -> None:
    prompt = read_prompt(PARTIAL, range(10), request_configs={"cache_salt": "s"})
    assert read_prompt(PARTIAL, prompt) is prompt
    assert read_prompt(ChunkHasher("m", chunk_size=4, keep_partial=True), prompt, request_configs={}) is prompt
    sent = pickle.loads(pickle.dumps(prompt))
    assert sent == prompt and sent.extended([10]) == prompt.extended([10])
    with pytest.raises(InvalidRequestError, match="request_configs are in the keys of a Prompt already"):
        read_prompt(PARTIAL, prompt, request_configs={"cache_salt": "s"})
    with pytest.raises(InvalidRequestError, match="exactly one of the two"):
        read_prompt(PARTIAL, prompt, hashes=[], offsets=[])
    with pytest.raises(InvalidRequestError, match="`offsets`"):
        read_prompt(PARTIAL, prompt, offsets=[4, 4, 2])


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"model_name": "n"}, "made for model_name='m'; keys here are made for model_name='n'"),
        ({"model_revision": "r"}, "made for model_revision=None; keys here are made for model_revision='r'"),
        ({"model_generation": 2}, "made for model_generation=0; keys here are made for model_generation=2"),
        ({"chunk_size": 8}, "made for chunk_size=4; keys here are made for chunk_size=8"),
        ({"keep_partial": True}, "made for keep_partial=False; keys here are made for keep_partial=True"),
        ({"model_name": "n", "chunk_size": 8}, "model_name='m', chunk_size=4; .*model_name='n', chunk_size=8"),
    ],
)
def test_a_prompt_of_other_keys_is_refused(other: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        read_prompt(replace(FULL, **other), read_prompt(FULL, range(8)))  # type: ignore[arg-type]


def test_a_prompt_named_by_hashes_stands_for_itself_but_cannot_grow() -> None:
    prompt = read_prompt(FULL, None, hashes=FULL.keys(range(8)), offsets=[4, 4])
    assert read_prompt(FULL, prompt) is prompt
    with pytest.raises(InvalidRequestError, match="named by `hashes` cannot be extended"):
        prompt.extended([8])


def test_a_prompt_shows_no_keys_or_tokens() -> None:
    assert len(repr(read_prompt(FULL, range(10**4)))) < 200


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
