"""The `IndexClient` of a rank's engine: the world's index through its coordinator."""

from collections.abc import Sequence

from lmcache_ray.errors import DeadlineError
from lmcache_ray.index.plans import LoadPlan, StorePlan
from lmcache_ray.index_service import Acks, ClearCounts

from .coordinator_client import CoordinatorClient
from .messages import LoadItem, LookupItem, StoreDone, StoreItem, pack_flags, pack_keys, unpack_numbers


class CoordinatorIndex:
    """Each call is one call to the coordinator. A lookup that is not answered in `lookup_timeout_s` is a miss."""

    def __init__(self, coordinator: CoordinatorClient, *, lookup_timeout_s: float) -> None:
        self._coordinator = coordinator
        self._lookup_timeout_s = lookup_timeout_s

    def lookup(self, keys: Sequence[bytes], lease_id: str | None) -> int:
        """See `IndexClient.lookup`."""
        items = [LookupItem(pack_keys(keys), lease_id)]
        try:
            return self._coordinator.lookup(items, timeout_s=self._lookup_timeout_s)[0]
        except DeadlineError:
            return 0

    def prepare_store(self, keys: Sequence[bytes], *, start: int, rank: int | None) -> StorePlan:
        """See `IndexClient.prepare_store`."""
        (plan,) = self._coordinator.prepare_stores([StoreItem(pack_keys(keys), start, rank)])
        positions = tuple(unpack_numbers(plan.positions))
        return StorePlan(plan.plan_id or 0, plan.refs.unpack(), positions, plan.num_ready, 0, ())

    def complete_store(self, plan: StorePlan, keys: Sequence[bytes], acks: Acks) -> int:
        """See `IndexClient.complete_store`."""
        done = StoreDone(plan.plan_id, {rank: pack_flags(flags) for rank, flags in acks.items()})
        return self._coordinator.complete([done])[0]

    def prepare_load(self, keys: Sequence[bytes], *, start: int, lease_ids: Sequence[str]) -> LoadPlan:
        """See `IndexClient.prepare_load`."""
        (plan,) = self._coordinator.prepare_loads([LoadItem(pack_keys(keys), start, tuple(lease_ids))])
        return LoadPlan(lease_ids[0], plan.refs.unpack(), plan.start)

    def release(self, lease_ids: Sequence[str]) -> None:
        """See `IndexClient.release`."""
        self._coordinator.complete([], list(lease_ids))

    def clear(self, keys: Sequence[bytes] | None) -> ClearCounts:
        """See `IndexClient.clear`."""
        return self._coordinator.clear(None if keys is None else pack_keys(keys))
