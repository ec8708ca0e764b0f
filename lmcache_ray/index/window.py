"""Planning many requests in one go, with the outcome of planning and carrying them out one by one.

Apart from the index, because it is not a rule of its own: it asks the index for one request after the other and stops
where the answer would depend on work that has not been done.
"""

from collections.abc import Sequence
from typing import Protocol

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.index.plans import Deferred, LoadPlan, StorePlan

PlannedRequest = tuple[LoadPlan, StorePlan]


class PrepareRequest(Protocol):
    """An index's `prepare_request`, with what is its own affair already said."""

    def __call__(
        self, keys: Sequence[bytes], *, lease_id: str, client: str, now: float, defer: bool
    ) -> PlannedRequest | Deferred:
        """Both plans of one request, or Deferred and no change."""
        ...


def plan_window(
    prepare: PrepareRequest,
    requests: Sequence[Sequence[bytes]],
    *,
    client: str,
    now: float,
    lease_ids: Sequence[str],
) -> tuple[list[PlannedRequest], Deferred | None]:
    """Load and store plans of the leading requests that can be planned now, and why the next one cannot.

    Each request is looked up, then stored, in order, request i loading under ``lease_ids[i]``. Hits and evictions are
    exactly those of a run in which each request is finished, and its lease released, before the next is planned. The
    caller finishes those planned, then asks again with the rest. The first request is not asked to `defer`: an index
    of memory alone always plans it.
    """
    if len(lease_ids) != len(requests):
        raise InvalidRequestError(f"{len(requests)} requests need as many lease ids, not {len(lease_ids)}")
    plans: list[PlannedRequest] = []
    for keys, lease_id in zip(requests, lease_ids, strict=True):
        planned = prepare(keys, lease_id=lease_id, client=client, now=now, defer=bool(plans))
        if isinstance(planned, Deferred):
            return plans, planned
        plans.append(planned)
    return plans, None
