"""Planning the items of a batch in rounds, where not all of them can be planned at once.

With tiers below memory a load may have to wait until its chunks have come up, and a store until others have gone down.
What can be planned is planned; it must have been carried out, and its leases ended, before the rest is asked for, which
may need its room. Without such tiers there is one round.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final, TypeVar

from lmcache_ray.errors import DeadlineError

from .deadline import Deadline
from .link import ClusterLink
from .messages import LoadItem, PlannedLoad, PlannedStore, StoreItem

Plan = TypeVar("Plan", PlannedLoad, PlannedStore)
Round = tuple[list[int], list[Plan]]
"""Indices of items, and their plans."""

_PROMOTING_SHARE: Final = 2 / 3  # of what is left of a call's time; the rest is for loading
_LOOK_AGAIN_S: Final = 0.5


def load_rounds(link: ClusterLink, wanted: Sequence[LoadItem], deadline: Deadline) -> Iterator[Round[PlannedLoad]]:
    """Plan loads: first of what is in memory, then of what is brought there. End each round before the next.

    What has not come up when its time is over is a miss.
    """
    planned = link.coordinator.prepare_loads(wanted, timeout_s=deadline.remaining_s())
    waiting = list(range(len(wanted)))
    while True:
        ready, waiting = _split(waiting, planned)
        if ready[0]:
            yield ready
        if not waiting:
            return
        items = [wanted[index] for index in waiting]
        try:
            planned = link.coordinator.promote_loads(items, timeout_s=deadline.remaining_s() * _PROMOTING_SHARE)
        except DeadlineError:
            for lease_id in chain.from_iterable(item.lease_ids for item in items):
                link.abandon(lease_id)  # it may be granted yet
            planned = [item.missed() for item in items]


def store_rounds(
    link: ClusterLink, wanted: Sequence[StoreItem], deadline: Deadline, *, call: int | None = None
) -> Iterator[Round[PlannedStore]]:
    """Plan stores, those that find no room after waiting for it. After half of the time what fits is stored at once.

    `call` numbers the call of this process (`ClusterLink.writing`) that writes into arenas itself.
    """
    waiting = list(range(len(wanted)))
    while waiting:
        planned = link.coordinator.prepare_stores(
            [wanted[index] for index in waiting],
            direct=None if call is None else link.direct_writes(call),
            patient=link.world.tiers.has_lower and deadline.remaining_s() > deadline.timeout_s / 2,
            timeout_s=deadline.remaining_s(),
        )
        ready, waiting = _split(waiting, planned)
        if ready[0]:
            yield ready
        elif waiting:
            link.coordinator.wait_for_room(timeout_s=min(_LOOK_AGAIN_S, deadline.remaining_s()))


def _split(indices: Sequence[int], planned: Sequence[Plan]) -> tuple[Round[Plan], list[int]]:
    """The round that is planned, and the indices of those that must wait."""
    pairs = list(zip(indices, planned, strict=True))
    ready = [(index, plan) for index, plan in pairs if not plan.must_wait]
    waiting = [index for index, plan in pairs if plan.must_wait]
    return ([index for index, _ in ready], [plan for _, plan in ready]), waiting
