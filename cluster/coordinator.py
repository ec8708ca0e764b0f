"""The coordinator actor: the world's one index, its membership, and the meeting point of broadcasts.

It decides and remembers; it moves no KV bytes and loads no torch. It runs on many threads, because one blocked call
must not stop the others; the state behind them is locked in `IndexService`, `Exchange` and `Clients`. Callers carry its
plans to the ranks themselves and report back in one batched `complete`.
"""

import os
import time
import uuid
from collections.abc import Sequence

import ray

from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.broadcast.tags import Tag, TakeResult
from lmcache_ray.errors import DeadlineError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import LoadPlan, StorePlan
from lmcache_ray.index.policy import make_policy
from lmcache_ray.index.window import plan_window
from lmcache_ray.index_service import ClearCounts, IndexService

from .clients import Clients
from .housekeeping import Housekeeping
from .introduction import Introduction
from .membership import Membership
from .messages import (
    ClientHello,
    LoadItem,
    LookupItem,
    PackedRefs,
    PlannedLoad,
    PlannedStore,
    RankHello,
    StoreDone,
    StoreItem,
    pack_numbers,
    unpack_flags,
    unpack_keys,
)
from .open_plans import OpenPlans
from .packed_calls import run_call
from .rank_calls import RankCalls
from .ray_calls import Actor
from .world import ClusterStatus, TierStatus, WorldSpec, rank_status

_NO_REFS = PackedRefs.pack(())
_NO_STORE = PlannedStore(None, _NO_REFS, b"", 0)


def concurrency_groups(world_size: int) -> dict[str, int]:
    """Threads for each kind of call, so that one kind never waits for another.

    `clear` waits for ranks; in `broadcast` every rank may be waiting, and every one of them publishing.
    """
    return {"control": 4, "index": 8, "clear": 2, "broadcast": 2 * world_size + 2}


class Coordinator:
    """One per cache cluster. `epoch` is part of every generation it issues."""

    def __init__(self, world: WorldSpec, epoch: int) -> None:
        self._world = world
        self._epoch = epoch
        self._membership = Membership(world.layout.world_size, world.layout.holders)
        self._calls = RankCalls(clear_timeout_s=world.call_timeout_s / 2)
        index = CacheIndex(
            world.num_slots,
            world.layout.holders,
            make_policy(world.cache_policy),
            epoch=epoch,
            call_timeout_s=world.call_timeout_s,
            lease_timeout_s=world.lease_timeout_s,
        )
        self._service = IndexService(index, clock=time.monotonic, free_slots=self._calls.free_slots)
        self._plans = OpenPlans(clock=time.monotonic, keep_s=10 * world.call_timeout_s)
        self._exchange = Exchange(f"{epoch}-{uuid.uuid4().hex}", world.layout.world_size, world.call_timeout_s)
        self._clients = Clients(self._forget_client)
        self._adopted: Introduction | None = None
        self._index_calls = {
            call.__name__: call
            for call in (self.lookup, self.prepare_loads, self.prepare_stores, self.prepare_window, self.complete)
        }
        self._house = Housekeeping(
            service=self._service,
            membership=self._membership,
            calls=self._calls,
            plans=self._plans,
            clients=self._clients,
            exchange=self._exchange,
        )

    # -- control: membership and status -----------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        """The epoch, as a sign of life."""
        return self._epoch

    @ray.method(concurrency_group="control")
    def adopt(self, hellos: Sequence[RankHello], workers: Sequence[Actor]) -> None:
        """Take the started ranks in, and watch them from now on."""
        for hello in hellos:
            self._membership.joined(hello)
        self._adopted = Introduction(self._world, tuple(workers), tuple(hellos))
        self._calls.adopt(workers)

    @ray.method(concurrency_group="control")
    def introduce(self) -> Introduction | None:
        """The world and who serves it; None until they have been adopted. It never changes then."""
        return self._adopted

    @ray.method(concurrency_group="control")
    def status(self) -> ClusterStatus:
        """All that is known of the world now."""
        with self._service.at_now() as (index, _):
            counts = index.counts()
            view_leases, viewed_slots = index.kept()
        used = counts.capacity - counts.free
        return ClusterStatus(
            name=self._world.name,
            namespace=self._world.namespace,
            epoch=self._epoch,
            coordinator_pid=os.getpid(),
            tiers={"cpu": TierStatus(counts.ready, counts.writing, counts.quarantined, counts.free, counts.capacity)},
            leases=counts.leases,
            view_leases=view_leases,
            viewed_slots=viewed_slots,
            clients=len(self._clients),
            problems=(*self._membership.problems(), *self._house.faults.values()),
            ranks=tuple(
                rank_status(rank, record, self._epoch, used if rank in self._world.layout.holders else 0)
                for rank, record in enumerate(self._membership.records())
            ),
        )

    @ray.method(concurrency_group="control")
    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the index contradicts itself."""
        with self._service.at_now() as (index, _):
            index.check_integrity()

    @ray.method(concurrency_group="control")
    def register_client(self, hello: ClientHello) -> None:
        """A process begins to use the cluster."""
        self._clients.enter(hello)

    @ray.method(concurrency_group="control")
    def unregister_client(self, client_id: str) -> None:
        """It has ended: its leases end too."""
        self._clients.leave(client_id)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the threads of this process; the actor is killed next."""
        self._house.stop()

    # -- index: plans and completions -------------------------------------------------------------------------------

    @ray.method(concurrency_group="index")
    def decide(self, call: bytes) -> bytes:
        """One of the calls below that ask the index, packed (see `packed_calls.py`)."""
        return run_call(self._index_calls, call)

    def lookup(self, client: str, items: Sequence[LookupItem]) -> list[int]:
        """Leading READY chunks of each prompt."""
        if not self._membership.can_serve():
            return [0] * len(items)
        return [
            self._service.lookup(unpack_keys(item.keys), client=client, lease_id=item.lease_id) for item in items
        ]

    def prepare_loads(self, client: str, items: Sequence[LoadItem]) -> list[PlannedLoad]:
        """Pin what each prompt can load, and say where it lies."""
        if not self._membership.can_serve():
            return [PlannedLoad(item.start, _NO_REFS) for item in items]
        if not any(item.keep for item in items):
            return [self._prepare_load(client, item, may_keep=False) for item in items]
        with self._clients.while_known(client) as is_known:  # a lease kept for nobody would never end
            return [self._prepare_load(client, item, may_keep=is_known) for item in items]

    def _prepare_load(self, client: str, item: LoadItem, *, may_keep: bool) -> PlannedLoad:
        plan = self._service.prepare_load(
            unpack_keys(item.keys), client=client, start=item.start, lease_ids=item.lease_ids
        )
        asked = item.keep and may_keep and bool(plan.refs)
        is_kept = asked and self._service.keep(plan.lease_id, max_slots=self._world.max_viewed_slots)
        return _packed_load(plan, is_kept=is_kept)

    def prepare_stores(self, client: str, items: Sequence[StoreItem], direct: bool = False) -> list[PlannedStore]:
        """Reserve slots for what each prompt has that nobody has yet.

        `direct`: the client process may write slots itself, so only its own word or its end settles them.
        """
        if not self._membership.can_serve():
            return [_NO_STORE] * len(items)
        if not direct:
            return self._plan_stores(client, items, None)
        with self._clients.while_known(client) as is_known:  # a writer that nobody knows could never be proven dead
            return self._plan_stores(client, items, client) if is_known else [_NO_STORE] * len(items)

    def _plan_stores(self, client: str, items: Sequence[StoreItem], writer: str | None) -> list[PlannedStore]:
        prompts = [unpack_keys(item.keys) for item in items]
        plans = [
            self._service.prepare_store(keys, client=client, start=item.start, rank=item.rank)
            for keys, item in zip(prompts, items, strict=True)
        ]
        if any(plan.refs for plan in plans):  # else there is nothing to report
            for keys, plan in zip(prompts, plans, strict=True):
                if plan.num_ready < len(keys):
                    self._plans.open(plan, keys, writer)
        return [_packed_store(plan) for plan in plans]

    def prepare_window(
        self, client: str, prompts: Sequence[bytes], lease_ids: Sequence[str]
    ) -> list[tuple[PlannedLoad, PlannedStore]]:
        """Plan load 1, store 1, load 2, store 2, ... of packed prompts as if each had ended before the next began.

        Answers fewer than asked when a prompt's plan depends on one before it: ask for it again after completion.
        """
        keys = [unpack_keys(prompt) for prompt in prompts]
        if not self._membership.can_serve():
            return [(PlannedLoad(0, _NO_REFS), _NO_STORE)] * len(prompts)
        with self._service.at_now() as (index, now):
            plans = plan_window(index, keys, client=client, now=now, lease_ids=lease_ids)
        for (_, store), prompt_keys in zip(plans, keys, strict=False):
            if store.refs:
                self._plans.open(store, prompt_keys, None)
        return [(_packed_load(load), _packed_store(store)) for load, store in plans]

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

    @ray.method(concurrency_group="clear")
    def clear(self, keys: bytes | None) -> ClearCounts:
        """Forget chunks (None: all) and free their slots on every holder."""
        return self._service.clear(None if keys is None else unpack_keys(keys))

    # -- broadcast ----------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="broadcast")
    def publish(self, rank: int, name: str | None, parcel: object) -> None:
        """A source's object; never waits for receivers."""
        self._exchange.publish(parcel, rank, name)

    @ray.method(concurrency_group="broadcast")
    def fail_broadcast(self, rank: int, name: str | None, reason: str) -> None:
        """A source's failure, for its receivers."""
        self._exchange.fail(reason, rank, name)

    @ray.method(concurrency_group="broadcast")
    def take(self, rank: int, src: int, name: str | None, tag: Tag | None, wait_s: float) -> tuple[Tag, TakeResult]:
        """Wait at most `wait_s` for a source's object; `tag` is the first answer's, when asking again."""
        tag = self._exchange.begin(rank, src, name) if tag is None else tag
        return tag, self._exchange.poll(tag, rank, wait_s)

    @ray.method(concurrency_group="broadcast")
    def give_up_broadcast(self, rank: int, tag: Tag) -> DeadlineError:
        """A receiver's deadline has passed; the error it raises."""
        return self._exchange.give_up(tag, rank)

    @ray.method(concurrency_group="broadcast")
    def break_broadcasts(self, reason: str) -> None:
        """A rank's untagged calls are out of step with the others'."""
        self._exchange.break_session(reason)

    def _forget_client(self, client_id: str) -> None:
        self._service.drop_client(client_id)
        self._plans.forget_writer(client_id)


def _packed_load(plan: LoadPlan, *, is_kept: bool = False) -> PlannedLoad:
    return PlannedLoad(plan.start, PackedRefs.pack(plan.refs), is_kept)


def _packed_store(plan: StorePlan) -> PlannedStore:
    return PlannedStore(plan.plan_id, PackedRefs.pack(plan.refs), pack_numbers(plan.positions), plan.num_ready)
