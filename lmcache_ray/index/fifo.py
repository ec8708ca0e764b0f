"""First in, first out: use does not matter."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class FIFOPolicy:
    """An `EvictionPolicy`: the slot that was admitted first goes first."""

    def __init__(self) -> None:
        # A plain dict keeps this order too, but finding its first entry slows down as entries before it are deleted.
        self._order: OrderedDict[int, None] = OrderedDict()

    def admit(self, slots: Iterable[int]) -> None:
        """Each goes to the end of the queue."""
        order = self._order
        for slot in slots:
            order[slot] = None

    def touch(self, slots: Iterable[int]) -> None:
        """A use changes nothing."""

    def remove(self, slot: int) -> None:
        """Forget the slot."""
        del self._order[slot]

    def candidates(self) -> Iterator[int]:
        """First admitted first."""
        return iter(self._order)
