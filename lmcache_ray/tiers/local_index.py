"""The `IndexClient` of an engine that lives in the same process as the index and what moves chunks between tiers."""

import time
from collections.abc import Collection, Sequence
from typing import Final

from lmcache_ray.index.plans import LoadPlan, StorePlan
from lmcache_ray.index_service import Acks, IndexService
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tier_service import TierService
from lmcache_ray.tiers.tiered_index import EVERYWHERE

_PATIENCE_S: Final = 0.05  # between two looks for room


class LocalIndex:
    """One client's `IndexClient`. A call that has to wait for another tier does so for `timeout_s` at most."""

    def __init__(self, service: IndexService, tiers: TierService, client: str, *, timeout_s: float) -> None:
        self._service = service
        self._tiers = tiers
        self._client = client
        self._timeout_s = timeout_s

    def lookup(self, keys: Sequence[bytes], lease_id: str | None, tiers: Collection[Tier] = EVERYWHERE) -> int:
        """See `IndexClient.lookup`."""
        num_cached = self._service.lookup(keys, client=self._client, lease_id=lease_id, tiers=tiers)
        if Tier.REMOTE not in tiers or not self._tiers.promoter.may_find_more(keys, num_cached):
            return num_cached
        return self._tiers.promoter.look_further(keys, num_cached, client=self._client, timeout_s=self._timeout_s)

    def locate(self, keys: Sequence[bytes]) -> list[Tier]:
        """See `IndexClient.locate`."""
        return self._tiers.promoter.locate(keys, timeout_s=self._timeout_s)

    def pin(self, keys: Sequence[bytes]) -> int:
        """See `IndexClient.pin`."""
        return self._service.pin(keys)

    def unpin(self, keys: Sequence[bytes]) -> bool:
        """See `IndexClient.unpin`."""
        return self._service.unpin(keys)

    def prepare_store(self, keys: Sequence[bytes], *, start: int, rank: int | None) -> StorePlan:
        """See `IndexClient.prepare_store`. Waits while chunks on their way down leave no room."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            is_patient = time.monotonic() < deadline
            plan = self._service.prepare_store(
                keys, client=self._client, start=start, rank=rank, patient=is_patient
            )
            if isinstance(plan, StorePlan):
                return plan
            self._tiers.promoter.wait_for_room(_PATIENCE_S)

    def complete_store(self, plan: StorePlan, keys: Sequence[bytes], acks: Acks) -> int:
        """See `IndexClient.complete_store`."""
        return self._service.complete_store(plan.plan_id, keys, acks)

    def prepare_load(self, keys: Sequence[bytes], *, start: int, lease_ids: Sequence[str]) -> LoadPlan:
        """See `IndexClient.prepare_load`. Brings up what lies below memory first."""
        promoter = self._tiers.promoter
        plan = self._service.prepare_load(
            keys,
            client=self._client,
            start=start,
            lease_ids=lease_ids,
            has_more=lambda index: promoter.may_have_more(index, keys, start),
        )
        if not isinstance(plan, LoadPlan):
            promoter.promote(
                [keys], lease_ids[:1], client=self._client, timeout_s=self._timeout_s, starts=[start]
            )
            plan = self._service.prepare_load(keys, client=self._client, start=start, lease_ids=lease_ids)
            assert isinstance(plan, LoadPlan)  # nobody asked whether there is more
        return plan

    def release(self, lease_ids: Sequence[str]) -> None:
        """See `IndexClient.release`."""
        self._service.release(lease_ids)

    def clear(self, keys: Sequence[bytes] | None, tiers: Collection[Tier] = EVERYWHERE) -> TierClearCounts:
        """See `IndexClient.clear`."""
        return self._tiers.clear(keys, tiers)
