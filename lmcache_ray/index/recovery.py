"""Bringing the index and the arenas together again after one of them has died. Pure.

Two things can have died. The *coordinator*, and with it the index: `rebuild` finds in the ranks' reports what all of
them hold alike, and `restore` makes an index of it. Or a *rank*: `rejoin` compares what its arena still holds with what
the index, which lived on, has promised. Either way the ranks then free what nobody wants (`useless`), before anything
is planned again; so an arena never holds a chunk that the index does not know, and what was cleared cannot come back.

Generations settle every doubt: a chunk counts only if key, slot and generation agree, on every holder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from lmcache_ray.index.arena_report import ArenaReport, ViewedSlots
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.slot_table import SlotState
from lmcache_ray.keys import KEY_NBYTES

UNKNOWN_KEY: Final = bytes(KEY_NBYTES)
"""Stands for the key of a chunk that somebody may be writing, of which only slot and generation are known."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What the ranks hold alike. `kept` chunks come the oldest first.

    `unfinished` slots (with `UNKNOWN_KEY`) are not to be used until the ranks named have settled them. `useless` chunks
    are to be freed, by rank. `orphans` are not on every holder, but shown by somebody's view: kept, where nobody can
    find them.
    """

    kept: tuple[ChunkRef, ...]
    orphans: tuple[ChunkRef, ...]
    unfinished: Mapping[ChunkRef, tuple[int, ...]]
    useless: Mapping[int, tuple[ChunkRef, ...]]
    viewed: tuple[ViewedSlots, ...]


@dataclass(frozen=True, slots=True)
class Rejoined:
    """`lost` chunks are not in the index any more; `useless` ones are to be freed on the rank that has returned."""

    lost: tuple[ChunkRef, ...]
    useless: tuple[ChunkRef, ...]


def rebuild(reports: Mapping[int, ArenaReport], *, is_cleared: Callable[[ChunkRef], bool]) -> Rebuilt:
    """Compare the reports of all holders. `is_cleared` names chunks that were cleared while some holder was away."""
    unfinished = _unfinished(reports)
    blocked = {ref.slot for ref in unfinished}
    everywhere = set.intersection(*(set(report.committed) for report in reports.values()))
    whole = sorted(
        (ref for ref in everywhere if ref.slot not in blocked and not is_cleared(ref)), key=lambda ref: ref.generation
    )
    newest = {ref.key: ref for ref in whole}
    kept = tuple(ref for ref in whole if newest[ref.key] is ref)
    viewed = tuple(view for report in reports.values() for view in report.viewed)
    orphans = _orphans(viewed, blocked | {ref.slot for ref in kept})
    wanted, shown = set(kept), {(ref.slot, ref.generation) for ref in orphans}
    useless = {
        rank: tuple(
            ref for ref in report.committed if ref not in wanted and (ref.slot, ref.generation) not in shown
        )
        for rank, report in reports.items()
    }
    return Rebuilt(kept, orphans, unfinished, useless, viewed)


def leave_out(rebuilt: Rebuilt, is_cleared: Callable[[ChunkRef], bool]) -> Rebuilt:
    """The same without what was cleared since it was compared; what a view shows of it stays, found by nobody."""
    kept = tuple(ref for ref in rebuilt.kept if not is_cleared(ref))
    taken = {ref.slot for ref in (*rebuilt.unfinished, *kept)}
    return replace(rebuilt, kept=kept, orphans=_orphans(rebuilt.viewed, taken))


def restore(index: CacheIndex, rebuilt: Rebuilt, *, now: float) -> None:
    """Take `rebuilt` into an index that is new, and has a later epoch. Views hold their slots again."""
    index.table.restore(sorted((*rebuilt.kept, *rebuilt.orphans), key=_generation), list(rebuilt.unfinished))
    for ref, ranks in rebuilt.unfinished.items():
        index.ledger.owing[ref.slot] = sum(index.ledger.bit_of[rank] for rank in ranks)
    hold_views(index, rebuilt.viewed, now=now)


def hold_views(index: CacheIndex, viewed: Sequence[ViewedSlots], *, now: float) -> None:
    """Let each of these leases of views hold exactly the slots that its client still shows; none ends it."""
    shown: dict[tuple[str, str], list[int]] = {}
    for view in viewed:  # several ranks may report one client
        slots = shown.setdefault((view.lease_id, view.client_id), [])
        slots += [slot for slot, generation in view.slots if _is_ready(index, slot, generation)]
    for (lease_id, client_id), held in shown.items():
        index.leases.hold(lease_id, client_id, dict.fromkeys(held), now)
        index.leases.keep(lease_id, max_slots=index.table.capacity)


def rejoin(index: CacheIndex, rank: int, report: ArenaReport) -> Rejoined:
    """A holder is back with what `report` says. Its promises that came true count, those that did not are broken.

    After the rank has freed what is useless, `settle_returned` ends what it owed.
    """
    held = {ref.slot: ref for ref in report.committed}
    table = index.table
    lost = tuple(ref for ref in table.refs(table.slots_in(SlotState.READY)) if held.get(ref.slot) != ref)
    _lose(index, lost)
    bit = index.ledger.bit_of[rank]
    for plan in list(index.ledger.stores.values()):
        if plan.ranks & bit:
            done = [position for position, ref in enumerate(plan.refs) if held.get(ref.slot) == ref]
            index.complete_store(plan.plan_id, (rank,), done=done)
    useless = tuple(ref for ref in report.committed if not _is_wanted(index, ref))
    return Rejoined(lost, useless)


def settle_returned(index: CacheIndex, rank: int, unfinished: Sequence[tuple[int, int]]) -> None:
    """Whatever the rank owes, it owes no more, but for slots where somebody else may still be writing."""
    bit, open_slots = index.ledger.bit_of[rank], {slot for slot, _ in unfinished}
    owed = [slot for slot, ranks in index.ledger.owing.items() if ranks & bit and slot not in open_slots]
    index.settle(rank, index.table.refs(owed))


def _unfinished(reports: Mapping[int, ArenaReport]) -> dict[ChunkRef, tuple[int, ...]]:
    latest: dict[int, int] = {}
    ranks: dict[int, list[int]] = {}
    for rank, report in reports.items():
        for slot, generation in report.unfinished:
            latest[slot] = max(generation, latest.get(slot, 0))
            if rank not in ranks.setdefault(slot, []):
                ranks[slot].append(rank)
    return {ChunkRef(UNKNOWN_KEY, slot, generation): tuple(ranks[slot]) for slot, generation in latest.items()}


def _orphans(viewed: Sequence[ViewedSlots], taken: set[int]) -> tuple[ChunkRef, ...]:
    shown = {slot: generation for view in viewed for slot, generation in view.slots if slot not in taken}
    return tuple(ChunkRef(_orphan_key(slot, generation), slot, generation) for slot, generation in shown.items())


def _lose(index: CacheIndex, lost: Sequence[ChunkRef]) -> None:
    """Forget chunks that not every holder has any more; what a view shows stays where it is, found by nobody."""
    shown = index.leases.shown_slots()
    for ref in lost:
        if ref.slot in shown:
            index.table.rename(ref.slot, _orphan_key(ref.slot, ref.generation))
    index.evict([ref for ref in lost if ref.slot not in shown], even_leased=True)


def _orphan_key(slot: int, generation: int) -> bytes:
    return sha256(f"shown by a view: slot {slot}, generation {generation}".encode()).digest()


def _is_ready(index: CacheIndex, slot: int, generation: int) -> bool:
    return index.table.is_current(slot, generation) and index.table.states[slot] == SlotState.READY


def _is_wanted(index: CacheIndex, ref: ChunkRef) -> bool:
    """Whether the index has it, or waits for other ranks to have it too."""
    table = index.table
    return table.is_current(ref.slot, ref.generation) and table.slot_of.get(ref.key) == ref.slot


def _generation(ref: ChunkRef) -> int:
    return ref.generation
