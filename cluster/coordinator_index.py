"""The `IndexClient` of a rank's engine: the world's index through its coordinator."""

import time
from collections.abc import Collection, Sequence
from typing import Final

from lmcache_ray.errors import DeadlineError
from lmcache_ray.index.plans import LoadPlan, StorePlan
from lmcache_ray.index_service import Acks
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import EVERYWHERE

from .coordinator_client import CoordinatorClient
from .messages import LoadItem, LookupItem, StoreDone, StoreItem, pack_flags, pack_keys, unpack_numbers

_LOOK_AGAIN_S: Final = 0.5


class CoordinatorIndex:
    """Each call is one call to the coordinator, and more where it has to wait for another tier.

    A lookup that is not answered in `lookup_timeout_s` is a miss. `timeout_s` is how long to wait for other tiers.
    """

    def __init__(
        self, coordinator: CoordinatorClient, *, lookup_timeout_s: float, timeout_s: float, has_remote: bool
    ) -> None:
        self._coordinator = coordinator
        self._lookup_timeout_s = lookup_timeout_s
        self._timeout_s = timeout_s
        self._has_remote = has_remote

    def lookup(self, keys: Sequence[bytes], lease_id: str | None, tiers: Collection[Tier] = EVERYWHERE) -> int:
        """See `IndexClient.lookup`."""
        deadline = time.monotonic() + self._lookup_timeout_s
        num_cached = 0
        packed = pack_keys(keys)
        try:
            items = [LookupItem(packed, lease_id)]
            num_cached = self._coordinator.lookup(items, tiers, timeout_s=self._lookup_timeout_s)[0]
            if not self._has_remote or Tier.REMOTE not in tiers or num_cached == len(keys):
                return num_cached
            remaining_s = deadline - time.monotonic()
            return self._coordinator.look_further([packed], [num_cached], timeout_s=remaining_s)[0]
        except DeadlineError:
            return num_cached

    def locate(self, keys: Sequence[bytes]) -> list[Tier]:
        """See `IndexClient.locate`."""
        return self._coordinator.locate(pack_keys(keys), timeout_s=self._lookup_timeout_s)

    def pin(self, keys: Sequence[bytes]) -> int:
        """See `IndexClient.pin`."""
        return self._coordinator.pin(pack_keys(keys))

    def unpin(self, keys: Sequence[bytes]) -> bool:
        """See `IndexClient.unpin`."""
        return self._coordinator.unpin(pack_keys(keys))

    def prepare_store(self, keys: Sequence[bytes], *, start: int, rank: int | None) -> StorePlan:
        """See `IndexClient.prepare_store`."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            is_patient = time.monotonic() < deadline
            (plan,) = self._coordinator.prepare_stores([StoreItem(pack_keys(keys), start, rank)], patient=is_patient)
            if not plan.must_wait:
                positions = tuple(unpack_numbers(plan.positions))
                return StorePlan(plan.plan_id or 0, plan.refs.unpack(), positions, plan.num_ready, 0, ())
            self._coordinator.wait_for_room(timeout_s=_LOOK_AGAIN_S)

    def complete_store(self, plan: StorePlan, keys: Sequence[bytes], acks: Acks) -> int:
        """See `IndexClient.complete_store`."""
        done = StoreDone(plan.plan_id, {rank: pack_flags(flags) for rank, flags in acks.items()})
        return self._coordinator.complete([done])[0]

    def prepare_load(self, keys: Sequence[bytes], *, start: int, lease_ids: Sequence[str]) -> LoadPlan:
        """See `IndexClient.prepare_load`. What has not come up in time is a miss; its leases end by time."""
        item = LoadItem(pack_keys(keys), start, tuple(lease_ids))
        (plan,) = self._coordinator.prepare_loads([item])
        if plan.must_wait:
            try:
                (plan,) = self._coordinator.promote_loads([item], timeout_s=self._timeout_s)
            except DeadlineError:
                plan = item.missed()
        return LoadPlan(lease_ids[0], plan.refs.unpack(), plan.start)

    def release(self, lease_ids: Sequence[str]) -> None:
        """See `IndexClient.release`."""
        self._coordinator.complete([], list(lease_ids))

    def clear(self, keys: Sequence[bytes] | None, tiers: Collection[Tier] = EVERYWHERE) -> TierClearCounts:
        """See `IndexClient.clear`."""
        return self._coordinator.clear(None if keys is None else pack_keys(keys), tiers)
