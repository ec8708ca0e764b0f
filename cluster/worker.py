"""The rank worker actor: a `Rank` that answers calls, and the engine that code running beside it can use.

Ray starts its process again when that dies; the coordinator then enlists it as it did at first.

Concurrency groups keep a slow copy from delaying a sign of life: `data` moves bytes, `tiers` moves them to and from
storage that may be slow, `call` runs users' functions, `control` answers at once, and `watch` is occupied for life by
the coordinator's watch for this process's end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import ray

from lmcache_ray.errors import ClosedError, ClusterError, RankDiedError, RankUnavailableError, StaleEpochError

from .messages import LoadTask, PackedRefs, Payload, RankHello, StoreTask
from .packed_calls import pack, unpack
from .rank_port import Enlisted, Enlistment
from .ray_calls import Actor
from .world import WorldSpec

# A handle of this actor brings this module along, into the coordinator too: what needs torch is imported by calls.
if TYPE_CHECKING:
    import numpy as np

    from .kv_source import KVSpec
    from .rank import Rank
    from .rank_start import RankContext

_HEARTBEAT_S = 5.0

CONCURRENCY_GROUPS = {"control": 4, "data": 4, "tiers": 4, "call": 4, "watch": 1}
"""Threads for each kind of call; the module's docstring says what they are for."""


class RankWorker:
    """One rank's actor, idle until a coordinator enlists it: first in the cluster's start, then after each of its ends.

    It obeys coordinators of the latest epoch that it has heard of, and no earlier ones.
    """

    def __init__(self, world: WorldSpec, worker_id: int, kv: KVSpec) -> None:
        self._world = world
        self._worker_id = worker_id
        self._kv = kv
        self._rank: Rank | None = None
        self._context: RankContext | None = None
        self._epoch = 0
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # one enlistment or close at a time

    @ray.method(concurrency_group="control")
    def node_id(self) -> str:
        """The node this actor runs on."""
        return ray.get_runtime_context().get_node_id()

    @ray.method(concurrency_group="control")
    def enlist(self, enlistment: Enlistment, coordinator: Actor) -> bytes:
        """Serve this coordinator: `Enlisted`, packed. A fresh process makes the rank first; see `Rank.fence`.

        Raises `StaleEpochError` for a coordinator that has a successor, `ClosedError` after `stop`.
        """
        from .rank_start import start_rank

        with self._lock:
            if self._stopped.is_set():
                raise ClosedError(f"rank {self._worker_id} was stopped")
            self._check_epoch(enlistment.epoch)
            self._epoch = enlistment.epoch
            if self._rank is None:
                context = start_rank(
                    self._world, enlistment.place, self._kv, coordinator, may_attach=enlistment.may_attach
                )
                self._rank, self._context = context.rank, context
                threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
            report = self._rank.fence(enlistment.floor, wait_s=self._world.call_timeout_s / 4)
            return pack(Enlisted(self._hello(self._rank), report))

    def _hello(self, rank: Rank) -> RankHello:
        return RankHello(
            worker_id=rank.place.worker_id,
            local_worker_id=rank.place.local_worker_id,
            local_world_size=rank.place.local_world_size,
            node_id=rank.place.node_id,
            pid=os.getpid(),
            arena_path=rank.arena_path,
            slots_total=self._world.num_slots if rank.shard is not None else 0,
            kv_rows=rank.connector.num_slots,
        )

    # -- data ---------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="data")
    def step(self, packed: bytes, payload: Payload | None = None) -> bytes:
        """See `Rank.step`: load and store tasks, and the result, packed."""
        tasks: tuple[Sequence[LoadTask], Sequence[StoreTask]] = unpack(packed)
        return pack(self._started().step(*tasks, payload))

    @ray.method(concurrency_group="data")
    def export(self, refs: PackedRefs) -> Payload:
        """See `Rank.export`."""
        return self._started().export(refs)

    @ray.method(concurrency_group="data")
    def take_in(self, refs: PackedRefs, num_tokens: Sequence[int], data: np.ndarray) -> bytes:
        """See `Rank.take_in`; `data` came through the object store."""
        return self._started().take_in(refs, num_tokens, data)

    @ray.method(concurrency_group="tiers")
    def tier_call(self, packed: bytes, epoch: int) -> bytes:
        """See `RankTiers.run`: a call and its answer, packed."""
        self._check_epoch(epoch)
        return pack(self._started().move_chunks(unpack(packed)))

    @ray.method(concurrency_group="call")
    def call(self, function: str | Callable[..., object], *arguments: object) -> object:
        """Run ``function(context, *arguments)`` in this process; a text names it as "module:function"."""
        from .kv_source import resolve_function

        self._started()
        run = resolve_function(function, what="function") if isinstance(function, str) else function
        try:
            return run(self._context, *arguments)
        except SystemExit as error:  # Ray would end this actor's calls, and leave its process
            raise ClusterError(f"the function called sys.exit({error.code!r}); a rank does not end that way") from error

    # -- control ------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        """The process id, as a sign of life."""
        return os.getpid()

    @ray.method(concurrency_group="control")
    def free_slots(self, refs: PackedRefs, epoch: int) -> bool:
        """See `Rank.free_slots`."""
        self._check_epoch(epoch)
        self._started().free_slots(refs)
        return True

    @ray.method(concurrency_group="control")
    def forget(self, clear: bytes, epoch: int) -> bool:
        """See `Rank.forget`; a packed `MissedClear`."""
        self._check_epoch(epoch)
        self._started().forget(unpack(clear).covers)
        return True

    @ray.method(concurrency_group="control")
    def settle(self, refs: PackedRefs, epoch: int) -> bytes:
        """See `Rank.settle`."""
        self._check_epoch(epoch)
        return self._started().settle(refs)

    @ray.method(concurrency_group="control")
    def viewed(self) -> bytes:
        """See `Rank.viewed`; packed."""
        return pack(self._started().viewed())

    @ray.method(concurrency_group="control")
    def is_client_dead(self, liveness_path: str) -> bool:
        """See `Rank.is_client_dead`."""
        return self._started().is_client_dead(liveness_path)

    @ray.method(concurrency_group="control")
    def check_integrity(self) -> int:
        """Raise `IntegrityError` if the arena contradicts itself; the number of chunks it holds."""
        shard = self._started().shard
        if shard is None:
            return 0
        shard.slots.check_integrity()
        return shard.slots.num_committed

    @ray.method(concurrency_group="watch")
    def until_stopped(self, pid: int) -> None:
        """Return when `stop` was called: whoever waits for this learns of any other end of the process by Ray's error.

        Raises `RankDiedError` if this is another process than the one meant.
        """
        if pid != os.getpid():
            raise RankDiedError(f"process {pid} of rank {self._worker_id} has ended")
        self._stopped.wait()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Give the arena back and remove its file, and those of ranks that were killed here. Idempotent."""
        self._close()

    def __ray_shutdown__(self) -> None:
        self._close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        self._stopped.set()
        with self._lock:  # a start under way ends first: only then is it known what there is to give back
            if self._context is not None:
                self._context.engine.close()
            if self._rank is not None:
                self._rank.close()
                self._rank.sweep()

    def _started(self) -> Rank:
        if self._rank is None:
            raise RankUnavailableError(f"rank {self._worker_id} has not been brought back yet")
        return self._rank

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleEpochError(
                f"rank {self._worker_id} serves a coordinator of epoch {self._epoch}; this one is of epoch {epoch}"
            )

    def _beat(self) -> None:
        """Thread: pre-fault the arena once, then say regularly that it is in use."""
        rank = self._started()
        with suppress(ClosedError):  # the rank was stopped meanwhile
            rank.prefault()
            while not self._stopped.wait(_HEARTBEAT_S):
                rank.heartbeat()
