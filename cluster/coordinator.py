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
from lmcache_ray.index_service import IndexService
from lmcache_ray.tiers.assembly import index_maker, open_remote, tier_service, tiered_index

from .clients import Clients
from .housekeeping import Housekeeping
from .index_calls import IndexCalls
from .introduction import Introduction
from .membership import Membership
from .messages import ClientHello, RankHello
from .open_plans import OpenPlans
from .packed_calls import run_call
from .rank_calls import RankCalls
from .ray_calls import Actor
from .tier_ranks import ActorTierRanks
from .tier_status import tier_statuses
from .world import ClusterStatus, WorldSpec, rank_status


def concurrency_groups(world_size: int) -> dict[str, int]:
    """Threads for each kind of call, so that one kind never waits for another.

    Calls of `tiers` wait for ranks; in `broadcast` every rank may be waiting, and every one of them publishing.
    """
    return {"control": 4, "index": 8, "tiers": 16, "broadcast": 2 * world_size + 2}


class Coordinator:
    """One per cache cluster. `epoch` is part of every generation it issues."""

    def __init__(self, world: WorldSpec, epoch: int) -> None:
        self._world = world
        self._epoch = epoch
        self._membership = Membership(world.layout.world_size, world.layout.holders)
        self._calls = RankCalls(clear_timeout_s=world.call_timeout_s / 2)
        make_index = index_maker(
            world.layout.holders,
            world.cache_policy,
            call_timeout_s=world.call_timeout_s,
            lease_timeout_s=world.lease_timeout_s,
        )
        index = tiered_index(world.tiers, lambda below: make_index(world.num_slots, epoch, below))
        self._service = IndexService(index, clock=time.monotonic, free_slots=self._calls.free_slots)
        self._plans = OpenPlans(clock=time.monotonic, keep_s=10 * world.call_timeout_s)
        self._exchange = Exchange(f"{epoch}-{uuid.uuid4().hex}", world.layout.world_size, world.call_timeout_s)
        self._clients = Clients(self._forget_client)
        self._adopted: Introduction | None = None
        self._tiers = tier_service(
            world.tiers,
            self._service,
            ActorTierRanks(self._calls, world.layout.holders),
            world.layout,
            make_index=make_index,
            remote=open_remote(
                world.tiers.remote, world.layout, scope=world.hasher().scope(), origin=world.life
            ),
            call_timeout_s=world.call_timeout_s,
        )
        self._index_calls = IndexCalls(
            world,
            service=self._service,
            tiers=self._tiers,
            membership=self._membership,
            plans=self._plans,
            clients=self._clients,
        )
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
    def adopt(self, hellos: Sequence[RankHello], workers: Sequence[Actor], timeout_s: float) -> None:
        """Take the started ranks in, look at what their disks hold, and watch them from now on.

        Raises `DirectoryTakenError` if a disk directory belongs to another living cluster.
        """
        for hello in hellos:
            self._membership.joined(hello)
        self._calls.adopt(workers)
        self._tiers.open(timeout_s)
        self._adopted = Introduction(self._world, tuple(workers), tuple(hellos))

    @ray.method(concurrency_group="control")
    def introduce(self) -> Introduction | None:
        """The world and who serves it; None until they have been adopted. It never changes then."""
        return self._adopted

    @ray.method(concurrency_group="control")
    def status(self) -> ClusterStatus:
        """All that is known of the world now."""
        with self._service.at_now() as (index, _):
            counts = index.memory.counts()
            view_leases, viewed_slots = index.memory.kept()
            tiers = tier_statuses(self._world, index, self._tiers)
        used = counts.capacity - counts.free
        return ClusterStatus(
            name=self._world.name,
            namespace=self._world.namespace,
            epoch=self._epoch,
            coordinator_pid=os.getpid(),
            tiers=tiers,
            leases=counts.leases,
            view_leases=view_leases,
            viewed_slots=viewed_slots,
            clients=len(self._clients),
            problems=(*self._membership.problems(), *self._house.faults.values(), *self._tiers.problems()),
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

    # -- index and tiers: see `IndexCalls` ---------------------------------------------------------------------------

    @ray.method(concurrency_group="index")
    def decide(self, call: bytes) -> bytes:
        """One of the calls that are answered at once, packed (see `packed_calls.py`)."""
        return run_call(self._index_calls.prompt, call)

    @ray.method(concurrency_group="tiers")
    def decide_patiently(self, call: bytes) -> bytes:
        """One of the calls that may have to wait, for as long as it says itself."""
        return run_call(self._index_calls.patient, call)

    @ray.method(concurrency_group="control")
    def close_tiers(self, flush_s: float) -> None:
        """Copy down what waits, for `flush_s` at most, and end the tiers below memory. The ranks must still live."""
        self._tiers.close(flush_s=flush_s)

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
