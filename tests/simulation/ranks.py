"""A rank's process: what the worker actor and the `Rank` in it do, over arenas, disks and a store in memory.

Slots, shard and tiers are the production ones. A fresh process does nothing until a coordinator enlists it; then it
attaches to the arena that its predecessor has left on this node, or makes one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.messages import RankHello
from cluster.rank_port import Enlisted, Enlistment
from cluster.record import MissedClear
from cluster.world import WorldSpec
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.errors import RankUnavailableError, StaleEpochError
from lmcache_ray.index.arena_report import ArenaReport, ViewedSlots
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.shard import ArenaSource, ChunkSource, EngineShard, PayloadSource, export_chunks, read_chunks
from lmcache_ray.storage.directory_lock import DirectoryOwner
from lmcache_ray.storage.remote import RemoteStore
from lmcache_ray.tiers.calls import RankAnswer, TierCall
from lmcache_ray.tiers.rank_tiers import RankTiers
from tests.simulation.copying import Copying, Rows
from tests.simulation.nodes import ArenaFile, Node
from tests.simulation.storage import MemoryDisk
from tests.simulation.values import CHUNK_SIZE, Bytes


@dataclass(frozen=True, slots=True)
class Payload:
    """Chunks on their way from one node to another."""

    data: np.ndarray
    present: Sequence[bool]


@dataclass(frozen=True, slots=True)
class RankParts:
    """What the rank processes of one world are made with."""

    world: WorldSpec
    copying: Copying
    contents: Bytes
    open_disk: Callable[[Node, int], MemoryDisk]
    open_remote: Callable[[], RemoteStore | None]


class SimulatedRank:
    """One process of rank `rank`, with process id `pid`, on `node`."""

    def __init__(self, parts: RankParts, rank: int, pid: int, node: Node) -> None:
        self.rank: Final = rank
        self.pid: Final = pid
        self.node: Final = node
        self.arena: ArenaFile | None = None
        self.shard: EngineShard | None = None
        self.has_attached = False
        self.num_untagged = 0
        """Its broadcasts without a tag."""
        self._parts = parts
        self._is_started = False
        self._tiers: RankTiers | None = None
        self._epoch = 0
        self._hello: RankHello | None = None

    # -- control ------------------------------------------------------------------------------------------------------

    def node_id(self) -> str:
        """Where it runs."""
        return self.node.name

    def ping(self) -> int:
        """A sign of life."""
        return self.pid

    def enlist(self, enlistment: Enlistment) -> Enlisted:
        """Serve this coordinator."""
        self._check_epoch(enlistment.epoch)
        self._epoch = enlistment.epoch
        if not self._is_started:
            self._start(may_attach=enlistment.may_attach)
            place = enlistment.place
            path = None if self.arena is None else f"/{self.node.name}/{self.rank}"
            self._hello = RankHello(
                self.rank, place.local_worker_id, place.local_world_size, place.node_id, self.pid, path,
                self._parts.world.num_slots if self.arena else 0, 1,
            )  # fmt: skip
        report = self._fence(enlistment.floor)
        assert self._hello is not None
        return Enlisted(self._hello, report)

    def free_slots(self, refs: Sequence[ChunkRef], epoch: int) -> bool:
        """See `Rank.free_slots`."""
        self._check_epoch(epoch)
        self._own_shard().free(refs)
        return True

    def forget(self, clear: MissedClear, epoch: int) -> bool:
        """See `Rank.forget`."""
        self._check_epoch(epoch)
        shard = self._own_shard()
        held = [ChunkRef(found.key, found.slot, found.generation) for found in shard.slots.committed()]
        shard.free([ref for ref in held if clear.covers(ref)])
        return True

    def settle(self, refs: Sequence[ChunkRef], epoch: int) -> list[bool]:
        """See `Rank.settle`."""
        self._check_epoch(epoch)
        return self._own_shard().settle(refs, foreign=self._written_by_clients())

    def _written_by_clients(self) -> set[tuple[int, int]]:
        return {slot for one in self.node.living_clients() for slot in one.writing}

    def viewed(self) -> tuple[ViewedSlots, ...]:
        """See `Rank.viewed`."""
        self._check_started()
        return tuple(one.viewed() for one in self.node.living_clients() if one.held)

    def is_client_dead(self, path: str) -> bool:
        """Whether the process that had this file locked has ended."""
        self._check_started()
        liveness = self.node.liveness.get(path)
        return liveness is None or not liveness.is_alive

    def tier_call(self, call: TierCall, epoch: int) -> RankAnswer:
        """See `RankTiers.run`."""
        self._check_epoch(epoch)
        self._check_started()
        if self._tiers is None:
            raise RankUnavailableError(f"rank {self.rank} holds no chunks in this world")
        return self._tiers.run(call)

    # -- data ---------------------------------------------------------------------------------------------------------

    def store(self, refs: Sequence[ChunkRef]) -> list[bool]:
        """Copy rows into slots; a flag a chunk."""
        rows, shard = self._rows(refs), self._own_shard()
        return shard.store(refs, rows.rows(), rows)

    def take_in(self, refs: Sequence[ChunkRef], data: np.ndarray) -> list[bool]:
        """Copy bytes that came with the call into slots; a flag a chunk."""

        def copy(position: int, slot: np.ndarray) -> int:
            self._parts.copying.write(slot, data[position])
            return CHUNK_SIZE

        return self._own_shard().fill(refs, copy)

    def load(self, refs: Sequence[ChunkRef], payload: Payload | None) -> list[bool]:
        """Copy chunks into rows, and look whether those called good are so; a flag a chunk."""
        self._check_started()
        rows = self._rows(refs)
        flags = read_chunks(self._source(payload), refs, rows.rows(), rows)
        rows.check(flags)
        return flags

    def export(self, refs: Sequence[ChunkRef]) -> Payload:
        """Copy chunks out, for other nodes."""
        shard = self._own_shard()
        return Payload(*export_chunks(ArenaSource(shard.slots), refs, shard.slots.slot_nbytes))

    # -- parts --------------------------------------------------------------------------------------------------------

    def _start(self, *, may_attach: bool) -> None:
        parts, layout = self._parts, self._parts.world.layout
        if self.rank in layout.holders:
            self.arena = self.node.arenas.get(self.rank) if may_attach else None
            self.has_attached = self.arena is not None
            if self.arena is None:
                geometry = ArenaGeometry(parts.world.num_slots, layout.ranks[self.rank].slot_nbytes)
                self.arena = self.node.arenas[self.rank] = ArenaFile(geometry)
            self.shard = EngineShard(self.arena.mapped())
            self.shard.slots.free_damaged()
            self._tiers = RankTiers(
                self.shard, layout, self.rank, disk=parts.world.tiers.disk,
                owner=DirectoryOwner("simulation", "world", "life"), remote=parts.open_remote(),
            )  # fmt: skip
            if parts.world.tiers.disk is not None:
                self._tiers._disk = parts.open_disk(self.node, self.rank)  # type: ignore[assignment]
        self._is_started = True

    def _fence(self, floor: int) -> ArenaReport:
        """See `Rank.fence`."""
        if self.shard is None:
            return ArenaReport()
        self.shard.fence(floor, wait_s=self._parts.world.call_timeout_s / 4)
        clients = self.node.living_clients()
        return ArenaReport(
            committed=tuple(ChunkRef(held.key, held.slot, held.generation) for held in self.shard.slots.committed()),
            unfinished=tuple(self.shard.unfinished(foreign=self._written_by_clients())),
            viewed=tuple(one.viewed() for one in clients if one.held),
        )

    def _source(self, payload: Payload | None) -> ChunkSource:
        if payload is not None:
            return PayloadSource(payload.data, payload.present)
        holder = self._parts.world.layout.holder_of(self.rank)
        if holder == self.rank:
            return ArenaSource(self._own_shard().slots)
        arena = self.node.arenas.get(holder)
        if arena is None:
            return PayloadSource(np.empty((0, 0), dtype=np.uint8), [False] * self._parts.world.num_slots)
        return ArenaSource(arena.mapped())

    def _rows(self, refs: Sequence[ChunkRef]) -> Rows:
        return Rows(self._parts.copying, self._parts.contents, self.rank, [ref.key for ref in refs])

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleEpochError(f"epoch {epoch} has a successor, {self._epoch}")

    def _check_started(self) -> None:
        if not self._is_started:
            raise RankUnavailableError(f"rank {self.rank} has not been enlisted")

    def _own_shard(self) -> EngineShard:
        self._check_started()
        if self.shard is None:
            raise RankUnavailableError(f"rank {self.rank} holds no chunks in this world")
        return self.shard
