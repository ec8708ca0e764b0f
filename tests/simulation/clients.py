"""A client process: what drivers do, call by call, and what they look at in what they get.

It carries plans to the ranks, maps the arenas of its own node, writes and reads there directly, and keeps views. Where
a rank is silent it reports nothing of it, and where one is proven dead it reports that nothing was done.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np

from cluster.messages import (
    DirectWrites,
    LoadItem,
    LookupItem,
    PlannedLoad,
    PlannedStore,
    StoreDone,
    StoreItem,
    pack_flags,
    pack_keys,
)
from lmcache_ray.errors import DeadlineError, LMCacheRayError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.slot_table import COUNTER_BITS
from lmcache_ray.shard import ArenaSource, ChunkSource, PayloadSource, leading, read_chunks
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import Tier
from tests.simulation.copying import Rows
from tests.simulation.link import ClientParts, Deadline, Link, outcome_of
from tests.simulation.nodes import Node
from tests.simulation.ranks import Payload
from tests.simulation.scheduler import Process
from tests.simulation.values import Prompt
from tests.simulation.views import View

REPORT_S: Final = 1.0
_LOOK_AGAIN_S: Final = 0.5


class Client(Link):
    """One driver: every method is one call of a user's."""

    def __init__(self, name: str, process: Process, node: Node, parts: ClientParts) -> None:
        super().__init__(name, process, node, parts)
        self.views: Final[list[View]] = []
        self._copying = parts.copying
        self._contents = parts.contents
        self._num_leases = 0
        self._num_puts = 0
        self._putting: set[int] = set()

    # -- calls --------------------------------------------------------------------------------------------------------

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
                written[rank] = outcome_of(partial(pending.wait, deadline.left_s()))
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
            outcome_of(partial(self._decide_patiently, "wait_for_room", timeout_s=wait_s))

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
            payload = outcome_of(lambda: call.wait(deadline.left_s()))
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
        payload = outcome_of(lambda: call.wait(deadline.left_s()))
        return payload if isinstance(payload, Payload) else nothing
