"""Loads that have to wait for other tiers: round after round, and what does not come up in time is a miss."""

from collections.abc import Sequence
from typing import cast

from cluster.deadline import Deadline
from cluster.link import ClusterLink
from cluster.messages import LoadItem, PackedRefs, PlannedLoad, pack_keys
from cluster.rounds import load_rounds
from lmcache_ray.errors import DeadlineError
from lmcache_ray.index.plans import ChunkRef

KEYS = [bytes([number]) * 32 for number in range(3)]
ITEMS = [LoadItem(pack_keys([key]), 2, (f"lease {at}",)) for at, key in enumerate(KEYS)]
LATER = PlannedLoad(2, PackedRefs.pack(()), must_wait=True)


def found(at: int) -> PlannedLoad:
    return PlannedLoad(2, PackedRefs.pack([ChunkRef(KEYS[at], at, 1)]))


class Coordinator:
    """Answers `prepare_loads`, then `promote_loads`, with the next of `answers`; None is none in time."""

    def __init__(self, *answers: list[PlannedLoad] | None) -> None:
        self._answers = list(answers)
        self.asked: list[list[str]] = []

    def prepare_loads(self, items: Sequence[LoadItem], *, timeout_s: float) -> list[PlannedLoad]:
        self.asked.append([item.lease_ids[0] for item in items])
        answer = self._answers.pop(0)
        if answer is None:
            raise DeadlineError(f"no answer within {timeout_s} s")
        return answer

    promote_loads = prepare_loads


class Link:
    """What a round needs of a link."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.abandoned: list[str] = []

    def abandon(self, lease_id: str) -> None:
        self.abandoned.append(lease_id)


def rounds(link: Link) -> list[tuple[list[int], list[PlannedLoad]]]:
    return list(load_rounds(cast(ClusterLink, link), ITEMS, Deadline(30.0)))


def test_what_is_in_memory_comes_first_and_the_rest_as_it_comes_up() -> None:
    link = Link(Coordinator([LATER, found(1), LATER], [found(0), LATER], [found(2)]))
    assert rounds(link) == [([1], [found(1)]), ([0], [found(0)]), ([2], [found(2)])]
    assert link.coordinator.asked == [["lease 0", "lease 1", "lease 2"], ["lease 0", "lease 2"], ["lease 2"]]
    assert link.abandoned == []


def test_what_does_not_come_up_in_time_is_a_miss_and_its_leases_are_given_up() -> None:
    link = Link(Coordinator([LATER, found(1), LATER], None))
    miss = PlannedLoad(2, PackedRefs.pack(()))
    assert rounds(link) == [([1], [found(1)]), ([0, 2], [miss, miss])]
    assert link.abandoned == ["lease 0", "lease 2"], "they may be granted after all"
