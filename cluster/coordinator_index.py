"""The `IndexClient` of a process that is not the coordinator: each call is one actor call with a deadline."""

from collections.abc import Sequence

from lmcache_ray.errors import DeadlineError
from lmcache_ray.index.plans import LoadPlan, StorePlan
from lmcache_ray.index_service import Acks, ClearCounts

from .messages import (
    LoadItem,
    LookupItem,
    PlannedLoad,
    PlannedStore,
    StoreDone,
    StoreItem,
    pack_flags,
    pack_keys,
    unpack_numbers,
)
from .ray_calls import Actor, wait_for


class CoordinatorIndex:
    """The world's index through its coordinator."""

    def __init__(self, coordinator: Actor, client: str, *, call_timeout_s: float, lookup_timeout_s: float) -> None:
        self._coordinator = coordinator
        self._client = client
        self._timeout_s = call_timeout_s
        self._lookup_timeout_s = lookup_timeout_s

    def lookup(self, keys: Sequence[bytes], lease_id: str | None) -> int:
        """See `IndexClient.lookup`; not answered in time is a miss."""
        items = [LookupItem(pack_keys(keys), lease_id)]
        reference = self._coordinator.lookup.remote(self._client, items)
        try:
            answers = wait_for(reference, timeout_s=self._lookup_timeout_s, what="the coordinator (lookup)")
        except DeadlineError:
            return 0
        assert isinstance(answers, list)
        return int(answers[0])

    def prepare_store(self, keys: Sequence[bytes], *, start: int, rank: int | None) -> StorePlan:
        """See `IndexClient.prepare_store`."""
        items = [StoreItem(pack_keys(keys), start, rank)]
        plan = self._ask_one("prepare_stores", self._client, items)
        assert isinstance(plan, PlannedStore)
        return StorePlan(
            plan.plan_id, plan.refs.unpack(), tuple(unpack_numbers(plan.positions)), plan.num_ready, 0, ()
        )

    def complete_store(self, plan: StorePlan, keys: Sequence[bytes], acks: Acks) -> int:
        """See `IndexClient.complete_store`."""
        done = StoreDone(plan.plan_id, {rank: pack_flags(flags) for rank, flags in acks.items()})
        num_ready = self._ask_one("complete", [done])
        assert isinstance(num_ready, int)
        return num_ready

    def prepare_load(self, keys: Sequence[bytes], *, start: int, lease_ids: Sequence[str]) -> LoadPlan:
        """See `IndexClient.prepare_load`."""
        items = [LoadItem(pack_keys(keys), start, tuple(lease_ids))]
        plan = self._ask_one("prepare_loads", self._client, items)
        assert isinstance(plan, PlannedLoad)
        return LoadPlan(lease_ids[0], plan.refs.unpack(), plan.start)

    def release(self, lease_ids: Sequence[str]) -> None:
        """See `IndexClient.release`."""
        self._ask("complete", [], list(lease_ids))

    def clear(self, keys: Sequence[bytes] | None) -> ClearCounts:
        """See `IndexClient.clear`."""
        counts = self._ask("clear", None if keys is None else pack_keys(keys))
        assert isinstance(counts, ClearCounts)
        return counts

    def _ask_one(self, method: str, *arguments: object) -> object:
        """Ask a batch of one; its only answer."""
        answers = self._ask(method, *arguments)
        assert isinstance(answers, list)
        return answers[0]

    def _ask(self, method: str, *arguments: object) -> object:
        reference = getattr(self._coordinator, method).remote(*arguments)
        return wait_for(reference, timeout_s=self._timeout_s, what=f"the coordinator ({method})")
