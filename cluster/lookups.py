"""Lookups of many prompts in one message to the coordinator.

A lookup stands in the way of a request, so it has a deadline of its own: what is not answered by then is a miss.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lmcache_ray.errors import DeadlineError
from lmcache_ray.keys import KEY_NBYTES
from lmcache_ray.prompt import Prompt
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import EVERYWHERE

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
    link: ClusterLink,
    requests: Sequence[Request],
    *,
    lease_id: str | None = None,
    tiers: Collection[Tier] = EVERYWHERE,
) -> list[int | Exception]:
    """Per request the leading tokens that every rank could load, pinned under `lease_id`, or why it failed.

    In no tier at all nothing is found: a lease of that id ends.
    """

    def check(request: Request) -> _Lookup:
        return _Lookup(prompt_of(link.hasher, request))

    def run(items: Sequence[_Lookup]) -> list[int]:
        counts = _count(link, [item.prompt for item in items], lease_id, tiers)
        return [item.prompt.tokens_in(count) for item, count in zip(items, counts, strict=True)]

    return each_item(requests, check, run, nbytes_of=lambda item: len(item.prompt.keys) * KEY_NBYTES)


def _count(
    link: ClusterLink, prompts: Sequence[Prompt], lease_id: str | None, tiers: Collection[Tier]
) -> list[int]:
    """The chunks of each prompt; a remote store is asked last, and costs nothing that was known before."""
    deadline = Deadline(link.world.lookup_timeout_s)
    packed = [pack_keys(prompt.keys) for prompt in prompts]
    counts = [0] * len(prompts)
    try:
        items = [LookupItem(keys, lease_id) for keys in packed]
        counts = link.coordinator.lookup(items, tiers, timeout_s=deadline.remaining_s())
        if link.world.tiers.remote is None or Tier.REMOTE not in tiers:
            return counts
        short = [at for at, prompt in enumerate(prompts) if counts[at] < len(prompt.keys)]
        if short:
            further = link.coordinator.look_further(
                [packed[at] for at in short], [counts[at] for at in short], timeout_s=deadline.remaining_s()
            )
            for at, count in zip(short, further, strict=True):
                counts[at] = count
    except DeadlineError:
        pass
    return counts
