"""A coordinator without Ray and without threads of its own: the world's index, its members, and how both recover.

The actor (`coordinator.py`) gives it threads and a port to the ranks; the simulation drives it step by step. What ends
a rank, or the coordinator before this one, is told from outside; what follows is decided here:

- `lost`: misses from now on, receivers of its broadcasts are told, its leases and plans end;
- `enlist`: the rank, or its next process, serves again. While the index lives it is compared with the rank's arena;
  after a restart of the coordinator it is rebuilt as soon as every holder has told what it has (`index/recovery.py`).

Until then nothing is planned, and nothing freed.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.errors import LMCacheRayError, RankUnavailableError
from lmcache_ray.index.arena_report import ArenaReport
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.recovery import rebuild, restore, settle_returned
from lmcache_ray.index.slot_table import COUNTER_BITS
from lmcache_ray.index_service import IndexService
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.recovery import rejoin_memory, send_down
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tier_service import TierService

from .clients import Clients
from .health import ClusterHealth, HealthProblem
from .index_calls import IndexCalls
from .membership import Membership
from .messages import RankHello
from .open_plans import OpenPlans
from .rank_port import Enlisted, Enlistment, RankPort
from .record import ClusterRecord, MissedClear, RecordKeeper
from .topology import RankPlace, place_again
from .world import WorldSpec

_DRAIN_POLL_S: Final = 0.1
_RETURNED: Final = "the coordinator was restarted"


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
        self._keeper = keeper
        self._clock = clock
        self._wall = wall
        self._record = keeper.load()
        self._has_returned = has_returned
        self._is_rebuilt = not has_returned
        self._is_draining = False
        self._recovering = threading.RLock()  # one rank comes or goes at a time; guards what follows and the record
        self._reports: dict[int, ArenaReport] = {}
        if has_returned:
            exchange.break_session(_RETURNED)
            for rank in range(world.layout.world_size):
                self.membership.kept_away(rank, _RETURNED)

    @property
    def epoch(self) -> int:
        """Of this life of the coordinator."""
        return self._record.epoch

    def health(self, faults: Sequence[str]) -> ClusterHealth:
        """What is wrong, if anything is; `faults` are those of the threads around this."""
        records = self.membership.records()
        problems = [
            HealthProblem(what, rank, None if self.membership.is_alive(rank) else records[rank].since)
            for rank, what in self.membership.problems().items()
        ]
        if not self._is_rebuilt:
            what = "the coordinator was restarted: until every rank has told what it holds, nothing is a hit"
            problems.append(HealthProblem(what, since=self._began))
        if self._is_draining:
            problems.append(HealthProblem("the cluster is being drained: it takes no stores any more"))
        problems += [HealthProblem(what) for what in (*faults, *self.tiers.problems())]
        return ClusterHealth(self.can_serve(), tuple(problems))

    def can_serve(self) -> bool:
        """Whether chunks can be planned, read and written: every holder is there, and the index is what they hold."""
        return self._is_rebuilt and self.membership.can_serve()

    def hellos(self) -> list[RankHello] | None:
        """What each rank said last; None while some rank has not been there yet, or nothing is rebuilt."""
        hellos = [record.hello for record in self.membership.records()]
        known = [hello for hello in hellos if hello is not None]
        return known if len(known) == len(hellos) and self._is_rebuilt else None

    # -- ranks come and go --------------------------------------------------------------------------------------------

    def adopt(self, enlisted: Sequence[Enlisted], timeout_s: float) -> None:
        """Take in the ranks of a cluster that starts. Raises `DirectoryTakenError`; see `TierService.open`."""
        with self._recovering:
            for one in enlisted:
                self._note_present(one)
            self.tiers.open(timeout_s)

    def enlist(self, rank: int, *, timeout_s: float) -> Enlisted:
        """Bring a rank that is not there (back) into the world.

        Raises what kept it from it; then it is still absent, and `Membership` knows why.
        """
        try:
            node_id = self._ranks.node_of(rank, timeout_s=timeout_s)
            place = self._place_of(rank, node_id)
            enlisted = self._ranks.enlist(rank, self._enlistment(place), timeout_s=timeout_s)
            with self._recovering:
                self._take_in(rank, enlisted, timeout_s)
        except LMCacheRayError as error:
            self.membership.kept_away(rank, str(error))
            raise
        return enlisted

    def lost(self, rank: int, reason: str) -> None:
        """A rank's process has ended."""
        with self._recovering:
            self._reports.pop(rank, None)
            if self.membership.lost(rank, reason, self._wall()):
                self.exchange.rank_lost(rank)
                self.service.rank_lost(rank)

    def _place_of(self, rank: int, node_id: str) -> RankPlace:
        with self._recovering:
            place = self._record.places.get(rank)
            if place is not None and place.node_id == node_id:
                return place
            return place_again(rank, node_id, self._record.places)

    def _enlistment(self, place: RankPlace) -> Enlistment:
        """Nothing is planned while a holder is absent, so what is issued next is after whatever its process heard."""
        with self.service.at_now() as (index, _):
            floor = index.memory.table.next_generation
        return Enlistment(place, self.epoch, floor, may_attach=True)

    def _take_in(self, rank: int, enlisted: Enlisted, timeout_s: float) -> None:
        if rank not in self.world.layout.holders:
            self._note_present(enlisted)
        elif self._is_rebuilt:
            self._rejoin(rank, enlisted, timeout_s)
        else:
            self._reports[rank] = enlisted.report
            self._note_present(enlisted)
            if self._reports.keys() >= set(self.world.layout.holders):
                self._rebuild(timeout_s)

    def _note_present(self, enlisted: Enlisted) -> None:
        hello = enlisted.hello
        self._keep(self._record.with_start(hello.worker_id, hello.place, hello.pid))
        self.exchange.rank_back(hello.worker_id)
        self.service.rank_back(hello.worker_id)
        self.membership.joined(hello, self._wall(), start=self._record.starts[hello.worker_id].number)

    def _rejoin(self, rank: int, enlisted: Enlisted, timeout_s: float) -> None:
        with self.service.at_now() as (index, _):
            rejoined = rejoin_memory(index, rank, enlisted.report)
        self._free({rank: rejoined.useless})
        with self.service.at_now() as (index, _):
            settle_returned(index.memory, rank, enlisted.report.unfinished)
        if self.tiers.disk is not None:
            self.tiers.disk.take_back(rank, timeout_s)
        self._note_present(enlisted)

    def _rebuild(self, timeout_s: float) -> None:
        """Every holder has told what it has. If one dies meanwhile it is asked again, and all begins anew."""
        rebuilt = rebuild(self._reports, is_cleared=self._record.is_cleared)
        self._free(rebuilt.useless)
        with self.service.at_now() as (index, now):
            restore(index.memory, rebuilt, now=now)
        self._is_rebuilt = True
        self._reports.clear()
        self.tiers.open(timeout_s, may_be_taken=True)
        with self.service.at_now() as (index, _):
            send_down(index)
        self.service.tell_moved()

    def _free(self, useless: Mapping[int, Sequence[ChunkRef]]) -> None:
        for rank, refs in useless.items():
            if refs and rank not in self._ranks.free_slots([rank], refs):
                raise RankUnavailableError(f"rank {rank} did not free what its arena holds in vain")

    # -- clearing -----------------------------------------------------------------------------------------------------

    def clear(self, keys: Sequence[bytes] | None, tiers: Sequence[Tier]) -> TierClearCounts:
        """Forget chunks (None: all) in `tiers`, and have every holder drop them.

        What a holder that is away still has is dropped as it returns, whoever is the coordinator then.
        """
        with self.service.at_now() as (index, _):
            before = index.memory.table.next_generation
        counts = self.tiers.clear(keys, tiers)
        is_pending = bool(counts.pending_ranks) or not self.can_serve()
        if Tier.CPU in tiers and (is_pending or keys is None):
            with self.service.at_now() as (index, _):
                table, leased = index.memory.table, index.memory.leases.pinned
                kept = frozenset((slot, table.generation_of[slot]) for slot in leased)
            with self._recovering:
                missed = MissedClear(before, None if keys is None else frozenset(keys), kept)
                self._keep(self._record.with_clear(missed))
        return counts

    def _keep(self, record: ClusterRecord) -> None:
        if record != self._record:
            self._keeper.save(record)
            self._record = record

    def drain(self, timeout_s: float) -> int:
        """Plan no more stores, and wait for those that are planned; how many are still open after `timeout_s`."""
        self._is_draining = True
        deadline = self._clock() + timeout_s
        while (num_open := self._num_open_stores()) and self._clock() < deadline:
            self.service.wait_until(lambda index: not index.memory.ledger.stores, _DRAIN_POLL_S)
        return num_open

    def _num_open_stores(self) -> int:
        with self.service.at_now() as (index, _):
            return len(index.memory.ledger.stores)

    # -- what is done without being asked -----------------------------------------------------------------------------

    def drop_dead_clients(self) -> None:
        """Clients on the nodes of ranks are asked about; of others nobody can tell, and their leases end by time."""
        hellos = [record.hello for record in self.membership.records() if record.hello is not None]
        for client in self.clients.all():
            neighbours = [hello.worker_id for hello in hellos if hello.node_id == client.node_id]
            witness = next((rank for rank in neighbours if self.membership.is_alive(rank)), None)
            if client.liveness_path is None or witness is None:
                continue  # of views alone there are none then: they are of ranks on the client's node
            if self._ranks.is_client_dead(witness, client.liveness_path):
                self.clients.leave(client.client_id)

    def ping_ranks(self) -> None:
        """A rank that is stopped, or stuck, lives as far as Ray can tell."""
        alive = [rank for rank in range(self.membership.world_size) if self.membership.is_alive(rank)]
        answering = self._ranks.ping(alive)
        for rank in alive:
            self.membership.pinged(rank, answered=rank in answering)

    def settle(self) -> None:
        """Free quarantined slots that nobody can be writing any more; what an absent rank owes, it owes on return."""
        unsettled = {
            rank: refs
            for rank in self.membership.holders
            if self.membership.is_alive(rank) and (refs := self._unsettled(rank))
        }
        if not unsettled or not self._is_rebuilt:
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


def first_generation(epoch: int) -> int:
    """No generation of an epoch is below this."""
    return epoch << COUNTER_BITS
