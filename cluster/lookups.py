"""Lookups of many prompts in one message to the coordinator.

A lookup stands in the way of a request, so it has a deadline of its own: what is not answered by then is a miss.
"""

from collections.abc import Sequence

from lmcache_ray.errors import DeadlineError, LMCacheRayError
from lmcache_ray.index_service import LeaseNames
from lmcache_ray.prompt import Prompt

from .link import ClusterLink
from .messages import LookupItem, batches, pack_keys
from .requests import Request, prompt_of


def lookup_prompts(link: ClusterLink, wanted: Sequence[tuple[Request, str | None]]) -> list[int | Exception]:
    """Per (request, lookup id to pin under) the leading tokens every rank could load, or why it failed."""
    link.check_open()
    results: list[int | Exception] = [0] * len(wanted)
    good: list[tuple[int, Prompt, LookupItem]] = []
    for position, (request, lookup_id) in enumerate(wanted):
        try:
            prompt = prompt_of(link.hasher, request.tokens, request.request_configs)
        except (LMCacheRayError, TypeError) as error:
            results[position] = error
            continue
        lease_id = None if lookup_id is None else LeaseNames.for_lookup(lookup_id)
        if prompt.keys:
            good.append((position, prompt, LookupItem(pack_keys(prompt.keys), lease_id)))
    for batch in batches([len(item.keys) for _, _, item in good]):
        part = [good[index] for index in batch]
        try:
            counts = link.ask(
                "lookup", link.client_id, [item for _, _, item in part], timeout_s=link.world.lookup_timeout_s
            )
        except DeadlineError:
            continue
        assert isinstance(counts, list)
        for (position, prompt, _), count in zip(part, counts, strict=True):
            results[position] = prompt.tokens_in(count)
    return results
