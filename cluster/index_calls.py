"""What callers ask of the index and of the tiers below it, as the coordinator answers: planned, packed, remembered.

Apart from the actor, which is threads and life. Every call here is asked by name, as one packed message. Those of
`PATIENT` may wait, for chunks to come up or for room, and run on threads of their own, so that no other call waits
behind them.
"""

from collections.abc import Callable, Sequence
from typing import Final

from lmcache_ray.index.plans import Deferred, LoadPlan, StorePlan
from lmcache_ray.index.window import PlannedRequest, plan_window
from lmcache_ray.index_service import IndexService
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tier_service import TierService

from .clients import Clients
from .deadline import Deadline
from .messages import (
    DirectWrites,
    LoadItem,
    LookupItem,
    PackedRefs,
    PlannedLoad,
    PlannedStore,
    PlannedWindow,
    StoreDone,
    StoreItem,
    pack_numbers,
    unpack_flags,
    unpack_keys,
)
from .open_plans import OpenPlans
from .packed_calls import Calls
from .world import WorldSpec

_NO_REFS: Final = PackedRefs.pack(())
_NO_STORE: Final = PlannedStore(None, _NO_REFS, b"", 0)
_LATER_STORE: Final = PlannedStore(None, _NO_REFS, b"", 0, must_wait=True)


class IndexCalls:
    """The calls. Thread-safe, as its parts are."""

    def __init__(
        self,
        world: WorldSpec,
        *,
        service: IndexService,
        tiers: TierService,
        can_serve: Callable[[], bool],
        may_store: Callable[[], bool],
        plans: OpenPlans,
        clients: Clients,
        clear: Callable[[Sequence[bytes] | None, Sequence[Tier]], TierClearCounts],
    ) -> None:
        """While `can_serve` says no, everything is a miss, and while `may_store` does, no store is planned.

        `clear` forgets chunks in tiers, on every rank.
        """
        self._world = world
        self._service = service
        self._tiers = tiers
        self._can_serve = can_serve
        self._may_store = may_store
        self._plans = plans
        self._clients = clients
        self._clear = clear
        self.prompt: Final[Calls] = _by_name(
            self.lookup, self.prepare_loads, self.prepare_stores, self.prepare_window, self.complete, self.pin,
            self.unpin,
        )  # fmt: skip
        self.patient: Final[Calls] = _by_name(
            self.look_further, self.locate, self.promote_loads, self.promote, self.wait_for_room, self.clear,
            self.check_tiers,
        )  # fmt: skip

    # -- lookups ------------------------------------------------------------------------------------------------------

    def lookup(self, client: str, items: Sequence[LookupItem], tiers: Sequence[Tier]) -> list[int]:
        """Leading chunks of each prompt that memory and disk, as far as they are among `tiers`, have."""
        if not self._can_serve():
            return [0] * len(items)
        return [
            self._service.lookup(unpack_keys(item.keys), client=client, lease_id=item.lease_id, tiers=tiers)
            for item in items
        ]

    def look_further(
        self, client: str, prompts: Sequence[bytes], num_cached: Sequence[int], wait_s: float
    ) -> list[int]:
        """The same with the remote store, behind the chunks that are known to be cached; they begin to come up."""
        if not self._can_serve():
            return list(num_cached)
        promoter, deadline = self._tiers.promoter, Deadline(wait_s)
        return [
            promoter.look_further(unpack_keys(keys), known, client=client, timeout_s=deadline.remaining_s())
            for keys, known in zip(prompts, num_cached, strict=True)
        ]

    def locate(self, keys: bytes, wait_s: float) -> list[Tier]:
        """The fastest tier that has each of the leading chunks."""
        if not self._can_serve():
            return []
        return self._tiers.promoter.locate(unpack_keys(keys), timeout_s=wait_s)

    def pin(self, keys: bytes) -> int:
        """Pin the leading cached chunks until `unpin`."""
        return self._service.pin(unpack_keys(keys)) if self._can_serve() else 0

    def unpin(self, keys: bytes) -> bool:
        """End a pin."""
        return self._service.unpin(unpack_keys(keys))

    # -- loads --------------------------------------------------------------------------------------------------------

    def prepare_loads(self, client: str, items: Sequence[LoadItem]) -> list[PlannedLoad]:
        """Pin what each prompt can load, and say where it lies; or that part of it has to come up first."""
        if not self._can_serve():
            return [item.missed() for item in items]
        return self._prepare_loads(client, items, may_wait=self._world.tiers.has_lower)

    def promote_loads(self, client: str, items: Sequence[LoadItem], wait_s: float) -> list[PlannedLoad]:
        """Bring up what the leading items can load, at least one's; the others must wait until these are loaded."""
        if not self._can_serve():
            return [item.missed() for item in items]
        promoted = self._tiers.promoter.promote(
            [unpack_keys(item.keys) for item in items],
            [item.lease_ids[0] for item in items],
            client=client,
            timeout_s=wait_s,
            starts=[item.start for item in items],
        )
        planned = self._prepare_loads(client, items[: len(promoted)], may_wait=False)
        return planned + [PlannedLoad(item.start, _NO_REFS, must_wait=True) for item in items[len(promoted) :]]

    def promote(
        self, client: str, prompts: Sequence[bytes], lease_ids: Sequence[str], wait_s: float
    ) -> list[tuple[int, int]]:
        """Bring the leading prompts up, at least one: of each, how many chunks came from disk and from the remote."""
        promoted = self._tiers.promoter.promote(
            [unpack_keys(keys) for keys in prompts], lease_ids, client=client, timeout_s=wait_s
        )
        return [(counts.disk, counts.remote) for counts in promoted]

    def _prepare_loads(self, client: str, items: Sequence[LoadItem], *, may_wait: bool) -> list[PlannedLoad]:
        if not any(item.keep for item in items):
            return [self._prepare_load(client, item, may_wait=may_wait, may_keep=False) for item in items]
        with self._clients.while_known(client) as hello:  # a lease kept for nobody would never end
            may_keep = hello.liveness_path is not None
            return [self._prepare_load(client, item, may_wait=may_wait, may_keep=may_keep) for item in items]

    def _prepare_load(self, client: str, item: LoadItem, *, may_wait: bool, may_keep: bool) -> PlannedLoad:
        keys = unpack_keys(item.keys)
        plan = self._service.prepare_load(
            keys,
            client=client,
            start=item.start,
            lease_ids=item.lease_ids,
            has_more=lambda index: may_wait and self._tiers.promoter.may_have_more(index, keys, item.start),
        )
        if isinstance(plan, Deferred):
            return PlannedLoad(item.start, _NO_REFS, must_wait=True)
        asked = item.keep and may_keep and bool(plan.refs)
        is_kept = asked and self._service.keep(plan.lease_id, max_slots=self._world.max_viewed_slots)
        return _packed_load(plan, is_kept=is_kept)

    # -- stores -------------------------------------------------------------------------------------------------------

    def prepare_stores(
        self, client: str, items: Sequence[StoreItem], direct: DirectWrites | None = None, patient: bool = False
    ) -> list[PlannedStore]:
        """Reserve slots for what each prompt has that nobody has yet.

        `direct`: the client process may write slots itself, so only its own word or its end settles them; one whose end
        cannot be proven has no arena on its node. `patient`: where chunks that wait for the disk leave no room, the
        answer is to wait, not to leave something out.
        """
        if not self._can_serve() or not self._may_store():
            return [_NO_STORE] * len(items)
        if direct is None:
            return self._plan_stores(client, items, None, patient=patient)
        self._plans.forget_calls(client, before=direct.oldest)
        with self._clients.while_known(client) as hello:  # a writer that nobody knows could never be proven dead
            writes = direct if hello.liveness_path is not None else None
            return self._plan_stores(client, items, writes, patient=patient)

    def _plan_stores(
        self, client: str, items: Sequence[StoreItem], direct: DirectWrites | None, *, patient: bool
    ) -> list[PlannedStore]:
        prompts = [unpack_keys(item.keys) for item in items]
        plans: list[StorePlan | Deferred] = []
        has_begun = False
        for keys, item in zip(prompts, items, strict=True):
            plan = self._service.prepare_store(
                keys, client=client, start=item.start, rank=item.rank, patient=patient, has_begun=has_begun
            )
            plans.append(plan)
            has_begun = has_begun or (isinstance(plan, StorePlan) and bool(plan.refs))
        made = [(keys, plan) for keys, plan in zip(prompts, plans, strict=True) if isinstance(plan, StorePlan)]
        if any(plan.refs for _, plan in made):  # else there is nothing to report
            for keys, plan in made:
                if plan.num_ready < len(keys):
                    if direct is None:
                        self._plans.open(plan, keys, None)
                    else:
                        self._plans.open(plan, keys, client, call=direct.call)
        return [_LATER_STORE if isinstance(plan, Deferred) else _packed_store(plan) for plan in plans]

    def wait_for_room(self, wait_s: float) -> None:
        """Return when chunks have been copied down, so that a store may find room now, or after `wait_s`."""
        self._tiers.promoter.wait_for_room(wait_s)

    def complete(self, stores: Sequence[StoreDone], releases: Sequence[str] = ()) -> list[int]:
        """Take acknowledgements in and end leases; answers, per store, its prompt's leading READY chunks.

        They are counted after all were taken in, since one prompt of a batch may end in chunks that another stored.
        """
        for store in stores:
            acks = {rank: unpack_flags(flags) for rank, flags in store.flags.items()}
            self._service.acknowledge(store.plan_id, acks)
        if releases:
            self._service.release(releases)
        return [self._service.num_ready(self._plans.close(store.plan_id)) for store in stores]

    # -- windows ------------------------------------------------------------------------------------------------------

    def prepare_window(
        self,
        client: str,
        prompts: Sequence[bytes],
        lease_ids: Sequence[str],
        promoted: Sequence[str] = (),
        patient: bool = False,
    ) -> PlannedWindow:
        """Plan load 1, store 1, load 2, store 2, ... of packed prompts as if each had ended before the next began.

        Answers fewer than asked when a prompt's plan depends on one before it: ask for it again after completion. None
        at all means that the first has to be promoted, or to wait for room, and says so. What the lease ids in
        `promoted` stand for is in memory already, as far as it can be.
        """
        keys = [unpack_keys(prompt) for prompt in prompts]
        if not self._can_serve() or not self._may_store():
            return PlannedWindow([(PlannedLoad(0, _NO_REFS), _NO_STORE)] * len(prompts))
        is_up = frozenset(promoted)

        def prepare(
            keys: Sequence[bytes], *, lease_id: str, client: str, now: float, defer: bool
        ) -> PlannedRequest | Deferred:
            if lease_id not in is_up and self._tiers.promoter.may_have_more(index, keys):
                return Deferred.BELOW
            return index.prepare_request(
                keys, lease_id=lease_id, client=client, now=now, defer=defer, patient=patient
            )

        with self._service.at_now() as (index, now):
            plans, stopped_by = plan_window(prepare, keys, client=client, now=now, lease_ids=lease_ids)
        for (_, store), prompt_keys in zip(plans, keys, strict=False):
            if store.refs:
                self._plans.open(store, prompt_keys, None)
        planned = [(_packed_load(load), _packed_store(store)) for load, store in plans]
        return PlannedWindow(planned, stopped_by is Deferred.BELOW, stopped_by is Deferred.NOT_WHOLE)

    # -- tiers --------------------------------------------------------------------------------------------------------

    def clear(self, keys: bytes | None, tiers: Sequence[Tier]) -> TierClearCounts:
        """Forget chunks (None: all) in `tiers` and have every holder drop them."""
        return self._clear(None if keys is None else unpack_keys(keys), tiers)

    def check_tiers(self, repair: bool, wait_s: float) -> list[str]:
        """Compare the disk's index and files in both directions; what was found, a sentence each."""
        return [] if self._tiers.disk is None else self._tiers.disk.check(repair=repair, timeout_s=wait_s)


def _by_name(*calls: Callable[..., object]) -> Calls:
    return {call.__name__: call for call in calls}


def _packed_load(plan: LoadPlan, *, is_kept: bool = False) -> PlannedLoad:
    return PlannedLoad(plan.start, PackedRefs.pack(plan.refs), is_kept)


def _packed_store(plan: StorePlan) -> PlannedStore:
    return PlannedStore(plan.plan_id, PackedRefs.pack(plan.refs), pack_numbers(plan.positions), plan.num_ready)
