"""Lookups of many prompts in one message to the coordinator.

A lookup stands in the way of a request, so it has a deadline of its own: what is not answered by then is a miss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_ray.errors import DeadlineError
from lmcache_ray.keys import KEY_NBYTES
from lmcache_ray.prompt import Prompt

from .batching import each_item
from .deadline import Deadline
from .link import ClusterLink
from .messages import LookupItem, pack_keys
from .requests import Request, prompt_of


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A checked lookup."""

    prompt: Prompt


def lookup_prompts(
    link: ClusterLink, requests: Sequence[Request], *, lease_id: str | None = None, is_wanted: bool = True
) -> list[int | Exception]:
    """Per request the leading tokens that every rank could load, pinned under `lease_id`, or why it failed.

    Without `is_wanted` nothing is looked for, and so nothing found: a lease of that id ends.
    """

    def check(request: Request) -> _Lookup:
        return _Lookup(prompt_of(link.hasher, request))

    def run(items: Sequence[_Lookup]) -> list[int]:
        messages = [LookupItem(pack_keys(item.prompt.keys if is_wanted else ()), lease_id) for item in items]
        deadline = Deadline(link.world.lookup_timeout_s)
        try:
            counts = link.coordinator.lookup(messages, timeout_s=deadline.remaining_s())
        except DeadlineError:
            counts = [0] * len(items)
        return [item.prompt.tokens_in(count) for item, count in zip(items, counts, strict=True)]

    return each_item(requests, check, run, nbytes_of=lambda item: len(item.prompt.keys) * KEY_NBYTES)
