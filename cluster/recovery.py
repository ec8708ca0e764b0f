"""How a world comes back: ranks that return to an index that lives, and an index that is rebuilt from its ranks.

What ends a rank, or the coordinator before this one, is told from outside (`lost`, `has_returned`). A rank's way back
is `enlist`: its process is asked to serve, answers what its arena holds, and frees what nobody wants, before it counts
as alive. While the index lives it is compared with the rank's arena. After a restart of the coordinator the index is
empty until every holder has answered; until then nothing is planned, and nothing but the useless freed.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.errors import LMCacheRayError, RankUnavailableError
from lmcache_ray.index.arena_report import ArenaReport, ViewedSlots
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.recovery import hold_views, leave_out, rebuild, restore, settle_returned
from lmcache_ray.index_service import IndexService
from lmcache_ray.tiers.recovery import miss_remote, rejoin_memory, send_down
from lmcache_ray.tiers.tier_service import TierService

from .membership import Membership
from .rank_port import Enlisted, Enlistment, RankPort
from .record import ClusterRecord, MissedClear, RecordKeeper
from .topology import RankPlace, place_again
from .world import WorldSpec

_RETURNED: Final = "the coordinator was restarted"


class Recovery:
    """Thread-safe. Changes `membership`, `exchange`, the index of `service` and `tiers` as ranks come and go.

    `wall` is the time of day, in seconds. `record` is what this and later coordinators of the cluster must not forget.
    """

    def __init__(
        self,
        world: WorldSpec,
        *,
        has_returned: bool,
        membership: Membership,
        service: IndexService,
        tiers: TierService,
        exchange: Exchange,
        ranks: RankPort,
        keeper: RecordKeeper,
        wall: Callable[[], float],
    ) -> None:
        self._world = world
        self._membership = membership
        self._service = service
        self._tiers = tiers
        self._exchange = exchange
        self._ranks = ranks
        self._keeper = keeper
        self._wall = wall
        self._recording = threading.Lock()  # guards `_record`
        self._record = keeper.load()
        self._changing = threading.RLock()  # one rank comes or goes at a time; guards what follows
        self._is_rebuilt = not has_returned
        self._are_tiers_open = False
        self._reports: dict[int, ArenaReport] = {}
        self._restored_views: dict[str, ViewedSlots] = {}
        if has_returned:
            exchange.break_session(_RETURNED)
            for rank in membership.absent():
                membership.kept_away(rank, _RETURNED)

    @property
    def record(self) -> ClusterRecord:
        """What is kept beyond this process."""
        return self._record

    @property
    def is_rebuilt(self) -> bool:
        """Whether the index is what the ranks hold."""
        return self._is_rebuilt

    def adopt(self, enlisted: Sequence[Enlisted], timeout_s: float) -> None:
        """Take in the ranks of a cluster that starts, all empty. Raises `DirectoryTakenError`; see `TierService`."""
        with self._changing:
            for one in enlisted:
                self._note_present(one)
        self._are_tiers_open = True
        self._tiers.open(timeout_s)

    def enlist(self, rank: int, *, timeout_s: float) -> Enlisted:
        """Bring a rank that is not there (back) into the world; each of its steps may take `timeout_s`.

        Raises what kept it from it; then it is still absent, or asked again, and `Membership` knows why.
        """
        try:
            node_id = self._ranks.node_of(rank, timeout_s=timeout_s)
            enlisted = self._ranks.enlist(rank, self._enlistment(rank, node_id), timeout_s=timeout_s)
            with self._changing:
                self._take_in(rank, enlisted)
            if self._is_rebuilt and rank in self._world.layout.holders:
                self._open_tiers(rank)
        except LMCacheRayError as error:
            self._membership.kept_away(rank, str(error))
            raise
        return enlisted

    def lost(self, rank: int, reason: str) -> None:
        """A rank's process has ended: misses from now on, and nothing is kept for it."""
        with self._changing:
            self._reports.pop(rank, None)
            if self._membership.lost(rank, reason, self._wall()):
                self._exchange.rank_lost(rank)
                self._service.rank_lost(rank)

    def remember(self, clear: MissedClear) -> None:
        """A clear that some holder, or some tier, has not carried out."""
        self._keep(lambda record: record.with_clear(clear))

    def finish_clears(self) -> None:
        """Have every holder carry out what some of them have missed, and remember it no more once all have.

        What is in the index all the same was leased, or shown by a view: it stays.
        """
        clears = self._record.clears
        if not clears or not self._is_rebuilt or not self._membership.can_serve() or self._tiers.problems():
            return
        holders = self._world.layout.holders
        with self._service.at_now() as (index, _):
            cached = index.memory.table.refs(list(index.memory.table.slot_of.values()))
        kept = {clear: frozenset((ref.slot, ref.generation) for ref in cached if clear.covers(ref)) for clear in clears}
        done = [
            clear
            for clear in clears
            if len(self._ranks.forget(holders, replace(clear, kept=clear.kept | kept[clear]))) == len(holders)
        ]
        self._keep(lambda record: record.without(done))

    def follow_views(self) -> None:
        """Leases of views that an earlier coordinator granted: let them hold what their clients still show.

        A client knows them by names that this coordinator has never heard, so it cannot release them one by one.
        """
        if not self._restored_views:
            return
        holders = [rank for rank in self._world.layout.holders if self._membership.is_alive(rank)]
        found = self._ranks.viewed(holders)
        if len(found) < len(self._world.layout.holders):
            return  # who does not answer may know of one
        now_shown = {view.lease_id: view for views in found.values() for view in views}
        current = [now_shown.get(lease_id, gone) for lease_id, gone in self._restored_views.items()]
        with self._service.at_now() as (index, now):
            hold_views(index.memory, current, now=now)
        self._restored_views = {view.lease_id: replace(view, slots=()) for view in current if view.slots}

    # -- parts --------------------------------------------------------------------------------------------------------

    def _enlistment(self, rank: int, node_id: str) -> Enlistment:
        """Nothing is planned while a holder is absent, so what is issued next is after whatever its process heard."""
        with self._service.at_now() as (index, _):
            floor = index.memory.table.next_generation
        return Enlistment(self._place_of(rank, node_id), self._record.epoch, floor, may_attach=True)

    def _place_of(self, rank: int, node_id: str) -> RankPlace:
        places = self._record.places
        place = places.get(rank)
        if place is not None and place.node_id == node_id:
            return place
        return place_again(rank, node_id, places)

    def _take_in(self, rank: int, enlisted: Enlisted) -> None:
        if rank not in self._world.layout.holders:
            self._note_present(enlisted)
        elif self._is_rebuilt:
            self._rejoin(rank, enlisted)
        else:
            self._reports[rank] = enlisted.report
            self._note_present(enlisted)
            if self._reports.keys() >= set(self._world.layout.holders):
                self._rebuild()

    def _note_present(self, enlisted: Enlisted) -> None:
        hello = enlisted.hello
        self._keep(lambda record: record.with_start(hello.worker_id, hello.place, hello.pid))
        self._exchange.rank_back(hello.worker_id, process=hello.pid)
        self._service.rank_back(hello.worker_id)
        self._membership.joined(hello, self._wall(), start=self._record.starts[hello.worker_id].number)

    def _rejoin(self, rank: int, enlisted: Enlisted) -> None:
        with self._service.at_now() as (index, _):
            rejoined = rejoin_memory(index, rank, enlisted.report)
        self._free({rank: rejoined.useless})
        with self._service.at_now() as (index, _):
            settle_returned(index.memory, rank, enlisted.report.unfinished)
        self._note_present(enlisted)

    def _rebuild(self) -> None:
        """Every holder has told what it has. One that dies, or does not free, is asked again, and this is done anew."""
        rebuilt = rebuild(self._reports, is_cleared=self._record.is_cleared)
        self._free(rebuilt.useless)
        self._restored_views = {view.lease_id: replace(view, slots=()) for view in rebuilt.viewed}
        with self._service.at_now() as (index, now):
            restore(index.memory, leave_out(rebuilt, self._record.is_cleared), now=now)  # a clear may just have come
            self._is_rebuilt = True
        self._reports.clear()

    def _free(self, useless: Mapping[int, Sequence[ChunkRef]]) -> None:
        for rank, refs in useless.items():
            if refs and rank not in self._ranks.free_slots([rank], refs):
                raise RankUnavailableError(f"rank {rank} did not free what its arena holds in vain")

    def _open_tiers(self, rank: int) -> None:
        """Beside the change of ranks: a disk that hangs keeps nobody from coming or going."""
        timeout_s = self._world.call_timeout_s
        with self._changing:
            is_first, self._are_tiers_open = not self._are_tiers_open, True
        if is_first:
            self._tiers.open(timeout_s, may_be_taken=True, is_cleared=self._record.is_cleared_on_disk)
            with self._service.at_now() as (index, _):
                send_down(index)
                miss_remote(index)
                index.trim()
            self._service.tell_moved()
        elif self._tiers.disk is not None:
            self._tiers.disk.take_back(rank, timeout_s)

    def _keep(self, change: Callable[[ClusterRecord], ClusterRecord]) -> None:
        with self._recording:
            record = change(self._record)
            if record != self._record:
                self._keeper.save(record)
                self._record = record
