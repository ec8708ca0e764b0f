"""A client process: what drivers do, call by call, and what they look at in what they get.

It carries plans to the ranks, maps the arenas of its own node, writes and reads there directly, and keeps views. Where
a rank is silent it reports nothing of it, and where one is proven dead it reports that nothing was done.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from cluster.messages import (
    ClientHello,
    DirectWrites,
    LoadItem,
    LookupItem,
    PlannedLoad,
    PlannedStore,
    RankHello,
    StoreDone,
    StoreItem,
    pack_flags,
    pack_keys,
)
from cluster.world import WorldSpec
from lmcache_ray.errors import ClusterError, DeadlineError, LMCacheRayError, UnknownClientError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.slot_table import COUNTER_BITS
from lmcache_ray.shard import ArenaSource, ChunkSource, EngineShard, PayloadSource, leading, read_chunks
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import Tier
from tests.simulation.copying import Copying, Rows
from tests.simulation.network import Handle, Network, ProcessEnded
from tests.simulation.nodes import ArenaFile, Liveness, Node
from tests.simulation.ranks import Payload
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.values import Bytes, Prompt
from tests.simulation.views import View

REPORT_S: Final = 1.0
_LOOK_AGAIN_S: Final = 0.5


class Deadline:
    """`timeout_s` from now."""

    def __init__(self, scheduler: Scheduler, timeout_s: float) -> None:
        self._scheduler = scheduler
        self.timeout_s = timeout_s
        self.end = scheduler.now + timeout_s

    def left_s(self) -> float:
        """What is left of it."""
        return max(0.0, self.end - self._scheduler.now)


class Client:
    """One client process on `node`, which has ranks of the world or (`has_liveness` False) has not."""

    def __init__(
        self,
        name: str,
        process: Process,
        node: Node,
        *,
        world: WorldSpec,
        scheduler: Scheduler,
        network: Network,
        coordinator: Handle,
        ranks: Sequence[Handle],
        copying: Copying,
        contents: Bytes,
        happened: Counter[str],
    ) -> None:
        self.name: Final = name
        self.process: Final = process
        self.node: Final = node
        self.views: Final[list[View]] = []
        self._world = world
        self._scheduler = scheduler
        self._network = network
        self._coordinator = coordinator
        self._ranks = ranks
        self._copying = copying
        self._contents = contents
        self._happened = happened
        self._hellos: list[RankHello] = []
        self._maps: dict[int, tuple[ArenaFile, EngineShard]] = {}
        self._num_leases = 0
        self._num_puts = 0
        self._putting: set[int] = set()
        self.liveness = Liveness(name, f"/{node.name}/{name}", process)
        self._path: str | None = None

    # -- calls --------------------------------------------------------------------------------------------------------

    def register(self) -> None:
        """Begin to use the cluster. Only where there are ranks can its end be proven, and can it map arenas."""
        deadline = Deadline(self._scheduler, self._world.call_timeout_s)
        hellos = self._network.call(self._coordinator, "introduce", timeout_s=deadline.left_s())
        if hellos is None:
            raise ClusterError("the cluster is not whole")
        self._hellos = hellos
        if self._path is None and any(hello.node_id == self.node.name for hello in hellos):
            self._path = self.liveness.path
            self.node.liveness[self._path] = self.liveness
        self._network.call(self._coordinator, "register_client", self._hello(), timeout_s=deadline.left_s())

    def _hello(self) -> ClientHello:
        return ClientHello(self.name, self.node.name, 0, self._path)

    def lookup(self, prompt: Prompt, *, lease_id: str | None = None) -> int:
        """Leading chunks that are cached."""
        item = LookupItem(pack_keys(prompt.keys), lease_id)
        deadline = Deadline(self._scheduler, self._world.call_timeout_s)
        (count,) = self._decide("lookup", self.name, [item], tuple(Tier), timeout_s=deadline.left_s())
        if self._world.tiers.remote is not None and count < len(prompt.keys):
            (count,) = self._decide_patiently(
                "look_further", self.name, [item.keys], [count], timeout_s=deadline.left_s()
            )
        return int(count)

    def pin(self, prompt: Prompt, *, is_wanted: bool) -> None:
        """Pin a prompt whoever ends, or end that."""
        self._decide("pin" if is_wanted else "unpin", pack_keys(prompt.keys), timeout_s=self._world.call_timeout_s)

    def clear(self, keys: Sequence[bytes] | None, tiers: Sequence[Tier]) -> TierClearCounts:
        """Forget chunks."""
        packed = None if keys is None else pack_keys(keys)
        counts: TierClearCounts = self._decide_patiently(
            "clear", packed, tuple(tiers), timeout_s=self._world.call_timeout_s
        )
        return counts

    def store(self, prompt: Prompt) -> int:
        """Have every holder write its rows; leading chunks READY at the end."""
        deadline = Deadline(self._scheduler, self._world.call_timeout_s)
        plan = self._plan_store(prompt, deadline, None)
        refs = plan.refs.unpack()
        written: dict[int, Any] = {}
        if refs:
            calls = {rank: (self._ranks[rank], "store", (refs,)) for rank in self._world.layout.holders}
            written = self._network.call_each(calls, timeout_s=deadline.left_s())
        return self._report(plan, refs, written, deadline)

    def put(self, prompt: Prompt) -> int:
        """Write into the arenas of this node, and send to the others; leading chunks READY at the end."""
        self._num_puts += 1
        number = self._num_puts
        self._putting.add(number)
        try:
            return self._put(prompt, number)
        finally:
            self._putting.discard(number)

    def _put(self, prompt: Prompt, number: int) -> int:
        deadline = Deadline(self._scheduler, self._world.call_timeout_s)
        plan = self._plan_store(prompt, deadline, number)
        refs = plan.refs.unpack()
        written: dict[int, Any] = {}
        if refs:
            holders = self._world.layout.holders
            away = [rank for rank in holders if not self._is_here(rank)]
            sent = {
                rank: self._network.send(self._ranks[rank], "take_in", refs, self._bytes(refs, rank)) for rank in away
            }
            for rank in holders:
                if rank not in away:
                    written[rank] = self._write_here(rank, refs)
            for rank, pending in sent.items():
                written[rank] = _outcome(lambda pending=pending: pending.wait(deadline.left_s()))
        return self._report(plan, refs, written, deadline)

    def retrieve(self, prompt: Prompt) -> int:
        """Have every rank load into its rows; leading chunks that are good on all of them."""
        deadline = Deadline(self._scheduler, self._world.call_timeout_s)
        with self._loading(prompt, deadline, keep=False) as (_, refs, _):
            if not refs:
                return 0
            ranks = range(self._world.layout.world_size)
            payload = self._export_for_others(refs, deadline)
            calls = {
                rank: (self._ranks[rank], "load", (refs, payload if self._needs_payload(rank) else None))
                for rank in ranks
            }
            flags = self._network.call_each(calls, timeout_s=deadline.left_s())
            return min(0 if isinstance(of_rank, LMCacheRayError) else leading(of_rank) for of_rank in flags.values())

    def get(self, prompt: Prompt) -> int:
        """Copy chunks out to here; leading chunks that are good of all holders."""
        deadline = Deadline(self._scheduler, self._world.call_timeout_s)
        with self._loading(prompt, deadline, keep=False) as (_, refs, _):
            return self._read(refs, deadline) if refs else 0

    def view(self, prompt: Prompt, open_s: float) -> int:
        """Look at chunks where they lie, for some time."""
        deadline = Deadline(self._scheduler, self._world.call_timeout_s)
        epochs = self._epochs()
        with self._loading(prompt, deadline, keep=bool(epochs)) as (plan, refs, lease_id):
            view = self._held(lease_id, refs, epochs) if plan.is_kept else None
            if view is None:
                return self._read(refs, deadline) if refs else 0
        self._scheduler.sleep(open_s)
        if view in self.views:
            self.views.remove(view)
            self._let_go(view)
        return len(refs)

    def _held(self, lease_id: str, refs: Sequence[ChunkRef], epochs: Mapping[int, int]) -> View | None:
        """A view, noted where the next coordinator finds it; None if that has come since `epochs`."""
        files = {rank: file for rank in epochs if (file := self._file(rank)) is not None}
        view = View(lease_id, refs, files)
        self.liveness.held.update((ref.slot, ref.generation) for ref in refs)
        there = [file.slots.holds(ref.slot, ref.generation, ref.key) for file in files.values() for ref in refs]
        if self._epochs() != epochs or not all(there):
            self._happened["a view was given up"] += 1
            self._let_go(view)
            return None
        self.views.append(view)
        return view

    def _epochs(self) -> dict[int, int]:
        """Per rank of this node, the epoch of the coordinator that it serves."""
        files = {rank: self._file(rank) for rank in self._world.layout.holders}
        return {rank: file.slots.floor >> COUNTER_BITS for rank, file in files.items() if file is not None}

    def close_views(self) -> None:
        """Look at nothing any more."""
        for view in list(self.views):
            self.views.remove(view)
            self._let_go(view)

    # -- parts of stores ----------------------------------------------------------------------------------------------

    def _plan_store(self, prompt: Prompt, deadline: Deadline, number: int | None) -> PlannedStore:
        """A plan; `number` is that of a put."""
        item = StoreItem(pack_keys(prompt.keys), 0)
        while True:
            direct = None if number is None else DirectWrites(number, min(self._putting))
            patient = self._world.tiers.has_lower and deadline.left_s() > deadline.timeout_s / 2
            (plan,) = self._decide("prepare_stores", self.name, [item], direct, patient, timeout_s=deadline.left_s())
            if not plan.must_wait:
                planned: PlannedStore = plan
                return planned
            wait_s = min(_LOOK_AGAIN_S, deadline.left_s())
            _outcome(lambda wait_s=wait_s: self._decide_patiently("wait_for_room", timeout_s=wait_s))

    def _write_here(self, rank: int, refs: Sequence[ChunkRef]) -> Any:
        mapped = self._map(rank)
        if mapped is None:
            return [False] * len(refs)
        rows = Rows(self._copying, self._contents, rank, [ref.key for ref in refs])
        slots = {(ref.slot, ref.generation) for ref in refs}
        self.liveness.writing |= slots
        try:
            return mapped[1].store(refs, rows.rows(), rows)
        finally:
            self.liveness.writing -= slots

    def _bytes(self, refs: Sequence[ChunkRef], rank: int) -> np.ndarray:
        return np.array([self._contents.of(ref.key, rank) for ref in refs])

    def _report(
        self, plan: PlannedStore, refs: Sequence[ChunkRef], written: Mapping[int, Any], deadline: Deadline
    ) -> int:
        if plan.plan_id is None or not refs:
            return plan.num_ready
        flags = {}
        for rank, outcome in written.items():
            if isinstance(outcome, DeadlineError):
                self._happened["a rank was silent to a store"] += 1
                continue  # it may still be writing: the coordinator settles that
            if not isinstance(outcome, LMCacheRayError) and not all(outcome):
                self._happened["a write was refused"] += 1
            flags[rank] = pack_flags([False] * len(refs) if isinstance(outcome, LMCacheRayError) else outcome)
        timeout_s = max(REPORT_S, deadline.left_s())
        (count,) = self._decide("complete", [StoreDone(plan.plan_id, flags)], timeout_s=timeout_s)
        return int(count)

    # -- parts of loads -----------------------------------------------------------------------------------------------

    @contextmanager
    def _loading(
        self, prompt: Prompt, deadline: Deadline, *, keep: bool
    ) -> Iterator[tuple[PlannedLoad, tuple[ChunkRef, ...], str]]:
        """A load's plan, whose lease ends with the block unless it is kept."""
        self._num_leases += 1
        lease_id = f"load/{self.name}/{self._num_leases}"
        item = LoadItem(pack_keys(prompt.keys), 0, (lease_id,), keep)
        is_kept = False
        try:
            (plan,) = self._decide("prepare_loads", self.name, [item], timeout_s=deadline.left_s())
            while plan.must_wait:
                (plan,) = self._decide_patiently(
                    "promote_loads", self.name, [item], timeout_s=deadline.left_s() * 2 / 3
                )
            yield plan, plan.refs.unpack(), lease_id
            is_kept = plan.is_kept
        finally:
            if not is_kept:
                self.release(lease_id)

    def release(self, lease_id: str) -> None:
        """End a lease. Nobody waits for it."""
        self._network.send(self._coordinator, "decide", "complete", [], [lease_id], reliably=True)

    def _let_go(self, view: View) -> None:
        self.release(view.lease_id)
        self.liveness.held -= Counter((ref.slot, ref.generation) for ref in view.refs)

    def _read(self, refs: Sequence[ChunkRef], deadline: Deadline) -> int:
        counts = []
        for rank in self._world.layout.holders:
            rows = Rows(self._copying, self._contents, rank, [ref.key for ref in refs])
            flags = read_chunks(self._source(rank, refs, deadline), refs, rows.rows(), rows)
            rows.check(flags)
            self._happened["a read was refused"] += not all(flags)
            counts.append(leading(flags))
        return min(counts)

    def _source(self, rank: int, refs: Sequence[ChunkRef], deadline: Deadline) -> ChunkSource:
        if self._is_here(rank):
            mapped = self._map(rank)
            if mapped is not None:
                return ArenaSource(mapped[1].slots)
        else:
            call = self._network.send(self._ranks[rank], "export", refs)
            payload = _outcome(lambda: call.wait(deadline.left_s()))
            if isinstance(payload, Payload):
                return PayloadSource(payload.data, payload.present)
        return PayloadSource(np.empty((0, 0), dtype=np.uint8), [False] * len(refs))

    def _needs_payload(self, rank: int) -> bool:
        holder = self._world.layout.holder_of(rank)
        return holder != rank and self._node_of(rank) != self._node_of(holder)

    def _export_for_others(self, refs: Sequence[ChunkRef], deadline: Deadline) -> Payload:
        nothing = Payload(np.empty((0, 0), dtype=np.uint8), [False] * len(refs))
        if not any(map(self._needs_payload, range(self._world.layout.world_size))):
            return nothing
        call = self._network.send(self._ranks[0], "export", refs)
        payload = _outcome(lambda: call.wait(deadline.left_s()))
        return payload if isinstance(payload, Payload) else nothing

    # -- the rest of the world ----------------------------------------------------------------------------------------

    def _node_of(self, rank: int) -> str:
        return self._hellos[rank].node_id if self._hellos else ""

    def _is_here(self, rank: int) -> bool:
        return self._path is not None and self._node_of(rank) == self.node.name

    def _map(self, rank: int) -> tuple[ArenaFile, EngineShard] | None:
        """The rank's arena of this node, mapped anew if another file has taken its place."""
        file = self.node.arenas.get(rank)
        if file is None:
            return None
        if rank not in self._maps or self._maps[rank][0] is not file:
            self._maps[rank] = (file, EngineShard(file.mapped()))
        return self._maps[rank]

    def _file(self, rank: int) -> ArenaFile | None:
        mapped = self._map(rank) if self._is_here(rank) else None
        return None if mapped is None else mapped[0]

    def _decide(self, name: str, *arguments: object, timeout_s: float) -> Any:
        return self._ask("decide", name, *arguments, timeout_s=timeout_s)

    def _decide_patiently(self, name: str, *arguments: object, timeout_s: float) -> Any:
        if name != "clear":
            arguments = (*arguments, max(0.0, timeout_s - min(0.5, timeout_s / 4)))
        return self._ask("decide_patiently", name, *arguments, timeout_s=timeout_s)

    def _ask(self, method: str, *arguments: object, timeout_s: float) -> Any:
        end = self._scheduler.now + timeout_s
        try:
            return self._network.call(self._coordinator, method, *arguments, timeout_s=timeout_s)
        except UnknownClientError:
            self._happened["a client registered again"] += 1
            self._network.call(
                self._coordinator, "register_client", self._hello(),
                timeout_s=max(0.0, end - self._scheduler.now),
            )  # fmt: skip
            left_s = max(0.0, end - self._scheduler.now)
            return self._network.call(self._coordinator, method, *arguments, timeout_s=left_s)


def _outcome(call: Callable[[], Any]) -> Any:
    """What a call answers, or the named error that it ends with."""
    try:
        return call()
    except (ProcessEnded, LMCacheRayError) as error:
        return error
