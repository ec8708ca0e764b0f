"""The coordinator's process: the production core, tiers and housekeeping, with simulated calls to ranks.

Nothing of the coordinator is written again here. What stands in for its actor hands the calls on, tells the oracle of
each decision at the moment it is made, and carries calls to ranks over the simulated network.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster.core import CoordinatorCore
from cluster.housekeeping import Housekeeping
from cluster.messages import ClientHello, RankHello
from cluster.rank_port import Enlisted, Enlistment
from cluster.record import MissedClear, RecordKeeper
from cluster.world import WorldSpec
from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.broadcast.tags import Call, Tag, TakeResult
from lmcache_ray.errors import DeadlineError, LMCacheRayError, RankUnavailableError
from lmcache_ray.index.arena_report import ViewedSlots
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index_service import IndexService
from lmcache_ray.storage.remote import RemoteStore
from lmcache_ray.tiers.assembly import index_maker, tier_service, tiered_index
from lmcache_ray.tiers.calls import RankAnswer, TierCall
from lmcache_ray.tiers.tiered_index import TieredIndex
from tests.simulation.network import Handle, Network, ProcessEnded
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import Process, Scheduler, Task

_HOUSEKEEPING_S: Final = 2.0
_NOTICE_S: Final = 0.5
"""Until a coordinator knows that a process has ended."""


@dataclass(frozen=True, slots=True)
class CoordinatorParts:
    """What the coordinators of one world are made with."""

    world: WorldSpec
    scheduler: Scheduler
    network: Network
    ranks: Sequence[Handle]
    keeper: RecordKeeper
    oracle: Oracle
    happened: Counter[str]
    open_remote: Callable[[], RemoteStore | None]


class SimulatedRankCalls:
    """What `RankCalls` is in a cluster: a `RankPort`, the `TierRanks`, and the watch for the ends of processes."""

    is_watching: Final = True

    def __init__(self, parts: CoordinatorParts, epoch: int) -> None:
        self._parts = parts
        self._epoch = epoch
        self._clear_timeout_s = parts.world.call_timeout_s / 2
        self._ended: list[tuple[int, str]] = []
        self._watcher: Task | None = None

    # -- watching -----------------------------------------------------------------------------------------------------

    def can_return(self, rank: int) -> bool:
        """Every process is started again."""
        return True

    def ended_ranks(self, *, timeout_s: float) -> list[tuple[int, str]]:
        """Whose process has ended since the last call."""
        if not self._ended:
            self._watcher = self._parts.scheduler.current()
            self._parts.scheduler.wait(timeout_s)
        ended, self._ended = self._ended, []
        return ended

    def watch(self, hello: RankHello) -> None:
        """Learn of this process's end, some time after it, or at once if another one serves the rank by now."""
        handle = self._parts.ranks[hello.worker_id]
        process = handle.process
        if process is None or not process.is_alive or getattr(handle.serving, "pid", None) != hello.pid:
            self._note_end(hello)
        else:
            process.obituaries.append(lambda: self._note_end(hello))

    def _note_end(self, hello: RankHello) -> None:
        scheduler = self._parts.scheduler

        def tell() -> None:
            self._ended.append((hello.worker_id, f"process {hello.pid} has ended"))
            if self._watcher is not None:
                scheduler.wake(self._watcher)

        scheduler.after(scheduler.rng.random() * _NOTICE_S, tell)

    # -- RankPort -----------------------------------------------------------------------------------------------------

    def node_of(self, rank: int, *, timeout_s: float) -> str:
        """See `RankPort`."""
        return str(self._ask_one(rank, "node_id", timeout_s=timeout_s))

    def enlist(self, rank: int, enlistment: Enlistment, *, timeout_s: float) -> Enlisted:
        """See `RankPort`."""
        enlisted: Enlisted = self._ask_one(rank, "enlist", enlistment, timeout_s=timeout_s)
        self.watch(enlisted.hello)
        serving = self._parts.ranks[rank].serving
        self._note("a rank came back to its arena" if getattr(serving, "has_attached", False) else "a rank began anew")
        if enlisted.report.unfinished:
            self._note("a rank came back with unfinished slots")
        if enlisted.report.viewed:
            self._note("a rank came back with slots in view")
        return enlisted

    def free_slots(self, ranks: Sequence[int], refs: Sequence[ChunkRef]) -> Collection[int]:
        """See `RankPort`."""
        calls = dict.fromkeys(ranks, ("free_slots", tuple(refs), self._epoch))
        return list(self._ask(calls, self._clear_timeout_s))

    def forget(self, ranks: Sequence[int], clear: MissedClear) -> Collection[int]:
        """See `RankPort`."""
        return list(self._ask(dict.fromkeys(ranks, ("forget", clear, self._epoch)), self._clear_timeout_s))

    def settle(self, refs: Mapping[int, Sequence[ChunkRef]]) -> dict[int, list[ChunkRef]]:
        """See `RankPort`."""
        answers = self._ask(
            {rank: ("settle", tuple(of_rank), self._epoch) for rank, of_rank in refs.items()}, _HOUSEKEEPING_S
        )
        settled = {
            rank: [ref for ref, flag in zip(refs[rank], flags, strict=True) if flag] for rank, flags in answers.items()
        }
        if any(settled.values()):
            self._note("quarantined slots were settled")
        return settled

    def viewed(self, ranks: Sequence[int]) -> dict[int, tuple[ViewedSlots, ...]]:
        """See `RankPort`."""
        return self._ask(dict.fromkeys(ranks, ("viewed",)), _HOUSEKEEPING_S)

    def ping(self, ranks: Sequence[int]) -> dict[int, int]:
        """See `RankPort`."""
        answers = self._ask(dict.fromkeys(ranks, ("ping",)), _HOUSEKEEPING_S)
        return {rank: pid for rank, pid in answers.items() if isinstance(pid, int)}

    def is_client_dead(self, rank: int, liveness_path: str) -> bool:
        """See `RankPort`."""
        is_dead = self._ask({rank: ("is_client_dead", liveness_path)}, _HOUSEKEEPING_S).get(rank) is True
        if is_dead:
            self._note("a client was proven dead")
        return is_dead

    # -- TierRanks ----------------------------------------------------------------------------------------------------

    @property
    def holders(self) -> Sequence[int]:
        """See `TierRanks`."""
        return self._parts.world.layout.holders

    def ask(self, calls: Mapping[int, TierCall], *, timeout_s: float) -> dict[int, RankAnswer]:
        """See `TierRanks`."""
        answers = self._ask({rank: ("tier_call", call, self._epoch) for rank, call in calls.items()}, timeout_s)
        self._note(call.name for call in calls.values() if any(any(answer.done) for answer in answers.values()))
        return answers

    # -- parts --------------------------------------------------------------------------------------------------------

    def _note(self, what: str | Iterable[str]) -> None:
        self._parts.happened.update((what,) if isinstance(what, str) else set(what))

    def _ask_one(self, rank: int, method: str, *arguments: object, timeout_s: float) -> Any:
        try:
            return self._parts.network.call(self._parts.ranks[rank], method, *arguments, timeout_s=timeout_s)
        except (ProcessEnded, DeadlineError) as error:
            raise RankUnavailableError(str(error)) from error

    def _ask(self, calls: Mapping[int, tuple[Any, ...]], timeout_s: float) -> dict[int, Any]:
        outcomes = self._parts.network.call_each(
            {rank: (self._parts.ranks[rank], method, tuple(rest)) for rank, (method, *rest) in calls.items()},
            timeout_s=timeout_s,
        )
        return {rank: outcome for rank, outcome in outcomes.items() if not isinstance(outcome, LMCacheRayError)}


class SimulatedCoordinator:
    """One life of the coordinator, made by a task of its process."""

    def __init__(self, parts: CoordinatorParts, process: Process, *, has_returned: bool) -> None:
        world = parts.world
        self.process: Final = process
        self._happened = parts.happened
        self._was_whole = not has_returned
        self._oracle = parts.oracle
        keeper = parts.keeper
        record = keeper.load()
        if has_returned:
            record = record.next_life()
            keeper.save(record)
        calls = SimulatedRankCalls(parts, record.epoch)
        make_index = index_maker(
            world.layout.holders, world.cache_policy,
            call_timeout_s=world.call_timeout_s, lease_timeout_s=world.lease_timeout_s,
        )  # fmt: skip
        self.index: Final[TieredIndex] = tiered_index(
            world.tiers, lambda below: make_index(world.num_slots, record.epoch, below)
        )
        service = IndexService(self.index, clock=parts.scheduler.clock, free_slots=calls.free_slots)
        tiers = tier_service(
            world.tiers, service, calls, world.layout, make_index=make_index, remote=parts.open_remote(),
            call_timeout_s=world.call_timeout_s,
        )  # fmt: skip
        self.core: Final = CoordinatorCore(
            world,
            has_returned=has_returned,
            service=service,
            tiers=tiers,
            exchange=Exchange(f"epoch {record.epoch}", world.layout.world_size, world.call_timeout_s),
            ranks=calls,
            keeper=keeper,
            clock=parts.scheduler.clock,
            wall=parts.scheduler.clock,
        )
        self._calls = calls
        self._house = Housekeeping(self.core, calls)  # type: ignore[arg-type]
        if has_returned:
            self._house.start()

    @property
    def is_recovering(self) -> bool:
        """Whether something is still to come back."""
        return not self.core.can_serve()

    @property
    def faults(self) -> dict[str, str]:
        """What went wrong in threads that nobody waits for."""
        return self._house.faults

    def note_recovery(self) -> None:
        """Whether the index has been rebuilt is looked for after each step."""
        if not self._was_whole and self.core.can_serve():
            self._was_whole = True
            is_empty = self.index.memory.counts().ready == 0
            self._happened["an empty index was rebuilt" if is_empty else "an index was rebuilt with chunks"] += 1

    def adopt(self, enlisted: Sequence[Enlisted], timeout_s: float) -> None:
        """The world's start."""
        self.core.adopt(enlisted, timeout_s)
        for one in enlisted:
            self._calls.watch(one.hello)
        self._house.start()

    # -- what callers ask ---------------------------------------------------------------------------------------------

    def introduce(self) -> list[RankHello] | None:
        """Who serves the world."""
        return self.core.hellos()

    def register_client(self, hello: ClientHello) -> None:
        """A process begins to use the cluster."""
        self.core.clients.enter(hello)

    def unregister_client(self, client_id: str) -> None:
        """It has ended."""
        self.core.clients.leave(client_id)

    def decide(self, name: str, *arguments: Any) -> Any:
        """A call of the index that is answered at once."""
        with self._oracle.watching(name, arguments) as watch:
            watch.answer = self.core.calls.prompt[name](*arguments)
        return watch.answer

    def decide_patiently(self, name: str, *arguments: Any) -> Any:
        """One that may wait."""
        with self._oracle.watching(name, arguments) as watch:
            watch.answer = self.core.calls.patient[name](*arguments)
        return watch.answer

    def publish(self, rank: int, name: str | None, parcel: object, call: Call | None) -> None:
        """A source's object."""
        self.core.exchange.publish(parcel, rank, name, call=call)

    def take(
        self, rank: int, src: int, name: str | None, tag: Tag | None, wait_s: float, call: Call | None
    ) -> tuple[Tag, TakeResult]:
        """A receiver asks for it."""
        tag = self.core.exchange.begin(rank, src, name, call=call) if tag is None else tag
        return tag, self.core.exchange.poll(tag, rank, wait_s)

    def break_broadcasts(self, reason: str) -> None:
        """A rank was sent what was not for it."""
        self.core.exchange.break_session(reason)

    def give_up_broadcast(self, rank: int, tag: Tag) -> DeadlineError:
        """A receiver's deadline has passed."""
        return self.core.exchange.give_up(tag, rank)
