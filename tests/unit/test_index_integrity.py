"""The self-check finds every way in which the parts of an index can contradict each other."""

from collections.abc import Callable

import pytest

from lmcache_ray.errors import IntegrityError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.slot_table import SlotState
from tests.unit.index_builders import keys_of, make_index, store


@pytest.fixture
def index() -> CacheIndex:
    """READY a (leased) and b in slots 0 and 1, WRITING c in 2, QUARANTINED d in 3, 4 and 5 FREE."""
    index = make_index(6)
    store(index, "ab")
    index.pin(keys_of("a"), "lease", "reader", now=0.0)
    plan = index.prepare_store(keys_of("cd"), client="writer", now=0.0)
    index.complete_store(plan.plan_id, [0], done=[0], failed=[1])
    index.check_integrity()
    return index


def set_state(slot: int, state: SlotState) -> Callable[[CacheIndex], object]:
    return lambda index: index.table.states.__setitem__(slot, state)


DAMAGE: dict[str, tuple[Callable[[CacheIndex], object], str]] = {
    "ready called free": (set_state(1, SlotState.FREE), "slot 1 is FREE but not listed"),
    "free called ready": (set_state(4, SlotState.READY), "slot 4 is READY but its key is None"),
    "writing called ready": (set_state(2, SlotState.READY), "slot 2 is READY with answers owed"),
    "ready called writing": (set_state(1, SlotState.WRITING), "slot 1 is WRITING with answers owed by 0"),
    "leased chunk withdrawn": (lambda index: index.table.withdraw(0), "slot 0 is leased but QUARANTINED"),
    "quarantined slot freed": (lambda index: index.table.free(3), "slot 3 is FREE with answers owed by 10"),
    "free slot listed twice": (lambda index: index.table.free_slots.append(4), "slot 4 is 2 times in the free list"),
    "free slot lost": (lambda index: index.table.free_slots.pop(), "is FREE but not listed"),
    "key map lost a key": (lambda index: index.table.slot_of.pop(b"b"), "slot 1 is READY but its key is mapped to N"),
    "two keys one slot": (lambda index: index.table.slot_of.__setitem__(b"z", 1), "key 7a is mapped to slot 1"),
    "policy lost a slot": (lambda index: index.table.policy.remove([1]), "slot 1 is in the map but not in the evict"),
    "policy has a free slot": (lambda index: index.table.policy.admit([4]), "slot 4 is in the eviction order but not"),
    "generation used twice": (
        lambda index: index.table.generation_of.__setitem__(1, index.table.generation_of[0]),
        "has 2 slots",
    ),
    "generation not issued": (
        lambda index: index.table.generation_of.__setitem__(1, 1 << 60),
        f"generation {1 << 60} is not issued",
    ),
    "pin without lease": (lambda index: index.leases._pins.__setitem__(1, 1), "slot 1 has 1 pins but 0 leases"),
    "lease without pin": (lambda index: index.leases._pins.pop(0), "slot 0 has 0 pins but 1 leases"),
    "answer forgotten": (lambda index: index.ledger.owing.__setitem__(2, 0), "counts 2 unanswered and 1 undecided"),
    "plan forgotten": (lambda index: index.ledger.stores.clear(), "which is closed"),
    "clear forgotten by its slots": (
        lambda index: index.ledger.clears[index.prepare_clear(keys_of("b")).plan_id].__setattr__("owing", 1),
        "awaits 1, its slots 11",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(index: CacheIndex, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(index)
    with pytest.raises(IntegrityError) as caught:
        index.check_integrity()
    assert message in str(caught.value)


def test_all_contradictions_are_listed(index: CacheIndex) -> None:
    index.table.free_slots.append(4)
    index.table.policy.remove([1])
    with pytest.raises(IntegrityError, match=r"free list.*eviction order"):
        index.check_integrity()


def test_counts_say_how_many_slots_are_in_each_state(index: CacheIndex) -> None:
    counts = index.counts()
    assert (counts.ready, counts.writing, counts.quarantined, counts.free, counts.capacity) == (2, 1, 1, 2, 6)
    assert (counts.leases, counts.plans) == (1, 1)
