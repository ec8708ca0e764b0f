"""In-process worlds whose disk tier is driven by hand: real ranks with real files, and faults between tier and ranks.

The clock stands still until it is moved, and nothing is done but what a test asks for, except where it starts the
tier's own thread.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lmcache_ray.arena.private import PrivateArena
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.index.plans import ChunkRef, Deferred, StorePlan
from lmcache_ray.index_service import IndexService
from lmcache_ray.shard import EngineShard
from lmcache_ray.storage.directory_lock import DirectoryOwner
from lmcache_ray.tiers.assembly import index_maker, tiered_index
from lmcache_ray.tiers.calls import RankAnswer, TierCall
from lmcache_ray.tiers.disk_tier import DiskTier
from lmcache_ray.tiers.local_ranks import LocalTierRanks
from lmcache_ray.tiers.promoting import Promoted
from lmcache_ray.tiers.rank_tiers import RankTiers
from lmcache_ray.tiers.spec import DiskSpec, Tier, TierSpec
from lmcache_ray.tiers.tier_service import TierService
from tests.unit.disk_builders import du
from tests.unit.stored_chunks import CHUNK_SIZE, chunk_of, layout_of, slot_of

LAYOUT = layout_of()
RANKS = tuple(LAYOUT.holders)
CALL_S = 5.0
ROOM = 2**20
PATIENCE_S = 20.0


Spoil = Callable[[int, RankAnswer], RankAnswer]


class Held:
    """Where a call waits."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.may_go_on = threading.Event()

    def __call__(self) -> None:
        self.is_reached.set()
        assert self.may_go_on.wait(PATIENCE_S), "nobody lets the call go on"


class FaultyRanks:
    """The world's ranks, of which some do not answer, or not what they should.

    `silent` ranks do what they are told and nobody hears of it; `deaf` ones do not hear of it. What a rank says to
    calls named in `spoilt` is replaced by what these make of it, and calls named in `held` wait before they go out.
    """

    def __init__(self, ranks: LocalTierRanks) -> None:
        self._ranks = ranks
        self.silent: set[int] = set()
        self.deaf: set[int] = set()
        self.spoilt: dict[str, Spoil] = {}
        self.held: dict[str, Held] = {}
        self.asked: list[str] = []

    @property
    def holders(self) -> Sequence[int]:
        return self._ranks.holders

    def ask(self, calls: Mapping[int, TierCall], *, timeout_s: float) -> dict[int, RankAnswer]:
        name = next(iter(calls.values())).name if calls else ""
        self.asked.append(name)
        heard = {rank: call for rank, call in calls.items() if rank not in self.deaf}
        if name in self.held:
            self.held[name]()
        answers = self._ranks.ask(heard, timeout_s=timeout_s)
        if name in self.spoilt:
            answers = {rank: self.spoilt[name](rank, answer) for rank, answer in answers.items()}
        return {rank: answer for rank, answer in answers.items() if rank not in self.silent}


@dataclass
class World:
    """Two ranks with memory for `num_slots` chunks and a disk each; the bytes of chunk n tell n and the rank."""

    root: Path
    num_slots: int = 4
    max_nbytes: int = ROOM
    keeps: bool = True
    chunks_at_once: int = 64
    life: str = "life 1"
    now: float = 0.0
    shards: dict[int, EngineShard] = field(init=False)
    ranks: FaultyRanks = field(init=False)
    service: IndexService = field(init=False)
    disk: DiskTier = field(init=False)
    tiers: TierService = field(init=False)

    def __post_init__(self) -> None:
        slots = {
            rank: PrivateArena(ArenaGeometry(self.num_slots, LAYOUT.ranks[rank].slot_nbytes)).slots for rank in RANKS
        }
        self.shards = {rank: EngineShard(of_rank) for rank, of_rank in slots.items()}
        spec = TierSpec(self.keeps, DiskSpec(str(self.root), self.max_nbytes))
        owner = DirectoryOwner("tests", "world", self.life)
        self._local = LocalTierRanks(
            {
                rank: RankTiers(shard, LAYOUT, rank, disk=spec.disk, owner=owner, remote=None)
                for rank, shard in self.shards.items()
            }
        )
        self.ranks = FaultyRanks(self._local)
        make_index = index_maker(RANKS, "LRU", call_timeout_s=CALL_S, lease_timeout_s=60.0)
        index = tiered_index(spec, lambda below: make_index(self.num_slots, 1, below))
        self.service = IndexService(index, clock=self.clock, free_slots=self.free_slots)
        self.disk = DiskTier(
            self.service,
            self.ranks,
            make_index,
            chunks_at_once=self.chunks_at_once,
            timeout_s=CALL_S,
            clock=self.clock,
        )
        self.tiers = TierService(self.service, disk=self.disk, remote=None, call_timeout_s=CALL_S, clock=self.clock)

    def clock(self) -> float:
        return self.now

    def free_slots(self, ranks: Sequence[int], refs: Sequence[ChunkRef]) -> Sequence[int]:
        for rank in ranks:
            self.shards[rank].free(refs)
        return ranks

    def store(self, *numbers: int) -> int:
        """Store a prompt of these chunks on both ranks; how many leading ones are cached then."""
        keys = keys_of(*numbers)
        plan = self.service.prepare_store(keys, client="writer", start=0, rank=None)
        assert isinstance(plan, StorePlan)
        stored = [numbers[position] for position in plan.positions]
        acks = {}
        for rank, shard in self.shards.items():
            payload = np.array([bytes_of(number, rank) for number in stored]).reshape(len(stored), -1)
            acks[rank] = shard.take_in(plan.refs, payload, [CHUNK_SIZE] * len(stored))
        return self.service.complete_store(plan.plan_id, keys, acks)

    def write_down(self) -> int:
        """Write what waits; how many calls that took."""
        return sum(1 for _ in iter(self.disk.write_some, False))

    def promote(self, *numbers: int) -> int:
        """Bring a prompt up: how many chunks came from the disk."""
        (promoted,) = self.tiers.promoter.promote([keys_of(*numbers)], ["load"], client="reader", timeout_s=CALL_S)
        assert promoted == Promoted(disk=promoted.disk)
        return promoted.disk

    def load(self, *numbers: int) -> int:
        """Load a prompt on both ranks and compare every byte: the leading chunks that came."""
        plan = self.service.prepare_load(keys_of(*numbers), client="reader", start=0, lease_ids=["load"])
        assert not isinstance(plan, Deferred)
        for number, ref in zip(numbers, plan.refs, strict=False):
            for rank, shard in self.shards.items():
                data = shard.slots.chunk(ref.slot, ref.generation, ref.key)
                assert data is not None and np.array_equal(data, bytes_of(number, rank)), "other bytes"
        self.service.release(["load"])
        return len(plan.refs)

    def forget_memory(self) -> None:
        self.tiers.clear(None, [Tier.CPU])

    def where(self, *numbers: int) -> str:
        """The tiers of the leading chunks, a letter each."""
        return "".join(tier.value[0] for tier in self.service.locate(keys_of(*numbers)))

    def files(self, rank: int) -> list[Path]:
        return sorted(self.root.glob(f"*/rank-{rank}*/**/*.kv"))

    def num_files(self) -> list[int]:
        return [len(self.files(rank)) for rank in RANKS]

    def check(self) -> None:
        """The index is sound, nothing is leased or unfinished, and the limit is kept."""
        with self.service.at_now() as (index, _):
            index.check_integrity()
            for part in filter(None, (index.memory, index.disk)):
                counts = part.counts()
                assert (counts.leases, counts.plans, counts.writing, counts.quarantined) == (0, 0, 0, 0)
        assert all(du(directory) <= self.max_nbytes for directory in self.root.glob("*/rank-*"))

    def num_waiting(self) -> int:
        with self.service.at_now() as (index, _):
            return index.num_behind()

    def close(self) -> None:
        self.ranks.deaf.clear()
        self.ranks.silent.clear()
        self.tiers.close(flush_s=5.0)
        self._local.close()


def keys_of(*numbers: int) -> list[bytes]:
    return [chunk_of(number).key for number in numbers]


def bytes_of(number: int, rank: int) -> np.ndarray:
    return slot_of(1000 * rank + number, LAYOUT, rank)


@contextmanager
def open_world(root: Path, **values: object) -> Iterator[World]:
    """A world whose disk is open."""
    world = World(root, **values)  # type: ignore[arg-type]
    world.disk.open(CALL_S)
    try:
        yield world
    finally:
        world.close()
