"""Memory and the tiers below it as one index: a chunk is cached if any of them has it whole. Pure.

Memory and disk are two machines of one kind (`CacheIndex`): the disk's slots are only counted, never addressed, and a
disk entry's generation names its files. What is in a remote store is not known here; it is asked when it is needed.

READY chunks wait in a backlog for each tier below, and cannot be evicted before they were copied there (or let go).
What moves between tiers is planned in `write_behind.py` and `promotion.py`, on top of this.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from lmcache_ray.errors import CapacityError, IntegrityError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.leases import PINS_CLIENT
from lmcache_ray.index.plans import ChunkRef, ClearPlan, Deferred, Expired, LoadPlan, StorePlan
from lmcache_ray.index.slot_table import SlotState
from lmcache_ray.index.store_planning import TiersBelow
from lmcache_ray.tiers.backlog import Backlog, HeldBack, Planned, with_room
from lmcache_ray.tiers.spec import Tier

EVERYWHERE: Final = frozenset(Tier)


class TieredIndex:
    """The world's chunks over `memory`, an optional `disk` and a remote store.

    `make_memory` builds memory's index around what it must know of the tiers below. `backlogs` has one for each tier
    below that the world has. Without `keeps_in_memory`, memory only stages: a chunk leaves it as soon as nobody holds
    it. `disk` is None until its files have been counted. Like its parts it is not thread-safe and reads no clock.
    """

    def __init__(
        self,
        make_memory: Callable[[TiersBelow | None], CacheIndex],
        *,
        backlogs: Mapping[Tier, Backlog],
        keeps_in_memory: bool,
    ) -> None:
        self.backlogs: Final = dict(backlogs)
        self.keeps_in_memory: Final = keeps_in_memory
        below = TiersBelow(HeldBack(self.backlogs.values()), self.is_on_disk) if backlogs else None
        self.memory: Final = make_memory(below)
        self.disk: CacheIndex | None = None
        self.is_disk_away = False  # what is on it are misses meanwhile
        self.coming_up: Final[dict[int, Tier]] = {}
        """Generations of memory slots that are being filled from below, and where from."""
        self.awaiting: Final[dict[str, tuple[Sequence[bytes], str]]] = {}
        """Leases of those who wait for what others bring up, until they load or release: their keys and client."""
        self.suspended: Final[set[Tier]] = set()
        """Tiers below that are out of order: nothing is held back for them."""

    @staticmethod
    def of_memory(memory: CacheIndex) -> "TieredIndex":
        """Memory alone."""
        return TieredIndex(lambda below: memory, backlogs={}, keeps_in_memory=True)

    # -- reading ------------------------------------------------------------------------------------------------------

    def is_on_disk(self, key: bytes) -> bool:
        """Whether every holder has `key` on its disk, and the disk can be read."""
        return self.disk is not None and not self.is_disk_away and self.disk.table.ready_ref(key) is not None

    def run(self, keys: Sequence[bytes], tiers: Collection[Tier] = EVERYWHERE) -> list[Tier]:
        """The fastest of `tiers` that has each of the leading keys, up to the first that none has.

        No longer than memory: more cannot be loaded at once.
        """
        in_memory = self.memory.table.ready_ref
        found = [Tier.CPU] * len(self.memory.table.ready_run(keys)) if Tier.CPU in tiers else []
        if self.disk is None or Tier.DISK not in tiers:
            return found
        for key in islice(keys, len(found), self.memory.table.capacity):
            if Tier.CPU in tiers and in_memory(key) is not None:
                found.append(Tier.CPU)
            elif self.is_on_disk(key):
                found.append(Tier.DISK)
            else:
                break
        return found

    def lookup(
        self, keys: Sequence[bytes], lease_id: str | None, *, client: str, now: float, tiers: Collection[Tier]
    ) -> int:
        """The number of leading keys that `tiers` have, a use of them; with a lease they stay where they are."""
        if self.disk is None and Tier.CPU in tiers:
            return self.memory.lookup(keys) if lease_id is None else self.memory.pin(keys, lease_id, client, now)
        found = keys[: len(self.run(keys, tiers))]
        for index in self._indexes():
            index.table.policy.touch(reversed(index.table.ready_among(found)))
            if lease_id is not None:
                index.hold(found, lease_id, client, now)
        self.trim()
        return len(found)

    def num_cached(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys that some tier here has; not a use of them."""
        return self.memory.lookup(keys, touch=False) if self.disk is None else len(self.run(keys))

    def pin(self, keys: Sequence[bytes], lease_id: str, *, now: float) -> int:
        """As `lookup` with a lease, which ends by release alone. Raises `CapacityError`, and pins nothing, if too many
        slots would be held so."""
        num_cached = self.lookup(keys, lease_id, client=PINS_CLIENT, now=now, tiers=EVERYWHERE)
        for index in self._indexes() if num_cached else ():
            most = index.table.capacity * 3 // 4
            if index.table.ready_among(keys[:num_cached]) and not index.keep(lease_id, max_slots=most):
                self.release(lease_id)
                raise CapacityError(
                    f"pins and views hold at most {most} of {index.table.capacity} chunks, so that stores find room: "
                    f"{num_cached} more are too many"
                )
        return num_cached

    def prepare_load(
        self, keys: Sequence[bytes], *, lease_id: str, client: str, now: float, start: int = 0
    ) -> LoadPlan:
        """As `CacheIndex.prepare_load`, of what is in memory; on the disk it is a use as well.

        What stands before `start` need only be cached, in whichever tier.
        """
        self.awaiting.pop(lease_id, None)
        self._send_missed(keys)
        self._touch_disk(keys)
        skip = start if self.disk is not None and len(self.run(keys[:start])) == start else 0
        plan = self.memory.prepare_load(keys[skip:], lease_id=lease_id, client=client, now=now, start=start - skip)
        self.trim()
        return replace(plan, start=start) if skip else plan

    def release(self, lease_id: str) -> bool:
        """End a lease in every tier; False if there was none."""
        self.awaiting.pop(lease_id, None)
        ended = [index.release(lease_id) for index in self._indexes()]
        self.trim()
        return any(ended)

    def expire(self, now: float) -> Expired:
        """End what is overdue in every tier; what memory ended."""
        expired = self.memory.expire(now)
        if self.disk is not None:
            self.disk.expire(now)
        if expired.lease_ids or expired.aborted:
            self.trim()
        return expired

    def drop_client(self, client: str) -> None:
        """A client has ended."""
        for lease_id in [lease_id for lease_id, (_, awaiter) in self.awaiting.items() if awaiter == client]:
            del self.awaiting[lease_id]
        for index in self._indexes():
            index.drop_client(client)
        self.trim()

    # -- storing ------------------------------------------------------------------------------------------------------

    def prepare_store(
        self,
        keys: Sequence[bytes],
        *,
        client: str,
        now: float,
        start: int,
        rank: int | None,
        patient: bool,
        has_begun: bool = False,
    ) -> StorePlan | Deferred:
        """As `CacheIndex.prepare_store`; what is on the disk counts as cached and is not written again.

        With `patient`, Deferred instead of leaving something out while chunks wait for the disk: there will be room.
        So there will if the caller `has_begun` to write others of its own, which will wait for the disk too.
        """

        def store(whole: bool) -> StorePlan | Deferred:
            return self.memory.try_store(keys, client=client, now=now, start=start, rank=rank, whole=whole)

        self._send_missed(keys)
        if patient and has_begun and self.disk is not None and Tier.DISK not in self.suspended:
            plan = store(True)
        else:
            plan = self.with_room(store, waits_for=(Tier.DISK,) if patient else ())
        if isinstance(plan, Deferred) or self.disk is None:
            return plan
        self._touch_disk(keys)
        return replace(plan, num_ready=len(self.run(keys)))

    def prepare_request(
        self, keys: Sequence[bytes], *, lease_id: str, client: str, now: float, defer: bool, patient: bool
    ) -> tuple[LoadPlan, StorePlan] | Deferred:
        """As `CacheIndex.prepare_request`, of what is in memory; with `patient` it waits for every tier below."""
        self.awaiting.pop(lease_id, None)
        self._send_missed(keys)

        def plan(whole: bool) -> tuple[LoadPlan, StorePlan] | Deferred:
            return self.memory.prepare_request(
                keys, lease_id=lease_id, client=client, now=now, defer=defer, whole=whole
            )

        planned = self.with_room(plan, waits_for=self.backlogs if patient else ())
        if isinstance(planned, Deferred) or self.disk is None:
            return planned
        self._touch_disk(keys)
        return planned[0], replace(planned[1], num_ready=len(self.run(keys)))

    def with_room(self, plan: Callable[[bool], Planned | Deferred], waits_for: Collection[Tier]) -> Planned | Deferred:
        """See `backlog.with_room`."""
        return with_room(plan, self.backlogs, waits_for=waits_for, let_go=self.trim)

    def num_behind(self, tiers: Collection[Tier] = EVERYWHERE) -> int:
        """Chunks that wait for these tiers, or are on their way to them."""
        return sum(len(backlog) for tier, backlog in self.backlogs.items() if tier in tiers)

    def complete_store(
        self, plan_id: int, ranks: Collection[int], *, done: Iterable[int], failed: Iterable[int] = ()
    ) -> bool:
        """As `CacheIndex.complete_store`; what becomes READY is to go down."""
        known = self.memory.complete_store(plan_id, ranks, done=done, failed=failed)
        ready = self.memory.table.take_newly_ready()
        for tier in self.backlogs:
            self._send_down(tier, [ref for ref in ready if self._is_new_to(tier, ref)])
        self.trim()
        return known

    def _send_down(self, tier: Tier, group: Sequence[ChunkRef]) -> None:
        if tier in self.suspended or (tier is Tier.DISK and self.disk is None):
            self.backlogs[tier].miss(group)
        elif group:
            self.backlogs[tier].add(group)

    def _send_missed(self, keys: Sequence[bytes]) -> None:
        """These are used: those of them that a tier has missed go down after all."""
        for tier in self.backlogs.keys() - self.suspended:
            missed = self.backlogs[tier].take_missed(self.memory.table.refs(self.memory.table.ready_among(keys)))
            self._send_down(tier, [ref for ref in missed if self._is_new_to(tier, ref)])

    def _is_new_to(self, tier: Tier, ref: ChunkRef) -> bool:
        """What came from a remote store goes to the disk too, but nothing goes back where it came from, or is."""
        source = self.coming_up.get(ref.generation)
        if tier is Tier.DISK:
            return source is not Tier.DISK and not self.is_on_disk(ref.key)
        return source is None

    def trim(self) -> None:
        """Where memory only stages: forget what nobody reads, no tier waits for, and is not just coming up."""
        if self.keeps_in_memory:
            return
        table, held_back = self.memory.table, HeldBack(self.backlogs.values())
        idle = [slot for slot in table.policy.candidates() if slot not in held_back]
        self.memory.evict([ref for ref in table.refs(idle) if ref.generation not in self.coming_up])

    # -- clearing -----------------------------------------------------------------------------------------------------

    def clear_memory(self, keys: Sequence[bytes] | None) -> ClearPlan:
        """As `CacheIndex.prepare_clear` of memory: what waits for a tier below does so no more."""
        plan = self.memory.prepare_clear(keys)
        for backlog in self.backlogs.values():
            backlog.done(plan.refs)
        return plan

    def clear_disk(self, keys: Sequence[bytes] | None) -> ClearPlan:
        """Forget these keys (None: all) on the disk, but for leased ones; the files of `refs` and `aborted` must go.

        What waits in memory to be copied there does so no more. Complete at once: a file's generation is never given
        out again, so nobody can take it for another's.
        """
        if self.disk is None:
            return ClearPlan(0, (), (), ())
        self.withhold(Tier.DISK, keys)
        plan = self.disk.prepare_clear(keys)
        for rank in self.disk.holders:
            self.disk.complete_clear(plan.plan_id, rank)
        return plan

    def withhold(self, tier: Tier, keys: Iterable[bytes] | None) -> None:
        """What waits in memory for `tier`, or was missed by it, does not go there: these keys, or all with None."""
        table = self.memory.table
        refs = table.refs(table.ready_among(table.slot_of if keys is None else keys))
        self.backlogs[tier].done(refs)
        self.backlogs[tier].take_missed(refs)
        self.trim()

    # -- the whole ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise an IntegrityError if a part contradicts itself, or a chunk waits to be copied that is not there."""
        for index in self._indexes():
            index.check_integrity()
        table, held_back = self.memory.table, HeldBack(self.backlogs.values())
        ready = set(table.slots_in(SlotState.READY))
        stray = [slot for slot in range(table.capacity) if slot in held_back and slot not in ready]
        if stray:
            raise IntegrityError(f"slots {stray} are held back for a tier below, but are not READY")

    def _touch_disk(self, keys: Sequence[bytes]) -> None:
        if self.disk is not None:
            self.disk.table.policy.touch(reversed(self.disk.table.ready_among(keys)))

    def _indexes(self) -> tuple[CacheIndex, ...]:
        return (self.memory,) if self.disk is None else (self.memory, self.disk)
