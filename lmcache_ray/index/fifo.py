"""First in, first out: use does not matter."""

from collections.abc import Iterable, Iterator

from lmcache_ray.index.slot_order import END, SlotOrder


class FIFOPolicy:
    """An `EvictionPolicy`: the slot that was admitted first goes first."""

    def __init__(self) -> None:
        self._order = SlotOrder()

    def admit(self, slots: Iterable[int]) -> None:
        """Each goes to the end of the queue."""
        self._order.insert(list(slots), after=self._order.preceding[END])

    def touch(self, slots: Iterable[int]) -> None:
        """A use changes nothing."""

    def remove(self, slots: Iterable[int]) -> None:
        """Forget the slots."""
        for stretch in self._order.stretches(slots):
            self._order.remove(stretch)

    def candidates(self) -> Iterator[int]:
        """First admitted first."""
        return iter(self._order)
