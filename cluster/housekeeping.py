"""What a coordinator does without being asked: notice ends, end what is overdue, settle quarantined slots.

Two threads. The watch sleeps until a rank's process ends, so that waiting receivers learn of it at once; the other one
makes rounds, and its calls to ranks have short deadlines and go out together, so one silent rank delays nothing else.
"""

import threading
from collections.abc import Callable
from typing import Final

from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index_service import IndexService

from .clients import Clients
from .membership import Membership
from .open_plans import OpenPlans
from .rank_calls import RankCalls

_ROUND_S: Final = 0.5
_ROUNDS_BETWEEN_CHECKS: Final = 6


class Housekeeping:
    """The two threads, from construction to `stop`. What goes wrong in one is kept in `faults`; it goes on."""

    def __init__(
        self,
        *,
        service: IndexService,
        membership: Membership,
        calls: RankCalls,
        plans: OpenPlans,
        clients: Clients,
        exchange: Exchange,
    ) -> None:
        self._service = service
        self._membership = membership
        self._calls = calls
        self._plans = plans
        self._clients = clients
        self._exchange = exchange
        self._stopping = threading.Event()
        self._num_rounds = 0
        self.faults: dict[str, str] = {}
        for name, turn in (("watch", self._watch), ("rounds", self._make_round)):
            threading.Thread(target=self._repeat, args=(name, turn), name=f"housekeeping-{name}", daemon=True).start()

    def stop(self) -> None:
        """End both threads."""
        self._stopping.set()

    def _repeat(self, name: str, turn: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                turn()
                self.faults.pop(name, None)
            except Exception as error:  # the outermost frame of a thread that must not end: recorded, shown in status
                self.faults[name] = f"housekeeping ({name}) failed: {type(error).__name__}: {error}"
                self._stopping.wait(_ROUND_S)

    def _watch(self) -> None:
        ended = self._calls.ended_ranks(timeout_s=_ROUND_S)
        if not ended:
            self._stopping.wait(0 if self._calls.is_watching else _ROUND_S)
        for rank, reason in ended:
            if self._membership.lost(rank, reason):
                self._exchange.rank_lost(rank)
                self._service.rank_lost(rank)

    def _make_round(self) -> None:
        self._stopping.wait(_ROUND_S)
        self._num_rounds += 1
        if self._num_rounds % _ROUNDS_BETWEEN_CHECKS == 0:
            self._drop_dead_clients()
            self._ping_ranks()
        self._exchange.expire()
        self._settle()
        self._plans.prune()

    def _ping_ranks(self) -> None:
        """A rank that is stopped, or stuck, lives as far as Ray can tell."""
        alive = [rank for rank in range(self._membership.world_size) if self._membership.is_alive(rank)]
        answering = self._calls.ping(alive)
        for rank in alive:
            self._membership.pinged(rank, answered=rank in answering)

    def _drop_dead_clients(self) -> None:
        hellos = [record.hello for record in self._membership.records() if record.hello is not None]
        for client in self._clients.all():
            neighbours = [hello.worker_id for hello in hellos if hello.node_id == client.node_id]
            witness = next((rank for rank in neighbours if self._membership.is_alive(rank)), None)
            if client.liveness_path is None or witness is None:
                continue  # nobody can tell: its leases end by time, but for views, which are of dead ranks alone
            if self._calls.is_client_dead(witness, client.liveness_path):
                self._clients.leave(client.client_id)

    def _settle(self) -> None:
        """Free quarantined slots that nobody can be writing any more."""
        unsettled = {rank: refs for rank in self._membership.holders if (refs := self._unsettled(rank))}
        if not unsettled:
            return
        dead = [rank for rank in unsettled if not self._membership.is_alive(rank)]
        settled = self._calls.settle({rank: refs for rank, refs in unsettled.items() if rank not in dead})
        settled.update({rank: unsettled[rank] for rank in dead})
        with self._service.at_now() as (index, _):
            for rank, refs in settled.items():
                index.memory.settle(rank, refs)

    def _unsettled(self, rank: int) -> list[ChunkRef]:
        """What the rank still owes an answer for, but for slots that a living client may be writing itself."""
        with self._service.at_now() as (index, _):
            return [ref for ref in index.memory.unsettled(rank) if self._plans.writer_of(ref.generation) is None]
