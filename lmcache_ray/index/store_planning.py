"""What a store would do, computed before anything is changed: which keys get a slot, and who has to go for them.

Apart from the index, which carries the draft out in one go, so that a request is reserved as a whole or not at all.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from lmcache_ray.index.plans import Deferred
from lmcache_ray.index.slot_table import SlotState, SlotTable


@dataclass(frozen=True, slots=True)
class StoreDraft:
    """A store that has not happened. It holds until the table or the leases change, but for uses of its own keys.

    `present` are the slots, in key order, of keys that are in the map already. `joined` maps those among them that the
    rank is to help writing to their position in the keys; `new` maps keys that get a slot to theirs. `victims` are the
    slots to evict for them. With `has_hole`, a present key comes after a missing one.
    """

    present: list[int]
    joined: dict[int, int]
    new: dict[bytes, int]
    victims: list[int]
    num_ready: int
    num_refused: int
    has_hole: bool


class SlotsHeldBack(Protocol):
    """Slots whose chunks must not be evicted yet."""

    def __contains__(self, slot: object) -> bool:
        """Whether this one is."""
        ...

    def __len__(self) -> int:
        """So many are, at least."""
        ...


@dataclass(frozen=True, slots=True)
class TiersBelow:
    """What a store must know of the tiers below: views that follow every change there.

    Chunks in the slots of `held_back` have to be copied below before they may be evicted. A key that `holds` says is
    cached there need not be stored again.
    """

    held_back: SlotsHeldBack
    holds: Callable[[bytes], bool]


class StorePlanner:
    """Drafts stores over a table. It only reads.

    `pinned` is a view of the slots that leases hold; `can_join(slot, rank_bit)` whether that rank has a part in
    writing it that has not been handed out.
    """

    def __init__(
        self,
        table: SlotTable,
        *,
        pinned: Container[int],
        below: TiersBelow | None,
        can_join: Callable[[int, int], bool],
    ) -> None:
        self._table: Final = table
        self._pinned: Final = pinned
        self._held_back: Final[SlotsHeldBack] = () if below is None else below.held_back
        self._is_below: Final = None if below is None else below.holds
        self._can_join: Final = can_join

    def draft(
        self, keys: Sequence[bytes], *, start: int, joiner: int, defer: bool, whole: bool, copy_up: bool
    ) -> StoreDraft | Deferred:
        """Draft the store of ``keys[start:]``; nothing is stored if a key before `start` is unknown.

        `joiner` is the bit of the rank that stores alone and may join others, or 0. With `defer`, Deferred if the draft
        might be another once all unfinished work has been done; with `whole`, if not all of it fits. `copy_up`: what a
        tier below has is missing too.
        """
        num_ready, present, missing, joined, has_hole = self._scan(keys, start, joiner)
        if missing and self._is_below is not None and not copy_up:
            missing = {key: position for key, position in missing.items() if not self._is_below(key)}
        if missing and next(iter(missing.values())) < start:
            return StoreDraft(present, {}, {}, [], num_ready, 0, has_hole)
        num_free = len(self._table.free_slots)
        if len(missing) <= num_free:
            return StoreDraft(present, joined, missing, [], num_ready, 0, has_hole)
        if whole and len(missing) > self._table.capacity - len(self._held_back):
            return Deferred.NOT_WHOLE  # known without a look at every slot that is held back
        victims = self._find_victims(len(missing) - num_free, set(present), defer)
        if isinstance(victims, Deferred):
            return victims
        room = num_free + len(victims)
        if room == len(missing):
            return StoreDraft(present, joined, missing, victims, num_ready, 0, has_hole)
        if whole:
            return Deferred.NOT_WHOLE
        if defer and SlotState.QUARANTINED in self._table.states:
            return Deferred.ROOM_IN_USE
        first_refused = next(islice(missing.values(), room, None))
        joined = {slot: position for slot, position in joined.items() if position < first_refused}
        fitting = dict(islice(missing.items(), room))
        return StoreDraft(present, joined, fitting, victims, num_ready, len(keys) - first_refused, has_hole)

    def _scan(
        self, keys: Sequence[bytes], start: int, joiner: int
    ) -> tuple[int, list[int], dict[bytes, int], dict[int, int], bool]:
        """Which keys are there and which are missing; dicts, in key order, so that a repeated key counts once."""
        present = self._table.ready_run(keys)
        num_ready = len(present)
        missing: dict[bytes, int] = {}
        joined: dict[int, int] = {}
        has_hole = False
        find = self._table.slot_of.get
        for position, key in enumerate(islice(keys, num_ready, None), num_ready):
            slot = find(key)
            if slot is None:
                missing.setdefault(key, position)
                continue
            present.append(slot)
            has_hole = has_hole or bool(missing)
            if joiner and position >= start and self._can_join(slot, joiner):
                joined.setdefault(slot, position)
        return num_ready, present, missing, joined, has_hole

    def _find_victims(self, num_wanted: int, own: set[int], defer: bool) -> list[int] | Deferred:
        """Up to `num_wanted` READY, unleased slots that are not the request's own, in the policy's order.

        With `defer`, Deferred at the first other slot on the way that will be evictable once its reader or writer is
        done: then it would be the next victim. Own slots are no victims now or later.
        """
        states, pinned, held_back, ready = self._table.states, self._pinned, self._held_back, SlotState.READY.value
        victims: list[int] = []
        for slot in self._table.policy.candidates():
            if len(victims) == num_wanted:
                break
            if slot in own:
                continue
            if states[slot] == ready and slot not in pinned and slot not in held_back:
                victims.append(slot)
            elif defer:
                return Deferred.ROOM_IN_USE
        return victims
