"""A coordinator without Ray and without threads of its own: the world's index, its members, and what it does for both.

The actor (`coordinator.py`) gives it threads and a port to the ranks; the simulation drives it step by step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.slot_table import COUNTER_BITS, SlotState, SlotTable
from lmcache_ray.index_service import IndexService
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.recovery import not_on_disk, send_down
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tier_service import TierService

from .clients import Clients
from .health import ClusterHealth, HealthProblem
from .index_calls import IndexCalls
from .membership import Membership
from .messages import RankHello
from .open_plans import OpenPlans
from .rank_port import Enlisted, RankPort
from .record import MissedClear, RecordKeeper
from .recovery import Recovery
from .world import WorldSpec

_DRAIN_POLL_S: Final = 0.1


class CoordinatorCore:
    """Thread-safe. `clock` is monotonic and `wall` the time of day, both in seconds.

    With `has_returned` it follows a coordinator that has died, and asks the ranks what there is; else it is the
    cluster's first, whose ranks start empty. Its epoch is the record's.
    """

    def __init__(
        self,
        world: WorldSpec,
        *,
        has_returned: bool,
        service: IndexService,
        tiers: TierService,
        exchange: Exchange,
        ranks: RankPort,
        keeper: RecordKeeper,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.world: Final = world
        self._began = wall()
        self.service: Final = service
        self.tiers: Final = tiers
        self.exchange: Final = exchange
        self.membership: Final = Membership(world.layout.world_size, world.layout.holders, self._began)
        self.plans: Final = OpenPlans(clock=clock, keep_s=10 * world.call_timeout_s)
        self.clients: Final = Clients(self._forget_client)
        self.calls: Final = IndexCalls(
            world,
            service=service,
            tiers=tiers,
            can_serve=self.can_serve,
            may_store=lambda: not self._is_draining,
            plans=self.plans,
            clients=self.clients,
            clear=self.clear,
        )
        self._ranks = ranks
        self._clock = clock
        self._wall = wall
        self._recovery = Recovery(
            world,
            has_returned=has_returned,
            membership=self.membership,
            service=service,
            tiers=tiers,
            exchange=exchange,
            ranks=ranks,
            keeper=keeper,
            wall=wall,
        )
        self._is_draining = False

    @property
    def epoch(self) -> int:
        """Of this life of the coordinator."""
        return self._recovery.record.epoch

    def health(self, faults: Sequence[str]) -> ClusterHealth:
        """What is wrong, if anything is; `faults` are those of the threads around this."""
        records = self.membership.records()
        problems = [
            HealthProblem(what, rank, None if self.membership.is_alive(rank) else records[rank].since)
            for rank, what in self.membership.problems().items()
        ]
        if not self._recovery.is_rebuilt:
            what = "the coordinator was restarted: until every rank has told what it holds, nothing is a hit"
            problems.append(HealthProblem(what, since=self._began))
        if self._is_draining:
            problems.append(HealthProblem("the cluster is being drained: it takes no stores any more"))
        problems += [HealthProblem(what) for what in (*faults, *self.tiers.problems())]
        return ClusterHealth(self.can_serve(), tuple(problems))

    def can_serve(self) -> bool:
        """Whether chunks can be planned, read and written: every holder is there, and the index is what they hold."""
        return self._recovery.is_rebuilt and self.membership.can_serve()

    def hellos(self) -> list[RankHello] | None:
        """What each rank said last; None while some rank has not been there yet, or nothing is rebuilt."""
        hellos = [record.hello for record in self.membership.records()]
        known = [hello for hello in hellos if hello is not None]
        return known if len(known) == len(hellos) and self._recovery.is_rebuilt else None

    # -- ranks come and go: see `Recovery` ----------------------------------------------------------------------------

    def adopt(self, enlisted: Sequence[Enlisted], timeout_s: float) -> None:
        """See `Recovery.adopt`."""
        self._recovery.adopt(enlisted, timeout_s)

    def enlist(self, rank: int, *, timeout_s: float) -> Enlisted:
        """See `Recovery.enlist`."""
        return self._recovery.enlist(rank, timeout_s=timeout_s)

    def lost(self, rank: int, reason: str) -> None:
        """See `Recovery.lost`."""
        self._recovery.lost(rank, reason)

    # -- clearing -----------------------------------------------------------------------------------------------------

    def clear(self, keys: Sequence[bytes] | None, tiers: Sequence[Tier]) -> TierClearCounts:
        """Forget chunks (None: all) in `tiers`, and have every holder drop them.

        What a holder that is away still has is dropped as it returns, whoever is the coordinator then.
        """
        with self.service.at_now() as (index, _):
            before = index.memory.table.next_generation
        named = None if keys is None else frozenset(keys)
        if not self._recovery.is_rebuilt:  # the index that is to come leaves it out
            self._recovery.remember(MissedClear(before, named, tiers=tuple(tiers)))
        counts = self.tiers.clear(keys, tiers)
        holders = self.world.layout.holders
        silent = set(counts.pending_ranks) if self.can_serve() else set(holders)
        with self.service.at_now() as (index, _):
            kept = _still_cached(index.memory.table, keys, before)
        cleared = MissedClear(before, named, kept, tuple(tiers))
        if Tier.CPU in tiers:
            present = [rank for rank in holders if rank not in silent]
            silent.update(set(present).difference(self._ranks.forget(present, cleared)))
        if silent:
            self._recovery.remember(cleared)
        return replace(counts, pending_ranks=tuple(sorted(silent)))

    def drain(self, timeout_s: float) -> tuple[int, int]:
        """Plan no more stores, wait for those that are planned, and copy to the disk what is not there.

        The stores that are still open after `timeout_s`, and the chunks that are in memory alone although there is a
        disk.
        """
        self._is_draining = True
        deadline = self._clock() + timeout_s
        while True:
            with self.service.at_now() as (index, _):
                num_open = len(index.memory.ledger.stores)
                if not num_open:
                    send_down(index)
                num_unflushed = 0 if self.tiers.disk is None else len(not_on_disk(index))
            if not num_open + num_unflushed or self._clock() >= deadline:
                return num_open, num_unflushed
            self.service.tell_moved()
            self.service.wait_until(lambda index: False, _DRAIN_POLL_S)

    # -- what is done without being asked -----------------------------------------------------------------------------

    def drop_dead_clients(self) -> None:
        """Clients on the nodes of ranks are asked about; of others nobody can tell, and their leases end by time.

        One whose node has lost all ranks maps no arena of this world any more. If it lives it registers again.
        """
        hellos = [record.hello for record in self.membership.records() if record.hello is not None]
        for client in self.clients.all():
            if client.liveness_path is None:
                continue
            neighbours = [hello.worker_id for hello in hellos if hello.node_id == client.node_id]
            witness = next((rank for rank in neighbours if self.membership.is_alive(rank)), None)
            if witness is not None:
                is_dead = self._ranks.is_client_dead(witness, client.liveness_path)
            else:  # once there were ranks on its node: they left it for good if they are elsewhere now
                is_dead = not neighbours and not self.membership.absent()
            if is_dead:
                self.clients.leave(client.client_id)

    def ping_ranks(self) -> None:
        """A rank that is stopped, or stuck, lives as far as Ray can tell.

        One whose process died as it was being enlisted may have been watched by nobody: another answers for it then.
        """
        alive = [rank for rank in range(self.membership.world_size) if self.membership.is_alive(rank)]
        answering = self._ranks.ping(alive)
        for rank in alive:
            self.membership.pinged(rank, answered=rank in answering)
            hello = self.membership.records()[rank].hello
            if hello is not None and answering.get(rank, hello.pid) != hello.pid:
                self.lost(rank, f"process {hello.pid} has ended, and {answering[rank]} is in its place")

    def follow_views(self) -> None:
        """See `Recovery.follow_views`."""
        self._recovery.follow_views()

    def finish_clears(self) -> None:
        """See `Recovery.finish_clears`."""
        self._recovery.finish_clears()

    def settle(self) -> None:
        """Free quarantined slots that nobody can be writing any more; what an absent rank owes, it owes on return."""
        unsettled = {
            rank: refs
            for rank in self.membership.holders
            if self.membership.is_alive(rank) and (refs := self._unsettled(rank))
        }
        if not unsettled or not self._recovery.is_rebuilt:
            return
        for rank, refs in self._ranks.settle(unsettled).items():
            with self.service.at_now() as (index, _):
                index.memory.settle(rank, refs)

    def _unsettled(self, rank: int) -> list[ChunkRef]:
        """What the rank still owes an answer for, but for slots that a living client may be writing itself."""
        with self.service.at_now() as (index, _):
            return [ref for ref in index.memory.unsettled(rank) if self.plans.writer_of(ref.generation) is None]

    def _forget_client(self, client_id: str) -> None:
        self.service.drop_client(client_id)
        self.plans.forget_writer(client_id)


def _still_cached(table: SlotTable, keys: Sequence[bytes] | None, before: int) -> frozenset[tuple[int, int]]:
    """(slot, generation) of what a clear has left, since it was leased."""
    slots = table.slots_in(SlotState.READY) if keys is None else table.ready_among(keys)
    return frozenset((slot, table.generation_of[slot]) for slot in slots if table.generation_of[slot] < before)


def first_generation(epoch: int) -> int:
    """No generation of an epoch is below this."""
    return epoch << COUNTER_BITS
