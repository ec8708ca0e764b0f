"""Least frequently used goes first; among equals, the least recently used.

All slots stand in one order, those of equal use counts together, and of each count it is known which slot is the last.
So a use moves a slot behind the last one of the next count, which takes the same time however many slots or counts
there are.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat

from lmcache_ray.index.slot_order import END, SlotOrder


class LFUPolicy:
    """An `EvictionPolicy`: the slot with the fewest uses since it was admitted goes first."""

    def __init__(self) -> None:
        self._order = SlotOrder()
        self._uses: array[int] = array("Q")
        self._last_of: dict[int, int] = {}  # the last slot of each use count that some slot has

    def admit(self, slots: Iterable[int]) -> None:
        """Each has one use."""
        new = list(slots)
        if not new:
            return
        self._order.insert(new, after=self._last_of.get(1, END))
        self._uses.extend(repeat(0, self._order.capacity - len(self._uses)))
        self._count(new, 1)

    def touch(self, slots: Iterable[int]) -> None:
        """Each gets one more use."""
        order, last_of = self._order, self._last_of
        for equals, uses in self._stretches(slots):
            before = self._leave(equals, uses)
            last_of_fewer = last_of.get(uses, before)
            order.move(equals, after=last_of.get(uses + 1, last_of_fewer))
            self._count(equals, uses + 1)

    def remove(self, slots: Iterable[int]) -> None:
        """Forget the slots and their uses."""
        for equals, uses in self._stretches(slots):
            self._leave(equals, uses)
            self._order.remove(equals)

    def candidates(self) -> Iterator[int]:
        """Fewest uses first, then least recently used first."""
        return iter(self._order)

    def _stretches(self, slots: Iterable[int]) -> Iterator[tuple[list[int], int]]:
        """Stretches of slots of equal use counts, and that count."""
        uses_of = self._uses
        for stretch in self._order.stretches(slots):
            uses = uses_of[stretch[0]]
            if uses == uses_of[stretch[-1]]:
                yield stretch, uses
                continue
            for uses, equals in groupby(stretch, uses_of.__getitem__):
                yield list(equals), uses

    def _leave(self, equals: Sequence[int], uses: int) -> int:
        """The stretch will not have this use count any more; answers the slot that stands before it."""
        before = self._order.preceding[equals[0]]
        if self._last_of[uses] == equals[-1]:
            if before != END and self._uses[before] == uses:
                self._last_of[uses] = before
            else:
                del self._last_of[uses]
        return before

    def _count(self, equals: Sequence[int], uses: int) -> None:
        """The stretch, behind all others of this use count by now, has it from now on."""
        self._last_of[uses] = equals[-1]
        column = self._uses
        for slot in equals:
            column[slot] = uses
