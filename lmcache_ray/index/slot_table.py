"""Where every chunk is: the state, key and generation of each slot, the map from keys to slots, and the free slots.

::

            reserve              mark_ready
    FREE ───────────► WRITING ─────────────► READY
     ▲ ▲                 │                    │ │
     │ │ free            │ withdraw           │ │ reserve (as a victim)
     │ └── QUARANTINED ◄─┴────────────────────┘ │
     └──────────────────────────────────────────┘

WRITING and READY chunks are in the key map and in the eviction policy's order; these three always change together,
which is why they live in one place. The table knows no ranks, leases or plans: whether a step may be taken is decided
by its callers, the only others who touch it.

State stands in parallel columns rather than in one object per slot: a million slots are common, and READY ones must
cost little. No column is one that the garbage collector walks through, or each of its full rounds would stop the index
for some 30 ms per million slots. The columns are open for reading to this package's hot loops; only the methods here
write them.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from itertools import groupby
from typing import Final

import numpy as np

from lmcache_ray.errors import ConfigError, ProtocolError
from lmcache_ray.index.plans import ChunkRef, make_refs
from lmcache_ray.index.policy import EvictionPolicy

COUNTER_BITS: Final = 40
"""A number that is never issued twice is ``epoch << COUNTER_BITS | counter``."""

EPOCH_BITS: Final = 22
"""So that a generation has 62 bits and fits a slot word beside two bits of state."""

MAX_SLOTS: Final = (1 << 31) - 1
"""Columns of slot numbers, here and in the policies, have 32 bits a cell."""


class SlotState(IntEnum):
    """What one slot is used for."""

    FREE = 0
    WRITING = 1
    """Reserved for a key; not every rank that must hold it has committed it. Not a hit, not evictable."""
    READY = 2
    """Committed by every holder."""
    QUARANTINED = 3
    """Its chunk is gone, but some rank may still write it or has still to forget it."""


class SlotTable:
    """Slots ``0 .. capacity - 1``, all FREE at first. `epoch` must be above that of every table before this one."""

    def __init__(self, capacity: int, policy: EvictionPolicy, *, epoch: int, tells_ready: bool = False) -> None:
        if not 1 <= capacity <= MAX_SLOTS:
            raise ConfigError(f"an index has from 1 to {MAX_SLOTS} slots, not num_slots={capacity}")
        if not 0 <= epoch < 1 << EPOCH_BITS:
            raise ConfigError(f"epoch must be in 0 .. {(1 << EPOCH_BITS) - 1}, not {epoch}")
        self.capacity: Final = capacity
        self.policy: Final = policy
        self.states: Final = bytearray(capacity)
        self.key_of: Final = np.full(capacity, None, dtype=np.object_)  # of a FREE slot: None
        self.generation_of: Final = array("q", bytes(8 * capacity))
        self.slot_of: Final[dict[bytes, int]] = {}
        self.free_slots: Final = array("i", range(capacity - 1, -1, -1))  # taken from the end: low numbers first
        self.next_generation = (epoch << COUNTER_BITS) + 1
        self._end_of_generations = (epoch + 1) << COUNTER_BITS
        self._newly_ready: list[int] | None = [] if tells_ready else None

    def ready_run(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of the leading READY keys."""
        find, states, ready = self.slot_of.get, self.states, SlotState.READY.value
        run: list[int] = []
        append = run.append
        for key in keys:
            slot = find(key)
            if slot is None or states[slot] != ready:
                break
            append(slot)
        return run

    def ready_among(self, keys: Iterable[bytes]) -> list[int]:
        """Slots of those of `keys` that are READY, each once, in key order."""
        states, ready = self.states, SlotState.READY.value
        found = dict.fromkeys(slot for key in keys if (slot := self.slot_of.get(key)) is not None)
        return [slot for slot in found if states[slot] == ready]

    def ready_ref(self, key: bytes) -> ChunkRef | None:
        """Where `key` lies, if it is READY."""
        slot = self.slot_of.get(key)
        if slot is None or self.states[slot] != SlotState.READY:
            return None
        return ChunkRef(key, slot, self.generation_of[slot])

    def is_ready(self, ref: ChunkRef) -> bool:
        """True while this very use of the slot is READY."""
        return self.is_current(ref.slot, ref.generation) and self.states[ref.slot] == SlotState.READY

    def is_writing(self, key: bytes) -> bool:
        """True while an unfinished plan writes `key`."""
        slot = self.slot_of.get(key)
        return slot is not None and self.states[slot] == SlotState.WRITING

    def is_run_being_written(self, keys: Sequence[bytes]) -> bool:
        """True if the leading READY run is stopped by a key that an unfinished plan writes."""
        num_ready = len(self.ready_run(keys))
        return num_ready < len(keys) and keys[num_ready] in self.slot_of

    def refs(self, slots: Sequence[int]) -> tuple[ChunkRef, ...]:
        """The present use of slots, none of which is FREE."""
        return self.refs_of(map(self.key_of.__getitem__, slots), slots)

    def refs_of(self, keys: Iterable[bytes], slots: Sequence[int]) -> tuple[ChunkRef, ...]:
        """`refs` for whom has the keys of these slots already."""
        return make_refs(keys, slots, map(self.generation_of.__getitem__, slots))

    def is_current(self, slot: int, generation: int) -> bool:
        """True if the slot is still, or was last, used under this generation; ProtocolError for an impossible slot."""
        if not 0 <= slot < self.capacity:
            raise ProtocolError(f"slot {slot} does not exist; there are {self.capacity}")
        return self.generation_of[slot] == generation

    def reserve(
        self, keys: Collection[bytes], victims: Sequence[int]
    ) -> tuple[tuple[ChunkRef, ...], tuple[ChunkRef, ...]]:
        """Give each of `keys` a slot, first those of the READY `victims`: the new refs, now WRITING, and the evicted.

        `keys` are distinct, unknown, no fewer than the victims and no more than victims and free slots together. Their
        place in the policy's order is given by `note_use`, which must follow.
        """
        num_new = len(keys)
        if self.next_generation + num_new > self._end_of_generations:
            raise ProtocolError("every generation of this epoch has been issued; restart the coordinator")
        evicted = self._evict(victims)
        slots = [*victims, *self._take_free(num_new - len(victims))]
        generations = range(self.next_generation, self.next_generation + num_new)
        self.next_generation += num_new
        key_of, generation_of, states, writing = self.key_of, self.generation_of, self.states, SlotState.WRITING.value
        self.slot_of.update(zip(keys, slots, strict=True))
        for key, slot, generation in zip(keys, slots, generations, strict=True):
            key_of[slot] = key
            generation_of[slot] = generation
            states[slot] = writing
        return make_refs(keys, slots, generations), evicted

    def _evict(self, victims: Sequence[int]) -> tuple[ChunkRef, ...]:
        """Forget READY chunks whose slots are used again at once, so that their cells need no change.

        Nobody need be asked: whoever still reads such a slot notices its next generation.
        """
        evicted = self.refs(victims)
        slot_of = self.slot_of
        for key, _, _ in evicted:
            del slot_of[key]
        self.policy.remove(victims)
        return evicted

    def _take_free(self, number: int) -> list[int]:
        first_taken = len(self.free_slots) - number
        taken = self.free_slots[first_taken:].tolist()
        del self.free_slots[first_taken:]
        taken.reverse()
        return taken

    def note_use(self, present: Sequence[int], new: Sequence[int], keys_with_hole: Sequence[bytes] = ()) -> None:
        """Tell the policy of one request's use, tail first: `present` slots were there before, `new` ones were not.

        Both are in key order, and all of `present` precede all of `new` unless the request's keys are given.
        """
        policy = self.policy
        if not keys_with_hole:
            policy.admit(reversed(new))
            policy.touch(reversed(present))
            return
        newcomers = frozenset(new)
        used = dict.fromkeys(slot for key in reversed(keys_with_hole) if (slot := self.slot_of.get(key)) is not None)
        for is_new, slots in groupby(used, newcomers.__contains__):
            (policy.admit if is_new else policy.touch)(slots)

    def adopt(self, chunks: Sequence[tuple[bytes, int]]) -> list[int]:
        """See `CacheIndex.adopt`."""
        first = self._end_of_generations - (1 << COUNTER_BITS)
        latest = max((generation for _, generation in chunks), default=0)
        if latest >= first:
            raise ProtocolError(f"generation {latest} is of no earlier life; this one's are {first} and above")
        newest = {key: position for position, (key, _) in enumerate(chunks) if key not in self.slot_of}
        kept = sorted(newest.values())[-len(self.free_slots) :] if self.free_slots else []
        for (key, generation), slot in zip([chunks[at] for at in kept], self._take_free(len(kept)), strict=True):
            self.slot_of[key] = slot
            self.key_of[slot] = key
            self.generation_of[slot] = generation
            self.states[slot] = SlotState.READY
            self.policy.admit((slot,))
        return sorted(set(range(len(chunks))) - set(kept))

    def restore(self, ready: Sequence[ChunkRef], quarantined: Sequence[ChunkRef]) -> None:
        """Take in slots as an earlier life has left them, the least recently used first. The table must be new."""
        for refs, state in ((ready, SlotState.READY), (quarantined, SlotState.QUARANTINED)):
            for key, slot, generation in refs:
                self.key_of[slot] = key
                self.generation_of[slot] = generation
                self.states[slot] = state
        self.slot_of.update((key, slot) for key, slot, _ in ready)
        for ref in ready:
            self.policy.admit((ref.slot,))
        self.free_slots[:] = array("i", reversed(self.slots_in(SlotState.FREE)))

    def rename(self, slot: int, key: bytes) -> None:
        """A READY slot goes on under another key, which is unknown so far."""
        del self.slot_of[self.key_of[slot]]
        self.slot_of[key] = slot
        self.key_of[slot] = key

    def evict(self, slots: Sequence[int]) -> None:
        """READY to FREE at once: nobody need be asked, as `_evict` says."""
        self._evict(slots)
        for slot in slots:
            self.free(slot)

    def mark_ready(self, slot: int) -> None:
        """WRITING to READY."""
        self.states[slot] = SlotState.READY
        if self._newly_ready is not None:
            self._newly_ready.append(slot)

    def take_newly_ready(self) -> list[ChunkRef]:
        """The chunks that have become READY since this was last asked, oldest first, as far as they are still there.

        Nothing unless the table was made to tell.
        """
        slots = [slot for slot in self._newly_ready or () if self.states[slot] == SlotState.READY]
        if self._newly_ready is not None:
            self._newly_ready.clear()
        return list(self.refs(slots))

    def withdraw(self, slot: int) -> None:
        """WRITING or READY to QUARANTINED: its key is unknown from now on."""
        del self.slot_of[self.key_of[slot]]
        self.policy.remove((slot,))
        self.states[slot] = SlotState.QUARANTINED

    def free(self, slot: int) -> None:
        """QUARANTINED to FREE."""
        self.key_of[slot] = None
        self.states[slot] = SlotState.FREE
        self.free_slots.append(slot)

    def slots_in(self, state: SlotState) -> list[int]:
        """All slots in one state, ascending."""
        slots: list[int] = []
        slot = self.states.find(state)
        while slot >= 0:
            slots.append(slot)
            slot = self.states.find(state, slot + 1)
        return slots
