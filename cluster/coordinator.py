"""The coordinator actor: the world's one index, its membership, and the meeting point of broadcasts.

It decides and remembers; it moves no KV bytes and loads no torch. It runs on many threads, because one blocked call
must not stop the others; the state behind them is locked in `CoordinatorCore` and its parts. Callers carry its plans to
the ranks themselves and report back in one batched `complete`.

Ray starts it again when it dies. It then takes the next epoch, finds the ranks by their names, and rebuilds what it
knew from what they hold; drivers' and ranks' handles of it go on.
"""

import os
import time
import uuid
from collections.abc import Sequence

import ray

from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.broadcast.tags import Call, Tag, TakeResult
from lmcache_ray.errors import ClusterError, DeadlineError, LMCacheRayError
from lmcache_ray.index_service import IndexService
from lmcache_ray.tiers.assembly import index_maker, open_remote, tier_service, tiered_index

from .core import CoordinatorCore
from .health import ClusterHealth
from .housekeeping import Housekeeping
from .introduction import Introduction
from .messages import ClientHello
from .packed_calls import run_call
from .rank_calls import RankCalls
from .rank_port import Enlisted
from .ray_calls import Actor
from .ray_record import RayRecord
from .tier_ranks import ActorTierRanks
from .tier_status import tier_statuses
from .world import ClusterStatus, WorldSpec, rank_name, rank_status


def concurrency_groups(world_size: int) -> dict[str, int]:
    """Threads for each kind of call, so that one kind never waits for another.

    Calls of `tiers` wait for ranks; in `broadcast` every rank may be waiting, and every one of them publishing.
    """
    return {"control": 4, "index": 8, "tiers": 16, "broadcast": 2 * world_size + 2}


class Coordinator:
    """One per cache cluster. The epoch of the cluster's record is part of every generation it issues."""

    def __init__(self, world: WorldSpec) -> None:
        context = ray.get_runtime_context()
        has_returned = context.was_current_actor_reconstructed
        keeper = RayRecord(world.namespace, world.name)
        record = keeper.load().next_life() if has_returned else keeper.load().next_start()
        keeper.save(record)
        self._world = world
        self._calls = RankCalls(
            epoch=record.epoch, myself=context.current_actor, clear_timeout_s=world.call_timeout_s / 2
        )
        self._refusal: LMCacheRayError | None = None
        try:
            self._core = _core(world, record.epoch, self._calls, keeper, has_returned=has_returned)
        except LMCacheRayError as error:  # of an actor whose constructor raises Ray tells no more than that it died
            self._refusal = error
            return
        self._house = Housekeeping(self._core, self._calls)
        if has_returned:
            self._calls.give([_rank_actor(world, rank) for rank in range(world.layout.world_size)])
            self._house.start()

    # -- control: membership and status -----------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        """The epoch, as a sign of life. Raises what kept the coordinator from being put together."""
        if self._refusal is not None:
            raise self._refusal
        return self._core.epoch

    @ray.method(concurrency_group="control")
    def adopt(self, enlisted: Sequence[Enlisted], workers: Sequence[Actor], timeout_s: float) -> None:
        """Take the started ranks in, look at what their disks hold, and watch them from now on.

        Raises `DirectoryTakenError` if a disk directory belongs to another living cluster.
        """
        if self._calls.workers:
            raise ClusterError("the coordinator died while the cluster was being started")
        self._calls.give(workers)
        self._core.adopt(enlisted, timeout_s)
        for one in enlisted:
            self._calls.watch(one.hello)
        self._house.start()

    @ray.method(concurrency_group="control")
    def introduce(self) -> Introduction | None:
        """The world and who serves it, as it is now; None until all have been there."""
        hellos = self._core.hellos()
        return None if hellos is None else Introduction(self._world, self._calls.workers, tuple(hellos))

    @ray.method(concurrency_group="control")
    def status(self) -> ClusterStatus:
        """All that is known of the world now."""
        core = self._core
        with core.service.at_now() as (index, _):
            counts = index.memory.counts()
            view_leases, viewed_slots = index.memory.kept()
            tiers = tier_statuses(self._world, index, core.tiers)
        used = counts.capacity - counts.free
        return ClusterStatus(
            name=self._world.name,
            namespace=self._world.namespace,
            epoch=core.epoch,
            coordinator_pid=os.getpid(),
            tiers=tiers,
            leases=counts.leases,
            view_leases=view_leases,
            viewed_slots=viewed_slots,
            clients=len(core.clients),
            can_serve=core.can_serve(),
            problems=tuple(problem.what for problem in self._health().problems),
            ranks=tuple(
                rank_status(rank, record, used if rank in self._world.layout.holders else 0)
                for rank, record in enumerate(core.membership.records())
            ),
        )

    @ray.method(concurrency_group="control")
    def health(self) -> ClusterHealth:
        """Whether the world is whole, and what is wrong since when if not."""
        return self._health()

    def _health(self) -> ClusterHealth:
        return self._core.health([*self._house.faults.values()])

    @ray.method(concurrency_group="control")
    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the index contradicts itself."""
        with self._core.service.at_now() as (index, _):
            index.check_integrity()

    @ray.method(concurrency_group="control")
    def register_client(self, hello: ClientHello) -> None:
        """A process begins to use the cluster."""
        self._core.clients.enter(hello)

    @ray.method(concurrency_group="control")
    def unregister_client(self, client_id: str) -> None:
        """It has ended: its leases end too."""
        self._core.clients.leave(client_id)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """End the threads of this process; the actor is killed next."""
        self._house.stop()

    # -- index and tiers: see `IndexCalls` ---------------------------------------------------------------------------

    @ray.method(concurrency_group="index")
    def decide(self, call: bytes) -> bytes:
        """One of the calls that are answered at once, packed (see `packed_calls.py`)."""
        return run_call(self._core.calls.prompt, call)

    @ray.method(concurrency_group="tiers")
    def decide_patiently(self, call: bytes) -> bytes:
        """One of the calls that may have to wait, for as long as it says itself."""
        return run_call(self._core.calls.patient, call)

    @ray.method(concurrency_group="tiers")
    def drain(self, timeout_s: float) -> tuple[int, int]:
        """See `CoordinatorCore.drain`."""
        return self._core.drain(timeout_s)

    @ray.method(concurrency_group="control")
    def close_tiers(self, flush_s: float) -> None:
        """Copy down what waits, for `flush_s` at most, and end the tiers below memory. The ranks must still live."""
        self._core.tiers.close(flush_s=flush_s)

    # -- broadcast ----------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="broadcast")
    def publish(self, rank: int, name: str | None, parcel: object, call: Call | None) -> None:
        """A source's object; never waits for receivers."""
        self._core.exchange.publish(parcel, rank, name, call=call)

    @ray.method(concurrency_group="broadcast")
    def fail_broadcast(self, rank: int, name: str | None, reason: str, call: Call | None) -> None:
        """A source's failure, for its receivers."""
        self._core.exchange.fail(reason, rank, name, call=call)

    @ray.method(concurrency_group="broadcast")
    def take(
        self, rank: int, src: int, name: str | None, tag: Tag | None, wait_s: float, call: Call | None
    ) -> tuple[Tag, TakeResult]:
        """Wait at most `wait_s` for a source's object; `tag` is the first answer's, when asking again."""
        tag = self._core.exchange.begin(rank, src, name, call=call) if tag is None else tag
        return tag, self._core.exchange.poll(tag, rank, wait_s)

    @ray.method(concurrency_group="broadcast")
    def give_up_broadcast(self, rank: int, tag: Tag) -> DeadlineError:
        """A receiver's deadline has passed; the error it raises."""
        return self._core.exchange.give_up(tag, rank)

    @ray.method(concurrency_group="broadcast")
    def break_broadcasts(self, reason: str) -> None:
        """A rank's untagged calls are out of step with the others'."""
        self._core.exchange.break_session(reason)


def _core(
    world: WorldSpec, epoch: int, calls: RankCalls, keeper: RayRecord, *, has_returned: bool
) -> CoordinatorCore:
    make_index = index_maker(
        world.layout.holders,
        world.cache_policy,
        call_timeout_s=world.call_timeout_s,
        lease_timeout_s=world.lease_timeout_s,
    )
    index = tiered_index(world.tiers, lambda below: make_index(world.num_slots, epoch, below))
    service = IndexService(index, clock=time.monotonic, free_slots=calls.free_slots)
    return CoordinatorCore(
        world,
        has_returned=has_returned,
        service=service,
        tiers=tier_service(
            world.tiers,
            service,
            ActorTierRanks(calls, world.layout.holders),
            world.layout,
            make_index=make_index,
            remote=open_remote(world.tiers.remote, world.layout, scope=world.hasher().scope(), origin=world.life),
            call_timeout_s=world.call_timeout_s,
        ),
        exchange=Exchange(f"{epoch}-{uuid.uuid4().hex}", world.layout.world_size, world.call_timeout_s),
        ranks=calls,
        keeper=keeper,
        clock=time.monotonic,
        wall=time.time,
    )


def _rank_actor(world: WorldSpec, rank: int) -> Actor:
    actor: Actor = ray.get_actor(rank_name(world.name, rank), namespace=world.namespace)
    return actor
