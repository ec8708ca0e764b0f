"""One rank's work: its arena, its paged KV and the tasks of plans, without Ray.

`worker.py` puts this into an actor. Tests and simulations can use it directly.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lmcache_ray.arena.arena import Arena
from lmcache_ray.arena.liveness import LivenessFile, LivingClient, living_clients
from lmcache_ray.arena.mapped import ArenaMap
from lmcache_ray.arena.sweep import sweep
from lmcache_ray.build import arena_spec
from lmcache_ray.connector.base import KVConnector
from lmcache_ray.errors import ArenaError, RankUnavailableError
from lmcache_ray.index.arena_report import ArenaReport, ViewedSlots
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shard import ArenaSource, ChunkSource, EngineShard, PayloadSource, export_chunks, read_chunks
from lmcache_ray.storage.directory_lock import DirectoryOwner
from lmcache_ray.tiers.assembly import open_remote
from lmcache_ray.tiers.calls import RankAnswer, TierCall
from lmcache_ray.tiers.rank_tiers import RankTiers

from .messages import (
    LoadTask,
    PackedRefs,
    Payload,
    StepResult,
    StoreTask,
    pack_flags,
    unpack_flags,
)
from .topology import RankPlace
from .world import WorldSpec


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank is made of: its place, its metadata, and the connector to its paged KV."""

    place: RankPlace
    metadata: LMCacheMetadata
    connector: KVConnector


class Rank:
    """One rank. A holder owns an arena; every rank has paged KV and can load from any arena of its node."""

    def __init__(self, world: WorldSpec, setup: RankSetup, *, may_attach: bool = False) -> None:
        self.world = world
        self.place = setup.place
        self.metadata = setup.metadata
        self.connector = setup.connector
        self.layout = world.layout.ranks[setup.place.worker_id]
        self._arena: Arena | None = None
        self.shard: EngineShard | None = None
        self._tiers: RankTiers | None = None
        self._lock = threading.Lock()
        self._maps: dict[str, ArenaMap] = {}
        if setup.place.worker_id in world.layout.holders:
            spec = arena_spec(
                world.layout,
                setup.place.worker_id,
                num_slots=world.num_slots,
                namespace=world.namespace,
                name=world.name,
            )
            # First what may be refused on this node: a file that exists by then would be left behind.
            remote = open_remote(world.tiers.remote, world.layout, scope=world.hasher().scope(), origin=world.life)
            make = Arena.attach_or_create if may_attach else Arena.create
            self._arena = make(spec, world.arena_dir, node_id=setup.place.node_id, now=time.time())
            self.shard = EngineShard(self._arena.slots)
            self._tiers = RankTiers(
                self.shard,
                world.layout,
                setup.place.worker_id,
                disk=world.tiers.disk,
                owner=DirectoryOwner(world.namespace, world.name, world.life),
                remote=remote,
            )

    @property
    def arena_path(self) -> str | None:
        """The rank's own arena, if it holds one."""
        return str(self._arena.path) if self._arena is not None else None

    def fence(self, floor: int, *, wait_s: float) -> ArenaReport:
        """From now on no write below the generation `floor` begins or commits; what the arena holds then.

        Writes under way in this process may end within `wait_s`.
        """
        if self.shard is None:
            return ArenaReport()
        self.shard.fence(floor, wait_s=wait_s)
        clients = self._living_clients()  # after the floor has risen: see `arena/liveness.py`
        return ArenaReport(
            committed=tuple(ChunkRef(held.key, held.slot, held.generation) for held in self.shard.slots.committed()),
            unfinished=tuple(self.shard.unfinished(foreign=_written(clients))),
            viewed=_viewed(clients),
        )

    def viewed(self) -> tuple[ViewedSlots, ...]:
        """What views of living clients on this node show now."""
        return _viewed(self._living_clients())

    def step(self, loads: Sequence[LoadTask], stores: Sequence[StoreTask], payload: Payload | None) -> StepResult:
        """Carry out loads, then stores. `payload` has the chunks of load tasks that name a `payload_start`.

        A load whose arena cannot be read, or whose chunk is gone, is answered False, never raised.
        """
        return StepResult(
            loaded=[pack_flags(self._load(task, payload)) for task in loads],
            stored=[pack_flags(self._store(task)) for task in stores],
        )

    def export(self, refs: PackedRefs) -> Payload:
        """Copy chunks of the rank's own arena, for ranks and clients of other nodes."""
        source = ArenaSource(self._own_shard().slots)
        data, present = export_chunks(source, refs.unpack(), self.layout.slot_nbytes)
        return Payload(data, pack_flags(present))

    def take_in(self, refs: PackedRefs, num_tokens: Sequence[int], data: np.ndarray) -> bytes:
        """Write chunks given as bytes ``[len(refs), slot_nbytes]``; a flag byte per chunk."""
        return pack_flags(self._own_shard().take_in(refs.unpack(), data, num_tokens))

    def move_chunks(self, call: TierCall) -> RankAnswer:
        """Move chunks between the arena and the tiers below it; see `RankTiers`."""
        if self._tiers is None:
            raise RankUnavailableError(f"rank {self.place.worker_id} holds no chunks in this world")
        return self._tiers.run(call)

    def free_slots(self, refs: PackedRefs) -> None:
        """Drop these chunks."""
        self._own_shard().free(refs.unpack())

    def forget(self, is_cleared: Callable[[ChunkRef], bool]) -> None:
        """Drop every chunk of which ``is_cleared(ref)`` is true, also one that no index knows any more."""
        if self.shard is not None:
            held = [ChunkRef(found.key, found.slot, found.generation) for found in self.shard.slots.committed()]
            self.shard.free([ref for ref in held if is_cleared(ref)])

    def settle(self, refs: PackedRefs) -> bytes:
        """A flag byte per ref: whether it is certain that its slot is not and will not be written for it."""
        return pack_flags(self._own_shard().settle(refs.unpack(), foreign=_written(self._living_clients())))

    def is_client_dead(self, liveness_path: str) -> bool:
        """Whether the process that kept this file locked has ended."""
        return not LivenessFile.is_alive(liveness_path)

    def heartbeat(self) -> None:
        """Tell sweepers of other clusters that this arena is in use."""
        if self._arena is not None:
            self._arena.heartbeat(time.time())

    def prefault(self) -> None:
        """Make the arena's pages present, so that first stores do not wait for the kernel."""
        if self._arena is not None:
            self._arena.prefault()

    def source_at(self, arena_path: str | None) -> ChunkSource:
        """Chunks of the arena published at `arena_path` on this node; None is the rank's own.

        Raises `ArenaError` if it cannot be mapped. Maps are kept open, because mapping costs more than reading.
        """
        if arena_path is None or arena_path == self.arena_path:
            return ArenaSource(self._own_shard().slots)
        with self._lock:
            mapped = self._maps.get(arena_path)
            if mapped is None or not mapped.is_published():
                mapped = ArenaMap.open(arena_path, expected_fingerprint=self.world.layout.fingerprint)
                self._maps[arena_path] = mapped
            return ArenaSource(mapped.slots)

    def close(self) -> None:
        """Give back the arena and all maps. Idempotent."""
        with self._lock:
            while self._maps:
                self._maps.popitem()[1].close()
        if self._tiers is not None:
            self._tiers.close()
        if self._arena is not None:
            self._arena.close()

    def sweep(self) -> None:
        """Remove what dead processes of this cluster left on this node: when it ends, nobody will come for it."""
        world = self.world
        sweep(
            world.arena_dir, world.namespace, world.name, restart_window_s=world.restart_window_s, now=time.time()
        )

    def _living_clients(self) -> list[LivingClient]:
        return living_clients(self.world.arena_dir, self.world.namespace, self.world.name)

    def _load(self, task: LoadTask, payload: Payload | None) -> list[bool]:
        refs = task.refs.unpack()
        try:
            source = self._source_of(task, len(refs), payload)
        except ArenaError:
            return [False] * len(refs)
        return read_chunks(source, refs, task.rows.unpack(), self.connector, first_row=task.first_row)

    def _source_of(self, task: LoadTask, num_chunks: int, payload: Payload | None) -> ChunkSource:
        if task.payload_start is None or payload is None:
            return self.source_at(task.arena_path)
        part = slice(task.payload_start, task.payload_start + num_chunks)
        return PayloadSource(payload.data[part], unpack_flags(payload.present[part]))

    def _store(self, task: StoreTask) -> list[bool]:
        return self._own_shard().store(task.refs.unpack(), task.rows.unpack(), self.connector)

    def _own_shard(self) -> EngineShard:
        if self.shard is None:
            raise RankUnavailableError(f"rank {self.place.worker_id} holds no chunks in this world")
        return self.shard


def _written(clients: Sequence[LivingClient]) -> set[tuple[int, int]]:
    return {written for client in clients for written in client.writing}


def _viewed(clients: Sequence[LivingClient]) -> tuple[ViewedSlots, ...]:
    return tuple(
        ViewedSlots(client.client_id, f"views/{client.client_id}", client.held, str(client.path))
        for client in clients
        if client.held
    )
