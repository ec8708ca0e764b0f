"""The linked list under the policies: where it cuts, what moves together, and that both directions always agree."""

import random
from collections.abc import Iterable

import pytest

from lmcache_ray.index.slot_order import END, SlotOrder


def order_of(slots: Iterable[int]) -> SlotOrder:
    order = SlotOrder()
    order.insert(list(slots), after=END)
    return order


def backwards(order: SlotOrder) -> list[int]:
    """Last to first, by the other column."""
    slots, slot = [], order.preceding[END]
    while slot != END:
        slots.append(slot)
        slot = order.preceding[slot]
    return slots


def test_slots_are_inserted_behind_any_other_or_before_all() -> None:
    order = order_of([5, 1])
    order.insert([9, 3], after=5)
    order.insert([0], after=1)
    order.insert([7], after=END)
    order.insert([], after=END)
    assert list(order) == [7, 5, 9, 3, 1, 0] == backwards(order)[::-1]


def test_the_columns_grow_with_the_highest_slot_only() -> None:
    order = order_of([2, 9])
    assert order.capacity == 10
    order.insert([4], after=2)
    assert (order.capacity, list(order)) == (10, [2, 4, 9])


def test_stretches_are_cut_where_the_order_has_another_neighbour() -> None:
    order = order_of([4, 5, 6, 7, 8])
    assert list(order.stretches([7, 8, 4, 5, 8, 6])) == [[7, 8], [4, 5], [8], [6]]
    assert list(order.stretches([4, 4, 5])) == [[4], [4, 5]]
    assert list(order.stretches([])) == []


def test_a_cut_sees_what_was_moved_before_it() -> None:
    order = order_of([1, 2, 3])
    found = []
    for stretch in order.stretches([1, 1, 2, 3]):
        found.append(stretch)
        if stretch[-1] != order.preceding[END]:
            order.move(stretch, after=order.preceding[END])
    assert (found, list(order)) == ([[1], [1], [2, 3]], [1, 2, 3])


@pytest.mark.parametrize("absent", [2, 99])
def test_a_slot_that_is_not_in_the_order_has_no_stretch(absent: int) -> None:
    order = order_of([1, 2, 3])
    order.remove([2])
    with pytest.raises(KeyError, match=str(absent)):
        list(order.stretches([1, absent]))


def test_a_stretch_moves_as_a_whole_also_to_where_it_is() -> None:
    order = order_of([1, 2, 3, 4, 5])
    order.move([2, 3], after=5)
    assert list(order) == [1, 4, 5, 2, 3]
    order.move([5, 2, 3], after=END)
    assert list(order) == [5, 2, 3, 1, 4]
    order.move([2, 3], after=5)
    assert list(order) == [5, 2, 3, 1, 4] == backwards(order)[::-1]


@pytest.mark.parametrize("seed", range(3))
def test_random_moves_agree_with_a_list(seed: int) -> None:
    rng = random.Random(seed)
    order, model = SlotOrder(), list[int]()
    for _ in range(500):
        if rng.random() < 0.4:
            absent = sorted(set(range(30)) - {*model})
            slots = rng.sample(absent, min(len(absent), rng.randint(0, 6)))
            at = rng.randint(0, len(model))
            order.insert(slots, after=model[at - 1] if at else END)
            model[at:at] = slots
        elif model:
            begin = rng.randrange(len(model))
            stretch = model[begin : begin + rng.randint(1, 6)]
            del model[begin : begin + len(stretch)]
            if rng.random() < 0.5:
                order.remove(stretch)
            else:
                at = rng.randint(0, len(model))
                order.move(stretch, after=model[at - 1] if at else END)
                model[at:at] = stretch
        assert list(order) == model == backwards(order)[::-1]
        assert [slot for stretch in order.stretches(model) for slot in stretch] == model
