"""The one index of a world: it decides for all ranks which chunks are cached, where they lie, and which are evicted.

A chunk is READY only when every holder rank has committed it; it lies in the same slot number on each, and is evicted
on all at once. Callers ask for a plan (`prepare_*`), carry it out, and report (`complete_*`); the index itself does
nothing but decide and record. It never waits: no room is an answer.

`CacheIndex` is the only door to the parts that hold its state. It is not thread-safe, and reads no clock: `now` is in
seconds of any clock that does not go back.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from lmcache_ray.errors import ConfigError, IntegrityError, InvalidRequestError
from lmcache_ray.index.clear_planning import plan_clear
from lmcache_ray.index.integrity import contradictions, count_slots
from lmcache_ray.index.leases import LeaseTable
from lmcache_ray.index.plans import ChunkRef, ClearPlan, Deferred, Expired, IndexCounts, LoadPlan, StorePlan
from lmcache_ray.index.policy import EvictionPolicy
from lmcache_ray.index.slot_table import COUNTER_BITS, SlotState, SlotTable
from lmcache_ray.index.store_planning import StoreDraft, StorePlanner, TiersBelow
from lmcache_ray.index.write_ledger import WriteLedger


class CacheIndex:
    """Chunks by key, in `num_slots` slots that each of the ranks `holders` has. `policy` must be new.

    Generations and plan ids are issued once in the life of a cluster if every index gets an `epoch` above the last
    one's. A store must be answered, and a load ended, within `call_timeout_s` seconds; other leases last
    `lease_timeout_s`. What is overdue is ended by `expire`. Keys are any bytes, by convention 32-byte digests, in
    prompt order; a prompt may repeat a key.

    `table` is open for reading to this package, all parts to `recovery.py`. `below` is what is known of lower tiers.
    """

    def __init__(
        self,
        num_slots: int,
        holders: Sequence[int],
        policy: EvictionPolicy,
        *,
        epoch: int,
        call_timeout_s: float,
        lease_timeout_s: float,
        below: TiersBelow | None = None,
    ) -> None:
        if not holders or len(set(holders)) != len(holders) or min(holders) < 0:
            raise ConfigError(f"holders must be distinct ranks, at least one, not {list(holders)}")
        for name, timeout_s in (("call_timeout_s", call_timeout_s), ("lease_timeout_s", lease_timeout_s)):
            if not timeout_s > 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {timeout_s}")
        self.holders: Final = tuple(holders)
        self.table: Final = SlotTable(num_slots, policy, epoch=epoch, tells_ready=below is not None)
        self._call_timeout_s: Final = call_timeout_s
        self.leases: Final = LeaseTable(lease_timeout_s)
        self.ledger: Final = WriteLedger(
            self.table, self.holders, timeout_s=call_timeout_s, first_plan_id=(epoch << COUNTER_BITS) + 1
        )
        self._planner: Final = StorePlanner(
            self.table,
            pinned=self.leases.pinned,
            below=below,
            can_join=self.ledger.can_join,
        )

    # ------------------------------------------------------------------------------------------------ reading

    def lookup(self, keys: Sequence[bytes], *, touch: bool = True) -> int:
        """The number of leading READY keys; with `touch` that is a use of them."""
        run = self.table.ready_run(keys)
        if touch:
            self.table.policy.touch(reversed(run))
        return len(run)

    def pin(self, keys: Sequence[bytes], lease_id: str, client: str, now: float) -> int:
        """As `lookup`, and the keys counted stay READY, in place, while the lease lasts. No key, no lease."""
        run = self.table.ready_run(keys)
        self.table.policy.touch(reversed(run))
        self.leases.hold(lease_id, client, run, now)
        return len(run)

    def hold(
        self, keys: Iterable[bytes], lease_id: str, client: str, now: float, *, timeout_s: float | None = None
    ) -> None:
        """Pin those of `keys` that are READY, wherever they stand; not a use of them."""
        self.leases.hold(lease_id, client, self.table.ready_among(keys), now, timeout_s=timeout_s)

    def prepare_load(
        self, keys: Sequence[bytes], *, lease_id: str, client: str, now: float, start: int = 0
    ) -> LoadPlan:
        """Where to read ``keys[start:]``, as far as READY without a gap from key 0; a use of the whole run.

        The refs are pinned under the lease, which replaces one of the same id; without refs it ends that one.
        """
        _check_start(start)
        run = self.table.ready_run(keys)
        self.table.policy.touch(reversed(run))
        slots = run[start:]
        self.leases.hold(lease_id, client, slots, now, timeout_s=self._call_timeout_s)
        return LoadPlan(lease_id, self.table.refs_of(keys[start : len(run)], slots), start)

    def share(self, plan: LoadPlan, lease_id: str, *, client: str, now: float) -> None:
        """Pin the refs of a load plan whose lease still lasts under one more lease; not another use of them."""
        slots = [ref.slot for ref in plan.refs]
        self.leases.hold(lease_id, client, slots, now, timeout_s=self._call_timeout_s)

    def release(self, lease_id: str) -> bool:
        """End a lease; False if there is none of that id (any more)."""
        return self.leases.release(lease_id)

    def renew(self, lease_id: str, now: float) -> bool:
        """Let a lease last its full time from now; False if there is none of that id (any more)."""
        return self.leases.renew(lease_id, now)

    def keep(self, lease_id: str, *, max_slots: int) -> bool:
        """Let a lease end by release or with its client alone; False if more than `max_slots` slots were held so."""
        return self.leases.keep(lease_id, max_slots=max_slots)

    def kept(self) -> tuple[int, int]:
        """Leases that do not end by time, and the slots they hold."""
        return self.leases.num_kept, len(self.leases.kept_slots)

    # ------------------------------------------------------------------------------------------------ storing

    def prepare_store(
        self, keys: Sequence[bytes], *, client: str, now: float, start: int = 0, rank: int | None = None
    ) -> StorePlan:
        """Reserve slots for those of ``keys[start:]`` that are neither cached nor being written; a use of all present.

        With `rank` None one driver carries the plan to all holders, and each of them must answer. With a rank, every
        rank asks for itself: the first opens the writes, the others join them by key and get the same slots and
        generations; a rank that holds no chunks gets an empty plan, and uses nothing.

        New keys take free slots, then those of chunks that the policy gives up, never of leased or unfinished ones or
        of this request's own keys. Of a prompt that does not fit, the leading part that does is reserved. If a key
        before `start` is unknown, nothing is stored: what followed would never be found.

        A plan with refs must be answered by `complete_store` or `abort_store`; one without is finished.
        """
        plan = self.try_store(keys, client=client, now=now, start=start, rank=rank)
        assert isinstance(plan, StorePlan)  # it was not allowed to be deferred
        return plan

    def try_store(
        self,
        keys: Sequence[bytes],
        *,
        client: str,
        now: float,
        start: int = 0,
        rank: int | None = None,
        defer: bool = False,
        whole: bool = False,
        copy_up: bool = False,
    ) -> StorePlan | Deferred:
        """`prepare_store`, or Deferred and no change.

        With `defer` the plan is exactly the one that would be made after all unfinished plans have been completed and
        all leases released, or else Deferred. With `whole` it leaves nothing out for want of room, or else Deferred.
        With `copy_up`, keys that are cached below are wanted here too.
        """
        _check_start(start)
        if rank is not None and rank not in self.ledger.bit_of:
            return StorePlan(self.ledger.issue_plan_id(), (), (), len(self.table.ready_run(keys)), 0, ())
        joiner = 0 if rank is None else self.ledger.bit_of[rank]
        draft = self._planner.draft(keys, start=start, joiner=joiner, defer=defer, whole=whole, copy_up=copy_up)
        if isinstance(draft, Deferred):
            return draft
        return self._carry_out(draft, keys, client=client, ranks=joiner or self.ledger.everyone, now=now)

    def _carry_out(self, draft: StoreDraft, keys: Sequence[bytes], *, client: str, ranks: int, now: float) -> StorePlan:
        table, joined = self.table, draft.joined
        refs, evicted = table.reserve(draft.new, draft.victims)
        table.note_use(draft.present, [ref.slot for ref in refs], keys if draft.has_hole else ())
        positions = tuple(draft.new.values())
        if joined:
            opened = zip(positions, refs, strict=True)
            by_position = sorted([*opened, *zip(joined.values(), table.refs(list(joined)), strict=True)])
            positions, refs = tuple(position for position, _ in by_position), tuple(ref for _, ref in by_position)
        plan_id = self.ledger.issue_plan_id()
        if refs:
            self.ledger.open_store(plan_id, refs, joined, client=client, ranks=ranks, now=now)
        return StorePlan(plan_id, refs, positions, draft.num_ready, draft.num_refused, evicted)

    def prepare_request(
        self, keys: Sequence[bytes], *, lease_id: str, client: str, now: float, defer: bool, whole: bool = False
    ) -> tuple[LoadPlan, StorePlan] | Deferred:
        """`prepare_load`, then `prepare_store` led by a driver, of one request: both plans, or Deferred and no change.

        The store is drafted first, so that it can still be refused; the load changes nothing that the draft stands on.
        With `defer`, Deferred too if the run to load is stopped by a key that is being written.
        """
        draft = self._planner.draft(keys, start=0, joiner=0, defer=defer, whole=whole, copy_up=False)
        if isinstance(draft, Deferred):
            return draft
        if defer and self.table.is_run_being_written(keys):
            return Deferred.KEY_BEING_WRITTEN
        load = self.prepare_load(keys, lease_id=lease_id, client=client, now=now)
        return load, self._carry_out(draft, keys, client=client, ranks=self.ledger.everyone, now=now)

    def complete_store(
        self, plan_id: int, ranks: Collection[int], *, done: Iterable[int], failed: Iterable[int] = ()
    ) -> bool:
        """These ranks have committed, or will not commit, these positions of ``plan.refs``; the rest may follow later.

        A chunk that failed anywhere is aborted: its key is unknown at once, its slot free when every rank that was
        handed it has answered. A rank's first answer for a chunk counts, later ones are ignored. False if the plan is
        finished (or never was); ProtocolError, and nothing taken in, for a rank or position that the plan has not.
        """
        return self.ledger.complete_store(plan_id, ranks, done, failed)

    def abort_store(self, plan_id: int) -> bool:
        """Nobody writes for this plan any more: every answer it is still owed is "failed". False as above."""
        return self.ledger.abort_store(plan_id)

    # ------------------------------------------------------------------------------- ending what others left behind

    def expire(self, now: float) -> Expired:
        """End leases whose time is up, and abort what is unfinished of store plans past their deadline.

        A rank that was handed an aborted chunk still owes its answer (`unsettled`): a late one frees the slot, and
        makes nothing READY. Costs next to nothing when nothing is due.
        """
        lease_ids = self.leases.expire(now)
        plan_ids, aborted = self.ledger.expire(now)
        return Expired(tuple(lease_ids), tuple(plan_ids), tuple(aborted))

    def drop_client(self, client: str) -> Expired:
        """End a client's leases and abort its unfinished store plans, as if their time were up."""
        lease_ids = self.leases.drop_client(client)
        plan_ids, aborted = self.ledger.drop_client(client)
        return Expired(tuple(lease_ids), tuple(plan_ids), tuple(aborted))

    def unsettled(self, rank: int) -> list[ChunkRef]:
        """The quarantined chunks that this rank has still to answer for, or to forget."""
        return self.ledger.unsettled(rank)

    def settle(self, rank: int, refs: Iterable[ChunkRef]) -> int:
        """It is proven that the rank does not write these refs, and never will.

        The writer has answered, or is dead. One that is being written, and that the rank has not committed, is aborted.
        Refs for which the rank owes nothing (any more) are ignored. Answers how many it owed.
        """
        return self.ledger.settle(rank, refs)

    # ------------------------------------------------------------------------------------------------ tiers below

    def adopt(self, chunks: Sequence[tuple[bytes, int]]) -> list[int]:
        """Take in (key, generation) pairs as READY chunks of earlier lives, the least recently used first.

        Their generations are of earlier epochs. Of what does not fit the oldest are left out, as are all but the newest
        of a key; answers the positions that were.
        """
        return self.table.adopt(chunks)

    def evict(self, refs: Iterable[ChunkRef], *, even_leased: bool = False) -> list[ChunkRef]:
        """Forget those of `refs` that are READY and not leased, or leased even so; which these were."""
        pinned = () if even_leased else self.leases.pinned
        evicted = [ref for ref in refs if self.table.is_ready(ref) and ref.slot not in pinned]
        slots = [ref.slot for ref in evicted]
        self.leases.forget(slots)
        self.table.evict(slots)
        return evicted

    # ------------------------------------------------------------------------------------------------ clearing

    def prepare_clear(self, keys: Iterable[bytes] | None = None) -> ClearPlan:
        """Forget these keys, or with None all: no lookup finds them from now on, but for leased ones, which are kept.

        Chunks that are being written are aborted, and count neither as removed nor as kept. Every holder must answer by
        `complete_clear` if the plan has refs.
        """
        return plan_clear(self.table, self.ledger, keys, pinned=self.leases.pinned)

    def complete_clear(self, plan_id: int, rank: int) -> bool:
        """The rank has forgotten all refs of the plan; when all have, their slots are free. False if it is finished."""
        return self.ledger.complete_clear(plan_id, rank)

    # ------------------------------------------------------------------------------------------------ looking in

    def counts(self) -> IndexCounts:
        """How full the index is."""
        return count_slots(self.table, self.ledger, num_leases=len(self.leases))

    def entries(self) -> Iterator[tuple[ChunkRef, SlotState]]:
        """The chunks in the key map, each READY or WRITING, in the order in which they would be evicted."""
        table = self.table
        slots = list(table.policy.candidates())
        return zip(table.refs(slots), [SlotState(table.states[slot]) for slot in slots], strict=True)

    def check_integrity(self) -> None:
        """Raise an IntegrityError that lists every contradiction among the parts of the index, if there is any."""
        found = contradictions(self.table, self.ledger, self.leases)
        if found:
            raise IntegrityError("the index contradicts itself: " + "; ".join(found))


def _check_start(start: int) -> None:
    if start < 0:
        raise InvalidRequestError(f"start must be the index of a chunk, not {start}")
