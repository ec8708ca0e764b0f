"""Many requests as few batches: an answer in each place, and each failure its own."""

from collections.abc import Sequence

import pytest

from cluster.batching import each_item
from cluster.requests import CheckedSpan, Request, check_span, prompt_of
from lmcache_ray.errors import ClusterError, InvalidRequestError
from lmcache_ray.keys import ChunkHasher

HASHER = ChunkHasher("m", chunk_size=4)


def check(request: Request) -> CheckedSpan:
    return check_span(HASHER, request, aligned=False)


def count(items: Sequence[CheckedSpan]) -> list[int]:
    return [item.prompt.num_tokens for item in items]


def test_what_is_no_request_fails_alone_and_in_its_place() -> None:
    requests = [Request([1]), None, Request([1, 2]), 5, Request([-1])]
    one, nothing, two, number, negative = each_item(requests, check, count)  # type: ignore[arg-type]
    assert (one, two) == (1, 2)
    assert isinstance(nothing, InvalidRequestError) and "item 1" in str(nothing)
    assert isinstance(number, InvalidRequestError) and "item 3" in str(number)
    assert isinstance(negative, InvalidRequestError) and "tokens[0]" in str(negative)


@pytest.mark.parametrize("requests", [None, 5, Request([1]), iter([Request([1])])])
def test_what_is_no_list_of_requests_is_named(requests: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"requests is .*; accepted: a list of Request"):
        each_item(requests, check, count)  # type: ignore[arg-type]


def test_an_error_of_a_batch_is_the_answer_of_each_of_its_items() -> None:
    def fail(items: Sequence[CheckedSpan]) -> list[int]:
        raise ClusterError("gone")

    answers = each_item([Request([1]), Request([2])], check, fail)
    assert [str(answer) for answer in answers] == ["gone", "gone"]


def test_missing_tokens_are_called_by_their_name() -> None:
    with pytest.raises(InvalidRequestError, match="tokens is missing"):
        prompt_of(HASHER, Request())
