"""Copying chunks down behind the stores: which to write next, what has to go for them, what came of it. Pure.

Each tier below takes its chunks from its own backlog, group by group. The disk's index gives every chunk a generation,
which names its files, and says what to delete first; a remote store is asked by its writer what it has already.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmcache_ray.index.plans import ChunkRef, StorePlan
from lmcache_ray.tiers.promotion import TIERS_CLIENT
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import TieredIndex


@dataclass(frozen=True, slots=True)
class DiskWrites:
    """Chunks to copy from memory's `sources` to files named by `targets`, after the files of `evicted` are gone."""

    sources: tuple[ChunkRef, ...]
    targets: tuple[ChunkRef, ...]
    evicted: tuple[ChunkRef, ...]
    plans: tuple[StorePlan, ...]


def next_disk_writes(index: TieredIndex, *, most: int, now: float) -> DiskWrites | None:
    """The groups that have waited longest, until they are `most` chunks; None if nothing waits that can be written.

    What finds no room on the disk, since all that is there is being read, is let go.
    """
    backlog, disk = index.backlogs[Tier.DISK], index.disk
    if disk is None:
        backlog.drop_all()
        return None
    sources: list[ChunkRef] = []
    plans: list[StorePlan] = []
    while len(sources) < most and (group := backlog.take()):
        in_memory = {ref.key: ref for ref in group if index.memory.table.is_ready(ref)}
        plan = disk.prepare_store(list(in_memory), client=TIERS_CLIENT, now=now)
        chosen = [in_memory[ref.key] for ref in plan.refs]
        wanted = set(in_memory.values())
        backlog.done(wanted.symmetric_difference(group))
        not_chosen = wanted.difference(chosen)
        backlog.done(not_chosen)
        backlog.miss(ref for ref in not_chosen if not index.is_on_disk(ref.key))
        backlog.num_dropped += plan.num_refused
        if chosen:
            sources += chosen
            plans.append(plan)
    index.trim()
    if not plans:
        return None
    targets = tuple(ref for plan in plans for ref in plan.refs)
    evicted = tuple(ref for plan in plans for ref in plan.evicted)
    return DiskWrites(tuple(sources), targets, evicted, tuple(plans))


def complete_disk_writes(
    index: TieredIndex, writes: DiskWrites, flags: Mapping[int, Sequence[bool]]
) -> tuple[ChunkRef, ...]:
    """Take in, per rank, which of ``writes.targets`` are in its files; answers those whose files must go again.

    What a rank has not answered has failed there: whatever it still does is deleted, and its file's generation is never
    given out again.
    """
    disk = index.disk
    assert disk is not None  # it planned these
    begin = 0
    for plan in writes.plans:
        end = begin + len(plan.refs)
        for rank in disk.holders:
            done = [at for at, flag in enumerate(flags.get(rank, ())[begin:end]) if flag]
            failed = set(range(end - begin)).difference(done)
            disk.complete_store(plan.plan_id, [rank], done=done, failed=failed)
        begin = end
    index.backlogs[Tier.DISK].done(writes.sources)
    source_of = dict(zip(writes.targets, writes.sources, strict=True))
    unwritten = {target: source for target, source in source_of.items() if not disk.table.is_ready(target)}
    index.backlogs[Tier.DISK].miss(unwritten.values())
    index.trim()
    return tuple(unwritten)


def next_remote_writes(index: TieredIndex, *, most: int) -> tuple[ChunkRef, ...]:
    """The chunks that have waited longest for the remote store, about `most` of them; they stay in memory meanwhile."""
    backlog = index.backlogs[Tier.REMOTE]
    refs: dict[ChunkRef, None] = {}  # one that was missed and used again may wait twice
    while len(refs) < most and (group := backlog.take()):
        ready = [ref for ref in group if index.memory.table.is_ready(ref)]
        backlog.done(set(group).difference(ready))
        refs.update(dict.fromkeys(ready))
    return tuple(refs)


def complete_remote_writes(
    index: TieredIndex, refs: Sequence[ChunkRef], *, missed: Iterable[ChunkRef] = ()
) -> None:
    """These are in the remote store, but for those that it has `missed`."""
    index.backlogs[Tier.REMOTE].done(refs)
    index.backlogs[Tier.REMOTE].miss(missed)
    index.trim()
