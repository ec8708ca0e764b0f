"""An order over slots, as a doubly linked list in two columns of integers.

Apart from the policies, which all keep one. An ordered dict would take 100 bytes a slot and be moved entry by entry;
here a slot takes 8 bytes, and slots that already stand side by side move together. They often do: chunks of one prompt
were stored together and are used together.

::

    index       0    1    2    3    …   -1, the last cell, wherever it is
    following   2  GONE  -1    0         3        the order 3, 0, 2
    preceding   3  GONE   0   -1         2
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

END: Final = -1
"""Stands before the first slot and after the last. Python counts -1 from the end, so it has a cell like any slot."""

_GONE: Final = -2
"""In the cells of a slot that is not in the order."""


class SlotOrder:
    """Slots one after the other. ``following[slot]`` is the next one or END, ``following[END]`` the first.

    The columns are open for reading; they grow with the highest slot that was ever inserted.
    """

    def __init__(self) -> None:
        self.following: Final = array("i", [END])
        self.preceding: Final = array("i", [END])

    @property
    def capacity(self) -> int:
        """Every slot in the order is below this number."""
        return len(self.following) - 1

    def __iter__(self) -> Iterator[int]:
        """First to last. The order may change only when iteration has stopped."""
        following = self.following
        slot = following[END]
        while slot != END:
            yield slot
            slot = following[slot]

    def stretches(self, slots: Iterable[int]) -> Iterator[list[int]]:
        """`slots`, cut where two that follow one another do not do so in the order. KeyError for one that is not in it.

        Each cut is made when it is asked for, so the caller may move a stretch before it asks for the next one. A slot
        may be named repeatedly, but a stretch has it once.
        """
        following = self.following
        stretch: list[int] = []
        expected = END
        for slot in slots:
            if slot != expected and stretch:
                yield stretch
                stretch = []
            stretch.append(slot)
            try:
                expected = following[slot]
            except IndexError:
                raise KeyError(slot) from None
            if expected == _GONE:
                raise KeyError(slot)
        if stretch:
            yield stretch

    def insert(self, slots: Sequence[int], after: int) -> None:
        """Put slots that are not in the order behind the slot `after`, or before all others if that is END."""
        if not slots:
            return
        self._grow(max(slots) + 1)
        following, preceding = self.following, self.preceding
        before, behind = after, following[after]
        for slot in slots:
            following[before], preceding[slot] = slot, before
            before = slot
        following[before], preceding[behind] = behind, before

    def move(self, stretch: Sequence[int], after: int) -> None:
        """Put a stretch, as a whole, behind the slot `after`, which is not in it, or before all others if it is END."""
        following, preceding = self.following, self.preceding
        first, last = stretch[0], stretch[-1]
        before, behind = preceding[first], following[last]
        following[before], preceding[behind] = behind, before
        behind = following[after]
        following[after], preceding[first] = first, after
        following[last], preceding[behind] = behind, last

    def remove(self, stretch: Sequence[int]) -> None:
        """Take a stretch out of the order."""
        following, preceding = self.following, self.preceding
        before, behind = preceding[stretch[0]], following[stretch[-1]]
        following[before], preceding[behind] = behind, before
        for slot in stretch:
            following[slot] = _GONE

    def _grow(self, capacity: int) -> None:
        """Make cells for all slots below `capacity`; those of END stay the last."""
        num_missing = capacity - self.capacity
        if num_missing > 0:
            new_cells = array("i", [_GONE]) * num_missing
            self.following[END:END] = new_cells
            self.preceding[END:END] = new_cells
