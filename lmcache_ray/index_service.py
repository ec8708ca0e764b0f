"""The one index of a world, made safe to share: a lock and a clock around the pure `CacheIndex`.

Engines speak to it through the `IndexClient` protocol. In process that is `LocalIndex`, here; in a cluster the
coordinator actor owns the `IndexService` and the ranks hold a client that calls it.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import ChunkRef, LoadPlan, StorePlan

_MOST_GIVEN_UP: Final = 1024

Acks = Mapping[int, Sequence[bool]]
"""Per rank, one flag for each chunk of a plan: True if that rank has committed it."""

FreeSlots = Callable[[Sequence[int], Sequence[ChunkRef]], Collection[int]]
"""``free_slots(ranks, refs)`` frees the slots on those ranks, at once; answers the ranks that have done it."""


@dataclass(frozen=True, slots=True)
class ClearCounts:
    """What one clear did in memory: chunks removed and kept because leased, and the ranks that did not answer."""

    num_removed: int
    num_kept: int
    pending_ranks: tuple[int, ...] = ()


class IndexClient(Protocol):
    """What an engine needs of the world's index. Keys are 32-byte digests of a prompt's chunks, in order."""

    def lookup(self, keys: Sequence[bytes], lease_id: str | None) -> int:
        """Leading READY chunks; with `lease_id` they stay readable until that lease is released or expires."""
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

    def clear(self, keys: Sequence[bytes] | None) -> ClearCounts:
        """Forget these chunks, or all with None, except leased ones."""
        ...


class IndexService:
    """Thread-safe door to a `CacheIndex`. Every call first ends what is overdue on `clock` (seconds, monotonic)."""

    def __init__(self, index: CacheIndex, *, clock: Callable[[], float], free_slots: FreeSlots) -> None:
        self._index = index
        self._clock = clock
        self._free_slots = free_slots
        self._lock = threading.Lock()
        self._lost_ranks: set[int] = set()
        self._given_up: deque[str] = deque(maxlen=_MOST_GIVEN_UP)

    @contextmanager
    def at_now(self) -> Iterator[tuple[CacheIndex, float]]:
        """The index under its lock, overdue leases and plans ended, and the present time."""
        with self._lock:
            now = self._clock()
            self._index.expire(now)
            yield self._index, now

    def lookup(self, keys: Sequence[bytes], *, client: str, lease_id: str | None) -> int:
        """Leading READY chunks, pinned under `lease_id` if one is given."""
        with self.at_now() as (index, now):
            return index.lookup(keys) if lease_id is None else index.pin(keys, lease_id, client, now)

    def prepare_store(self, keys: Sequence[bytes], *, client: str, start: int, rank: int | None) -> StorePlan:
        """Plan the store of ``keys[start:]``; what must stand before it are cached (or being written) chunks."""
        with self.at_now() as (index, now):
            return index.prepare_store(keys, client=client, now=now, start=start, rank=rank)

    def complete_store(self, plan_id: int, keys: Sequence[bytes], acks: Acks) -> int:
        """Take acknowledgements in; answers the leading READY chunks of `keys`."""
        self.acknowledge(plan_id, acks)
        return self.num_ready(keys)

    def num_ready(self, keys: Sequence[bytes]) -> int:
        """The leading READY chunks of `keys`; counting them is no use of them."""
        with self.at_now() as (index, _):
            return index.lookup(keys, touch=False)

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

    def prepare_load(self, keys: Sequence[bytes], *, client: str, start: int, lease_ids: Sequence[str]) -> LoadPlan:
        """Pin ``keys[start:]`` as far as READY from key 0 under each of `lease_ids`; see `IndexClient.prepare_load`."""
        with self.at_now() as (index, now):
            plan = index.prepare_load(keys, lease_id=lease_ids[0], client=client, now=now, start=start)
            for rank, lease_id in enumerate(lease_ids[1:], start=1):
                if rank not in self._lost_ranks:
                    index.share(plan, lease_id, client=rank_client(rank), now=now)
            return plan

    def keep(self, lease_id: str, *, max_slots: int) -> bool:
        """Let a load's lease end by release or with its client alone; see `CacheIndex.keep`.

        False as well if it was released before it was there: whoever asked for it has given up, and will not say so
        again.
        """
        with self.at_now() as (index, _):
            return lease_id not in self._given_up and index.keep(lease_id, max_slots=max_slots)

    def release(self, lease_ids: Sequence[str]) -> None:
        """End leases. The latest that were not there are remembered: see `keep`."""
        with self.at_now() as (index, _):
            self._given_up.extend(lease_id for lease_id in lease_ids if not index.release(lease_id))

    def clear(self, keys: Sequence[bytes] | None) -> ClearCounts:
        """Forget chunks and free their slots on every holder before returning."""
        with self.at_now() as (index, _):
            plan = index.prepare_clear(keys)
            holders = index.holders
        dropped = (*plan.refs, *plan.aborted)  # a write that a clear aborted must not be committed after it
        done = self._free_slots(holders, dropped) if dropped else holders
        with self.at_now() as (index, _):
            for rank in done:
                index.complete_clear(plan.plan_id, rank)
        pending = tuple(rank for rank in holders if rank not in done)
        return ClearCounts(len(plan.refs), plan.num_kept, pending)

    def drop_client(self, client: str) -> None:
        """A client has ended: its leases end, and what it was writing is aborted."""
        with self.at_now() as (index, _):
            index.drop_client(client)

    def rank_lost(self, rank: int) -> None:
        """A rank has ended for good: its client is dropped, and no load is pinned for it any more."""
        with self.at_now() as (index, _):
            index.drop_client(rank_client(rank))
            self._lost_ranks.add(rank)


class LocalIndex:
    """The `IndexClient` of an engine that lives in the same process as the index."""

    def __init__(self, service: IndexService, client: str) -> None:
        self._service = service
        self._client = client

    def lookup(self, keys: Sequence[bytes], lease_id: str | None) -> int:
        """See `IndexClient.lookup`."""
        return self._service.lookup(keys, client=self._client, lease_id=lease_id)

    def prepare_store(self, keys: Sequence[bytes], *, start: int, rank: int | None) -> StorePlan:
        """See `IndexClient.prepare_store`."""
        return self._service.prepare_store(keys, client=self._client, start=start, rank=rank)

    def complete_store(self, plan: StorePlan, keys: Sequence[bytes], acks: Acks) -> int:
        """See `IndexClient.complete_store`."""
        return self._service.complete_store(plan.plan_id, keys, acks)

    def prepare_load(self, keys: Sequence[bytes], *, start: int, lease_ids: Sequence[str]) -> LoadPlan:
        """See `IndexClient.prepare_load`."""
        return self._service.prepare_load(keys, client=self._client, start=start, lease_ids=lease_ids)

    def release(self, lease_ids: Sequence[str]) -> None:
        """See `IndexClient.release`."""
        self._service.release(lease_ids)

    def clear(self, keys: Sequence[bytes] | None) -> ClearCounts:
        """See `IndexClient.clear`."""
        return self._service.clear(keys)


def rank_client(rank: int) -> str:
    """The client name of a rank's own engine."""
    return f"rank{rank}"


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
