"""The one index of a world, made safe to share: a lock and a clock around the pure `TieredIndex`.

Engines speak to it through the `IndexClient` protocol. In process that is `tiers/local_index.py`; in a cluster the
coordinator actor owns the `IndexService` and the ranks hold a client that calls it.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.index.plans import ChunkRef, ClearPlan, Deferred, LoadPlan, StorePlan
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import EVERYWHERE, TieredIndex

_MOST_GIVEN_UP: Final = 1024

Acks = Mapping[int, Sequence[bool]]
"""Per rank, one flag for each chunk of a plan: True if that rank has committed it."""

FreeSlots = Callable[[Sequence[int], Sequence[ChunkRef]], Collection[int]]
"""``free_slots(ranks, refs)`` frees the slots on those ranks, at once; answers the ranks that have done it."""


class IndexClient(Protocol):
    """What an engine needs of the world's index. Keys are 32-byte digests of a prompt's chunks, in order."""

    def lookup(self, keys: Sequence[bytes], lease_id: str | None, tiers: Collection[Tier] = EVERYWHERE) -> int:
        """Leading chunks cached in `tiers`; with `lease_id` they stay so until that lease is released or expires."""
        ...

    def locate(self, keys: Sequence[bytes]) -> list[Tier]:
        """The fastest tier that has each of the leading cached chunks; not a use of them."""
        ...

    def pin(self, keys: Sequence[bytes]) -> int:
        """Keep the leading cached chunks until `unpin`, whoever ends meanwhile; their number.

        Raises `CapacityError` if pins and views would leave too little room for stores.
        """
        ...

    def unpin(self, keys: Sequence[bytes]) -> bool:
        """End the pin of this prompt; False if there is none."""
        ...

    def prepare_store(self, keys: Sequence[bytes], *, start: int, rank: int | None) -> StorePlan:
        """Reserve slots for the chunks from `start` on that nobody has or writes; see `CacheIndex.prepare_store`."""
        ...

    def complete_store(self, plan: StorePlan, keys: Sequence[bytes], acks: Acks) -> int:
        """Report what was written; answers the number of leading READY chunks of `keys`."""
        ...

    def prepare_load(self, keys: Sequence[bytes], *, start: int, lease_ids: Sequence[str]) -> LoadPlan:
        """Pin the leading READY chunks from `start` on and say where they lie.

        They are pinned under each of `lease_ids`, which end by time soon. Of several, number r is rank r's and also
        ends with that rank.
        """
        ...

    def release(self, lease_ids: Sequence[str]) -> None:
        """End leases. Unknown and ended ones are ignored."""
        ...

    def clear(self, keys: Sequence[bytes] | None, tiers: Collection[Tier] = EVERYWHERE) -> TierClearCounts:
        """Forget these chunks, or all with None, in `tiers`, except leased ones."""
        ...


class IndexService:
    """Thread-safe door to a `TieredIndex`. Every call first ends what is overdue on `clock` (seconds, monotonic)."""

    def __init__(self, index: TieredIndex, *, clock: Callable[[], float], free_slots: FreeSlots) -> None:
        self._index = index
        self._clock = clock
        self._free_slots = free_slots
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._lost_ranks: set[int] = set()
        self._given_up: deque[str] = deque(maxlen=_MOST_GIVEN_UP)

    @property
    def capacity(self) -> int:
        """Chunks that fit in memory."""
        return self._index.memory.table.capacity

    @property
    def keeps_in_memory(self) -> bool:
        """Whether chunks stay in memory when nobody reads them."""
        return self._index.keeps_in_memory

    @contextmanager
    def at_now(self) -> Iterator[tuple[TieredIndex, float]]:
        """The index under its lock, overdue leases and plans ended, and the present time."""
        with self._lock:
            now = self._clock()
            self._index.expire(now)
            yield self._index, now

    def wait_until(self, is_so: Callable[[TieredIndex], bool], timeout_s: float) -> bool:
        """Wait until ``is_so(index)``, which is asked now and whenever chunks have moved; False after `timeout_s`."""
        with self._moved:
            return self._moved.wait_for(lambda: is_so(self._index), timeout_s)

    def tell_moved(self) -> None:
        """Chunks have moved between tiers: whoever waits for that looks again."""
        with self._moved:
            self._moved.notify_all()

    def lookup(
        self, keys: Sequence[bytes], *, client: str, lease_id: str | None, tiers: Collection[Tier] = EVERYWHERE
    ) -> int:
        """Leading chunks cached in `tiers`, pinned under `lease_id` if one is given."""
        with self.at_now() as (index, now):
            return index.lookup(keys, lease_id, client=client, now=now, tiers=tiers)

    def locate(self, keys: Sequence[bytes]) -> list[Tier]:
        """See `IndexClient.locate`."""
        with self.at_now() as (index, _):
            return index.run(keys)

    def pin(self, keys: Sequence[bytes]) -> int:
        """See `IndexClient.pin`."""
        with self.at_now() as (index, now):
            return index.pin(keys, _pin_id(keys), now=now)

    def unpin(self, keys: Sequence[bytes]) -> bool:
        """See `IndexClient.unpin`."""
        with self.at_now() as (index, _):
            return index.release(_pin_id(keys))

    def prepare_store(
        self,
        keys: Sequence[bytes],
        *,
        client: str,
        start: int,
        rank: int | None,
        patient: bool = False,
        has_begun: bool = False,
    ) -> StorePlan | Deferred:
        """Plan the store of ``keys[start:]``; what must stand before it are cached (or being written) chunks.

        `patient`, `has_begun`: see `TieredIndex.prepare_store`; without `patient` the answer is a plan.
        """
        with self.at_now() as (index, now):
            return index.prepare_store(
                keys, client=client, now=now, start=start, rank=rank, patient=patient, has_begun=has_begun
            )

    def complete_store(self, plan_id: int, keys: Sequence[bytes], acks: Acks) -> int:
        """Take acknowledgements in; answers the leading READY chunks of `keys`."""
        self.acknowledge(plan_id, acks)
        return self.num_ready(keys)

    def num_ready(self, keys: Sequence[bytes]) -> int:
        """The leading READY chunks of `keys`; counting them is no use of them."""
        with self.at_now() as (index, _):
            return index.num_cached(keys)

    def acknowledge(self, plan_id: int, acks: Acks) -> None:
        """Take acknowledgements of one plan in."""
        alike: dict[tuple[bool, ...], list[int]] = {}
        for rank, flags in acks.items():
            alike.setdefault(tuple(flags), []).append(rank)
        with self.at_now() as (index, _):
            for flags, ranks in alike.items():  # nearly always one round, however many ranks there are
                index.complete_store(
                    plan_id,
                    ranks,
                    done=[position for position, flag in enumerate(flags) if flag],
                    failed=[position for position, flag in enumerate(flags) if not flag],
                )
            if index.backlogs:
                self._moved.notify_all()

    def prepare_load(
        self,
        keys: Sequence[bytes],
        *,
        client: str,
        start: int,
        lease_ids: Sequence[str],
        has_more: Callable[[TieredIndex], bool] = lambda index: False,
    ) -> LoadPlan | Deferred:
        """Pin ``keys[start:]`` as far as READY from key 0 under each of `lease_ids`; see `IndexClient.prepare_load`.

        Deferred, and no change, if ``has_more(index)`` says that more should be brought into memory first.
        """
        with self.at_now() as (index, now):
            if has_more(index):
                return Deferred.BELOW
            plan = index.prepare_load(keys, lease_id=lease_ids[0], client=client, now=now, start=start)
            for rank, lease_id in enumerate(lease_ids[1:], start=1):
                if rank not in self._lost_ranks:
                    index.memory.share(plan, lease_id, client=rank_client(rank), now=now)
            return plan

    def keep(self, lease_id: str, *, max_slots: int) -> bool:
        """Let a load's lease end by release or with its client alone; see `CacheIndex.keep`.

        False as well if it was released before it was there: whoever asked for it has given up, and will not say so
        again.
        """
        with self.at_now() as (index, _):
            return lease_id not in self._given_up and index.memory.keep(lease_id, max_slots=max_slots)

    def release(self, lease_ids: Sequence[str]) -> None:
        """End leases. The latest are remembered, whether they were there or not: see `keep`."""
        with self.at_now() as (index, _):
            for lease_id in lease_ids:
                index.release(lease_id)
            self._given_up.extend(lease_ids)

    def clear_memory(self, keys: Sequence[bytes] | None) -> tuple[ClearPlan, tuple[int, ...]]:
        """Forget chunks and free their slots on every holder before returning; what, and who did not answer."""
        with self.at_now() as (index, _):
            plan = index.clear_memory(keys)
            holders = index.memory.holders
        dropped = (*plan.refs, *plan.aborted)  # a write that a clear aborted must not be committed after it
        done = self._free_slots(holders, dropped) if dropped else holders
        with self.at_now() as (index, _):
            for rank in done:
                index.memory.complete_clear(plan.plan_id, rank)
        return plan, tuple(rank for rank in holders if rank not in done)

    def drop_client(self, client: str) -> None:
        """A client has ended: its leases end, and what it was writing is aborted."""
        with self.at_now() as (index, _):
            index.drop_client(client)

    def rank_lost(self, rank: int) -> None:
        """A rank has ended: its client is dropped, and until it is back no load is pinned for it."""
        with self.at_now() as (index, _):
            index.drop_client(rank_client(rank))
            self._lost_ranks.add(rank)

    def rank_back(self, rank: int) -> None:
        """A new process serves the rank."""
        with self.at_now():
            self._lost_ranks.discard(rank)


def rank_client(rank: int) -> str:
    """The client name of a rank's own engine."""
    return f"rank{rank}"


def _pin_id(keys: Sequence[bytes]) -> str:
    """The lease of a prompt's pin: its last key stands for all."""
    return f"pin/{keys[-1].hex() if keys else ''}"


class LeaseNames:
    """Lease ids of one client's calls: never the same twice, never those of its users' lookups.

    `scope` is shared by those who speak of the same requests, as the ranks of a world do: a lookup id means one lease
    within it, and nothing outside.
    """

    def __init__(self, client: str, scope: str) -> None:
        self._client = client
        self._scope = scope
        self._numbers = itertools.count()

    def for_load(self) -> str:
        """A new id for one load."""
        return f"load/{self._client}/{next(self._numbers)}"

    def for_lookup(self, lookup_id: str | None) -> str:
        """The id of a lookup that pins. Raises `InvalidRequestError` if it is not a non-empty text."""
        if not isinstance(lookup_id, str) or not lookup_id:
            raise InvalidRequestError(f"lookup(pin=True) needs a lookup_id, a non-empty text; got {lookup_id!r}")
        return f"lookup/{self._scope}/{lookup_id}"
