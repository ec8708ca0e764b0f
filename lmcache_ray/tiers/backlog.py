"""READY chunks that wait to be copied to one tier below, in the groups in which they became READY. Pure.

A group is what one prompt added: it goes down in one piece, so that the tier below gives up tails before heads too.
While a chunk waits its slot is not evicted, and the index asks for that slot by slot; hence the second, flat view.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from lmcache_ray.index.plans import ChunkRef, Deferred
from lmcache_ray.tiers.spec import Tier

Planned = TypeVar("Planned")


class Backlog:
    """The chunks that wait for one tier, and those on their way to it. What is let go is counted in `num_dropped`.

    A chunk that was let go, or could not be copied, is remembered as long as its slot has it: used again, it is to be
    sent again (`take_missed`). So an outage of the tier costs it nothing that is still of use.
    """

    def __init__(self) -> None:
        self._missed: dict[int, int] = {}
        self._groups: deque[Sequence[ChunkRef]] = deque()
        self._generation_of: dict[int, int] = {}
        self.num_dropped = 0

    def __contains__(self, slot: object) -> bool:
        """Whether the slot's chunk waits or is on its way."""
        return slot in self._generation_of

    def __len__(self) -> int:
        return len(self._generation_of)

    @property
    def is_waiting(self) -> bool:
        """Whether a group waits that nobody has taken."""
        return bool(self._groups)

    def add(self, group: Sequence[ChunkRef]) -> None:
        """Chunks that have become READY together, in prompt order."""
        self._groups.append(group)
        self._generation_of.update((ref.slot, ref.generation) for ref in group)

    def take(self) -> list[ChunkRef]:
        """The group that has waited longest, as far as it was not forgotten; it counts as on its way until `done`."""
        while self._groups:
            group = [ref for ref in self._groups.popleft() if self._holds(ref)]
            if group:
                return group
        return []

    def done(self, refs: Iterable[ChunkRef]) -> None:
        """These have been copied, will not be, or are not in memory any more."""
        self._forget(refs)

    def miss(self, refs: Iterable[ChunkRef]) -> None:
        """These have not been copied and do not wait any more; see `take_missed`."""
        missed = list(refs)
        self._forget(missed)
        self._missed.update((ref.slot, ref.generation) for ref in missed)

    def take_missed(self, refs: Iterable[ChunkRef]) -> list[ChunkRef]:
        """Those of `refs` that were missed; they are not any more."""
        if not self._missed:
            return []
        missed = [ref for ref in refs if self._missed.get(ref.slot) == ref.generation]
        for ref in missed:
            del self._missed[ref.slot]
        return missed

    def drop_oldest(self) -> bool:
        """Let go of half of the group that has waited longest, its tail; its head then waits behind all others.

        False if none waits that nobody has taken.
        """
        group = self.take()
        head = group[: len(group) // 2]
        self.num_dropped += len(group) - len(head)
        self.miss(group[len(head) :])
        if head:
            self._groups.append(head)
        return bool(group)

    def drop_all(self) -> int:
        """Let go of all that wait or are on their way; how many these were."""
        number = len(self._generation_of)
        self._missed.update(self._generation_of)
        self._groups.clear()
        self._generation_of.clear()
        self.num_dropped += number
        return number

    def _holds(self, ref: ChunkRef) -> bool:
        return self._generation_of.get(ref.slot) == ref.generation

    def _forget(self, refs: Iterable[ChunkRef]) -> None:
        for ref in refs:
            if self._holds(ref):  # a chunk may be named twice: missed, used again, and still in its first group
                del self._generation_of[ref.slot]


class HeldBack:
    """The slots that any of several backlogs holds, as one view for the index."""

    def __init__(self, backlogs: Iterable[Backlog]) -> None:
        self._backlogs: Final = tuple(backlogs)

    def __contains__(self, slot: object) -> bool:
        return any(slot in backlog for backlog in self._backlogs)

    def __len__(self) -> int:
        """So many slots at least: one may be in several backlogs."""
        return max(map(len, self._backlogs), default=0)


def with_room(
    plan: Callable[[bool], Planned | Deferred],
    backlogs: Mapping[Tier, Backlog],
    *,
    waits_for: Collection[Tier],
    let_go: Callable[[], None],
) -> Planned | Deferred:
    """``plan(whole)``, first with `whole`: what wants to go down to the remote store is let go if it is in the way.

    While chunks wait for one of the tiers in `waits_for` the answer is Deferred.NOT_WHOLE instead. ``let_go()`` is
    called after some were.
    """
    while any(map(len, backlogs.values())):
        planned = plan(True)
        if planned is not Deferred.NOT_WHOLE or any(len(backlogs[tier]) for tier in waits_for if tier in backlogs):
            return planned
        if Tier.REMOTE not in backlogs or not backlogs[Tier.REMOTE].drop_oldest():
            break
        let_go()
    return plan(False)
