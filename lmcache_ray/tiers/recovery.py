"""What recovery of the index means for the tiers: what waits to go down, and what the disk's index keeps. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_ray.index.arena_report import ArenaReport
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.recovery import Rejoined, rejoin
from lmcache_ray.index.slot_table import SlotState
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import TieredIndex


@dataclass(frozen=True, slots=True)
class DiskRejoined:
    """`lost` chunks are not in the disk's index any more; `useless` ones have files on the returned rank alone."""

    lost: tuple[ChunkRef, ...]
    useless: tuple[ChunkRef, ...]


def rejoin_memory(index: TieredIndex, rank: int, report: ArenaReport) -> Rejoined:
    """As `index.recovery.rejoin`; what memory has lost waits for no tier any more."""
    rejoined = rejoin(index.memory, rank, report)
    for backlog in index.backlogs.values():
        backlog.done(rejoined.lost)
        backlog.take_missed(rejoined.lost)
    index.trim()
    return rejoined


def rejoin_disk(index: TieredIndex, entries: Sequence[tuple[bytes, int]]) -> DiskRejoined:
    """A rank is back whose disk has `entries` (key, generation): what it lacks is on no disk any more.

    Chunks that are still in memory go down again when they are used.
    """
    disk = index.disk
    if disk is None:
        return DiskRejoined((), ())
    there = set(entries)
    refs = [ref for ref, state in disk.entries() if state is SlotState.READY]
    lost = disk.evict([ref for ref in refs if (ref.key, ref.generation) not in there], even_leased=True)
    in_memory = [index.memory.table.ready_ref(ref.key) for ref in lost]
    index.backlogs[Tier.DISK].miss(ref for ref in in_memory if ref is not None)
    known = {(ref.key, ref.generation) for ref, _ in disk.entries()}
    return DiskRejoined(tuple(lost), tuple(ChunkRef(key, 0, generation) for key, generation in there - known))


def send_down(index: TieredIndex) -> None:
    """What is in memory and not on the disk, whatever kept it from there, waits for the disk."""
    if Tier.DISK in index.backlogs and Tier.DISK not in index.suspended:
        backlog = index.backlogs[Tier.DISK]
        idle = [ref for ref in not_on_disk(index) if ref.slot not in backlog]
        backlog.take_missed(idle)
        backlog.add(idle)


def not_on_disk(index: TieredIndex) -> list[ChunkRef]:
    """READY chunks of memory that the disk has not, the most recently used first."""
    return [ref for ref in _ready(index) if not index.is_on_disk(ref.key)]


def miss_remote(index: TieredIndex) -> None:
    """After a restart: the remote store gets what is in memory when it is used, if it has not got it."""
    if Tier.REMOTE in index.backlogs:
        backlog = index.backlogs[Tier.REMOTE]
        backlog.miss(ref for ref in _ready(index) if ref.slot not in backlog)  # others were stored since, and wait


def _ready(index: TieredIndex) -> list[ChunkRef]:
    table = index.memory.table
    latest_first = reversed(list(table.policy.candidates()))
    return list(table.refs([slot for slot in latest_first if table.states[slot] == SlotState.READY]))
