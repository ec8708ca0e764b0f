"""Least frequently used goes first; among equals, the least recently used.

Slots of one use count share a bucket, in order of their last use. The buckets form a ring in order of their counts, so
a use moves a slot to the neighbouring bucket, which takes the same time however many slots or counts there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class _Bucket:
    """The slots used `count` times, between its neighbours in the ring. The ring's head has count 0 and no slots."""

    __slots__ = ("count", "next", "previous", "slots")

    def __init__(self, count: int) -> None:
        self.count = count
        self.slots: OrderedDict[int, None] = OrderedDict()
        self.previous = self
        self.next = self

    def next_count(self) -> _Bucket:
        """The bucket of ``count + 1``, made if there is none."""
        following = self.next
        if following.count == self.count + 1:
            return following
        bucket = _Bucket(self.count + 1)
        bucket.previous, bucket.next = self, following
        self.next = following.previous = bucket
        return bucket

    def unlink(self) -> None:
        """Leave the ring."""
        self.previous.next, self.next.previous = self.next, self.previous


class LFUPolicy:
    """An `EvictionPolicy`: the slot with the fewest uses since it was admitted goes first."""

    def __init__(self) -> None:
        self._head = _Bucket(0)
        self._bucket_of: dict[int, _Bucket] = {}

    def admit(self, slots: Iterable[int]) -> None:
        """Each has one use."""
        bucket_of, once = self._bucket_of, None
        for slot in slots:
            once = once or self._head.next_count()  # made only when needed: an empty bucket has no place in the ring
            once.slots[slot] = None
            bucket_of[slot] = once

    def touch(self, slots: Iterable[int]) -> None:
        """Each gets one more use."""
        bucket_of = self._bucket_of
        for slot in slots:
            bucket = bucket_of[slot]
            following = bucket.next_count()
            del bucket.slots[slot]
            following.slots[slot] = None
            bucket_of[slot] = following
            if not bucket.slots:
                bucket.unlink()

    def remove(self, slot: int) -> None:
        """Forget the slot and its uses."""
        bucket = self._bucket_of.pop(slot)
        del bucket.slots[slot]
        if not bucket.slots:
            bucket.unlink()

    def candidates(self) -> Iterator[int]:
        """Fewest uses first, then least recently used first."""
        bucket = self._head.next
        while bucket is not self._head:
            yield from bucket.slots
            bucket = bucket.next
