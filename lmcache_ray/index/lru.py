"""Least recently used goes first."""

from collections.abc import Iterable, Iterator

from lmcache_ray.index.slot_order import END, SlotOrder


class LRUPolicy:
    """An `EvictionPolicy`: the slot whose last use lies furthest back goes first."""

    def __init__(self) -> None:
        self._order = SlotOrder()

    def admit(self, slots: Iterable[int]) -> None:
        """Each becomes the most recently used."""
        self._order.insert(list(slots), after=self._order.preceding[END])

    def touch(self, slots: Iterable[int]) -> None:
        """Each becomes the most recently used."""
        order = self._order
        for stretch in order.stretches(slots):
            last_used = order.preceding[END]
            if stretch[-1] != last_used:
                order.move(stretch, after=last_used)

    def remove(self, slots: Iterable[int]) -> None:
        """Forget the slots."""
        for stretch in self._order.stretches(slots):
            self._order.remove(stretch)

    def candidates(self) -> Iterator[int]:
        """Least recently used first."""
        return iter(self._order)
