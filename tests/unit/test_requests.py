"""Arguments of a cluster's calls: what they come to, and that a wrong one is named."""

import numpy as np
import pytest

from cluster.requests import Request, check_rows, check_span, prompt_of
from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.keys import ChunkHasher

HASHER = ChunkHasher("m", chunk_size=4)
NUM_ROWS = 16


def test_a_checked_store_knows_its_start_rows_and_chunks() -> None:
    request = Request(list(range(9)), np.arange(9)[::-1], mask=[False] * 4 + [True] * 5)
    checked = check_rows(HASHER, request, num_kv_rows=NUM_ROWS, aligned=True)
    assert (checked.start, checked.rows.tolist()) == (4, list(range(8, -1, -1)))
    assert checked.prompt.spans == [(0, 4), (4, 8)]
    assert list(checked.prompt.keys) == HASHER.keys(list(range(9)))


def test_a_retrieve_may_start_anywhere_a_store_only_on_a_chunk() -> None:
    request = Request(list(range(8)), range(8), mask=[False] * 3 + [True] * 5)
    assert check_rows(HASHER, request, num_kv_rows=NUM_ROWS, aligned=False).start == 3
    with pytest.raises(InvalidRequestError, match="multiple of chunk_size=4"):
        check_rows(HASHER, request, num_kv_rows=NUM_ROWS, aligned=True)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request([1, -1], [0, 1]), r"tokens\[1\]"),
        (Request([1, 2]), "slot_mapping is missing"),
        (Request([1, 2], [0, NUM_ROWS]), rf"slot_mapping\[1\] is {NUM_ROWS}"),
        (Request([1, 2], [0, 1], mask=[True]), "mask has shape"),
        (Request([1, 2], [0, 1], request_configs={"salt": "x"}), "'salt'"),
    ],
)
def test_a_wrong_argument_is_named(request_: Request, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        check_rows(HASHER, request_, num_kv_rows=NUM_ROWS, aligned=True)


@pytest.mark.parametrize("start", [0, 4, 8])
def test_a_span_starts_within_the_prompt(start: int) -> None:
    assert check_span(HASHER, Request(list(range(8)), start=start), aligned=True).start == start
    assert check_span(HASHER, Request(list(range(8)), start=3), aligned=False).start == 3


@pytest.mark.parametrize("start", [-1, 9, 1.0, True, None])
def test_a_start_outside_the_prompt_is_refused(start: object) -> None:
    with pytest.raises(InvalidRequestError, match="start must be within 0 to 8"):
        check_span(HASHER, Request(list(range(8)), start=start), aligned=False)  # type: ignore[arg-type]


def test_the_start_of_a_put_is_a_chunk_border() -> None:
    with pytest.raises(InvalidRequestError, match="start must be a multiple of chunk_size 4; got 3"):
        check_span(HASHER, Request(list(range(8)), start=3), aligned=True)


def test_request_configs_change_the_prompts_keys() -> None:
    plain = prompt_of(HASHER, Request([1, 2, 3, 4])).keys
    assert prompt_of(HASHER, Request([1, 2, 3, 4], request_configs={})).keys == plain
    assert prompt_of(HASHER, Request([1, 2, 3, 4], request_configs={"cache_salt": "s"})).keys != plain


def test_a_prompt_named_by_its_keys_is_the_same_as_by_its_tokens() -> None:
    tokens = list(range(11))
    keys = HASHER.keys(tokens)
    by_keys = check_rows(
        HASHER, Request(None, range(8), hashes=keys, offsets=[4, 4]), num_kv_rows=NUM_ROWS, aligned=True
    )
    by_tokens = check_rows(HASHER, Request(tokens[:8], range(8)), num_kv_rows=NUM_ROWS, aligned=True)
    assert list(by_keys.prompt.keys) == list(by_tokens.prompt.keys) == list(keys)
    assert by_keys.prompt.spans == by_tokens.prompt.spans
    assert check_span(HASHER, Request(start=4, hashes=keys, offsets=[4, 4]), aligned=True).start == 4


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request(), "tokens is missing"),
        (Request([1], hashes=[b"x" * 32], offsets=[4]), "exactly one of the two"),
        (Request(hashes=[b"x" * 32]), "offsets is missing"),
        (Request(hashes=[b"x" * 31], offsets=[4]), r"hashes\[0\]"),
        (Request(hashes=5, offsets=[4]), r"hashes is 5 \(int\); accepted: a list"),  # type: ignore[arg-type]
        (Request(hashes={b"x" * 32}, offsets=[4]), "hashes is {.* accepted: a list"),  # type: ignore[arg-type]
        (Request(hashes=[b"x" * 32], offsets=iter([4])), "offsets is .* accepted: a list"),  # type: ignore[arg-type]
        (Request(hashes=[b"x" * 32], offsets=[3]), r"offsets\[0\] is 3"),
        (Request(hashes=[b"x" * 32], offsets=[4], request_configs={"cache_salt": "s"}), "keys already"),
    ],
)
def test_wrong_names_of_a_prompt_are_refused(request_: Request, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        prompt_of(HASHER, request_)
