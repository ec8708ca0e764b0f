"""Least recently used goes first."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class LRUPolicy:
    """An `EvictionPolicy`: the slot whose last use lies furthest back goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def admit(self, slots: Iterable[int]) -> None:
        """Each becomes the most recently used."""
        order = self._order
        for slot in slots:
            order[slot] = None

    def touch(self, slots: Iterable[int]) -> None:
        """Each becomes the most recently used."""
        move_to_end = self._order.move_to_end
        for slot in slots:
            move_to_end(slot)

    def remove(self, slot: int) -> None:
        """Forget the slot."""
        del self._order[slot]

    def candidates(self) -> Iterator[int]:
        """Least recently used first."""
        return iter(self._order)
