"""Planning many requests in one go, with the outcome of planning and carrying them out one by one.

Apart from the index, because it is not a rule of its own: it asks the index for one request after the other and stops
where the answer would depend on work that has not been done.
"""

from collections.abc import Sequence

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import Deferred, LoadPlan, StorePlan


def plan_window(
    index: CacheIndex, requests: Sequence[Sequence[bytes]], *, client: str, now: float, lease_ids: Sequence[str]
) -> list[tuple[LoadPlan, StorePlan]]:
    """Load and store plans of the leading requests that can be planned now: at least one, if there is any.

    Each request is looked up, then stored, in order, request i loading under ``lease_ids[i]``. Hits and evictions are
    exactly those of a run in which each request is finished, and its lease released, before the next is planned. The
    caller finishes those planned, then asks again with the rest.
    """
    if len(lease_ids) != len(requests):
        raise InvalidRequestError(f"{len(requests)} requests need as many lease ids, not {len(lease_ids)}")
    plans: list[tuple[LoadPlan, StorePlan]] = []
    for keys, lease_id in zip(requests, lease_ids, strict=True):
        planned = index.prepare_request(keys, lease_id=lease_id, client=client, now=now, defer=bool(plans))
        if isinstance(planned, Deferred):
            break
        plans.append(planned)
    return plans
