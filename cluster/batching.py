"""Running many requests as few batches: each answer in its place, each failure its own."""

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from lmcache_ray.errors import InvalidRequestError, LMCacheRayError, shown

from .messages import batches
from .requests import HasPrompt, Request

Item = TypeVar("Item", bound=HasPrompt)
Result = TypeVar("Result")

REF_NBYTES: Final = 48
"""What a planned chunk adds to a message: key, slot and generation."""


def nbytes_of_refs(item: HasPrompt) -> int:
    """Bytes of the largest message about an item of which only chunks are told."""
    return len(item.prompt.keys) * REF_NBYTES


def each_item(
    requests: Sequence[Request],
    check: Callable[[Request], Item],
    run: Callable[[Sequence[Item]], Sequence[Result | Exception]],
    *,
    nbytes_of: Callable[[Item], int] = nbytes_of_refs,
) -> list[Result | Exception]:
    """Check each request, run the good ones in batches that fit a message, and put every answer in its place.

    ``nbytes_of(item)`` is what an item adds to the largest message. A wrong request fails alone; an error of a whole
    batch is the answer of each of its items. Raises `InvalidRequestError` for what is no list of requests.
    """
    if not isinstance(requests, Sequence):
        raise InvalidRequestError(f"requests is {shown(requests)}; accepted: a list of Request")
    results: list[Result | Exception | None] = [None] * len(requests)
    good: list[tuple[int, Item]] = []
    for position, request in enumerate(requests):
        try:
            if not isinstance(request, Request):
                raise InvalidRequestError(f"item {position} of the batch is {shown(request)}; accepted: a Request")
            good.append((position, check(request)))
        except (LMCacheRayError, TypeError) as error:
            results[position] = error
    for batch in batches([nbytes_of(item) for _, item in good]):
        part = [good[index] for index in batch]
        try:
            answers = run([item for _, item in part])
        except LMCacheRayError as error:
            answers = [error] * len(part)
        for (position, _), answer in zip(part, answers, strict=True):
            results[position] = answer
    return results  # type: ignore[return-value]  # every place is filled now
