"""Who still owes an answer for which slot: open store and clear plans, and when a slot is READY or FREE again.

A chunk becomes READY when every holder rank has committed it. One failure aborts it for all, but its slot must not be
given away while another rank may still be writing into it: it stays QUARANTINED until each rank that was handed the
slot has answered, or is proven to write no more. Ranks are bits of an integer here, so that "all have answered" is
one comparison.

In a store led by one driver the plan is handed to all holders at once. Where every rank stores by itself, the first to
ask opens the write and the others join it; it then waits for those that have not joined, too.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from lmcache_ray.errors import ProtocolError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.slot_table import SlotState, SlotTable


@dataclass(slots=True, eq=False)
class OpenStore:
    """A store plan that is not finished: ranks owe `unanswered` answers, and `undecided` writes that it opened are
    neither READY nor aborted."""

    plan_id: int
    client: str
    ranks: int
    refs: tuple[ChunkRef, ...]
    deadline: float
    unanswered: int
    undecided: int


@dataclass(slots=True, eq=False)
class OpenClear:
    """A clear plan that the ranks in `owing` have not carried out."""

    refs: tuple[ChunkRef, ...]
    owing: int


class WriteLedger:
    """The answers owed for the WRITING and QUARANTINED slots of `table`, by the ranks `holders`.

    A store plan has `timeout_s` seconds. Plan ids count up from `first_plan_id`.
    """

    def __init__(self, table: SlotTable, holders: Sequence[int], *, timeout_s: float, first_plan_id: int) -> None:
        self.bit_of: Final = {rank: 1 << index for index, rank in enumerate(holders)}
        self.everyone: Final = (1 << len(holders)) - 1
        self.owing: Final[dict[int, int]] = {}
        self.unjoined: Final[dict[int, int]] = {}
        self.plans_of: Final[dict[int, tuple[OpenStore, ...]]] = {}
        self.stores: Final[dict[int, OpenStore]] = {}
        self.clears: Final[dict[int, OpenClear]] = {}
        self._table: Final = table
        self._timeout_s: Final = timeout_s
        self._next_plan_id = first_plan_id
        self._none_due_before = inf

    def issue_plan_id(self) -> int:
        """A plan id that no other plan has."""
        self._next_plan_id += 1
        return self._next_plan_id - 1

    def can_join(self, slot: int, rank_bit: int) -> bool:
        """True if the slot is being written by ranks that store by themselves, and this one has not been handed it."""
        return bool(self.unjoined.get(slot, 0) & rank_bit)

    # ---------------------------------------------------------------------------------------------- stores

    def open_store(
        self, plan_id: int, refs: tuple[ChunkRef, ...], joined: Collection[int], *, client: str, ranks: int, now: float
    ) -> None:
        """Hand `refs`, all WRITING, to `ranks` (bits). All but the slots in `joined` are opened by this plan."""
        num_opened = len(refs) - len(joined)
        plan = OpenStore(plan_id, client, ranks, refs, now + self._timeout_s, len(refs) * ranks.bit_count(), num_opened)
        self.stores[plan_id] = plan
        self._none_due_before = min(self._none_due_before, plan.deadline)
        opened = [slot for _, slot, _ in refs if slot not in joined]
        self.owing.update(dict.fromkeys(opened, ranks))
        self.plans_of.update(dict.fromkeys(opened, (plan,)))
        if ranks != self.everyone:
            self._await_others(plan, joined)

    def _await_others(self, plan: OpenStore, joined: Collection[int]) -> None:
        for _, slot, _ in plan.refs:
            if slot in joined:
                self.owing[slot] |= plan.ranks
                self.plans_of[slot] += (plan,)
            still_unjoined = self.unjoined.pop(slot, self.everyone) & ~plan.ranks
            if still_unjoined:
                self.unjoined[slot] = still_unjoined

    def complete_store(self, plan_id: int, ranks: Collection[int], done: Iterable[int], failed: Iterable[int]) -> bool:
        """See `CacheIndex.complete_store`."""
        plan = self.stores.get(plan_id)
        if plan is None:
            return False
        bits = 0
        for rank in ranks:
            bits |= self._bit(rank)
            if not plan.ranks & self._bit(rank):
                raise ProtocolError(f"rank {rank} has no part in store plan {plan_id}")
        done, failed = _checked_positions(plan, done), _checked_positions(plan, failed)
        if failed and not set(done).isdisjoint(failed):
            raise ProtocolError(f"ranks {list(ranks)} call chunks of store plan {plan_id} both done and failed")
        plan.unanswered -= self._record_done(plan.refs, done, bits)
        for position in failed:
            _, slot, generation = plan.refs[position]
            if self._writes(slot, generation, bits):
                plan.unanswered -= (self.owing[slot] & bits).bit_count()
                self._fail(slot, bits)
        self._close_if_finished(plan)
        return True

    def _record_done(self, refs: Sequence[ChunkRef], positions: Sequence[int], ranks: int) -> int:
        """Take in commits of these ranks (bits); answers how many they owed."""
        owing, plans_of, unjoined = self.owing, self.plans_of, self.unjoined
        generation_of = self._table.generation_of
        num_owed = 0
        written: list[int] = []
        for position in positions:
            _, slot, generation = refs[position]
            owed = owing.get(slot, 0)
            answered = owed & ranks
            if not answered or slot not in plans_of or generation_of[slot] != generation:  # as in _writes
                continue
            num_owed += answered.bit_count()
            owing[slot] = owed ^ answered
            if owed == answered and slot not in unjoined:
                written.append(slot)
        self._all_have_answered(written)
        return num_owed

    def _all_have_answered(self, slots: Iterable[int]) -> None:
        """Nobody owes anything for these slots any more: what is WRITING becomes READY, what is QUARANTINED FREE."""
        table, writing = self._table, SlotState.WRITING.value
        for slot in slots:
            del self.owing[slot]
            plans = self.plans_of.pop(slot, ())
            if table.states[slot] == writing:
                table.mark_ready(slot)
                self._decide(plans[0])
            else:
                table.free(slot)

    def abort_store(self, plan_id: int) -> bool:
        """See `CacheIndex.abort_store`."""
        plan = self.stores.get(plan_id)
        if plan is None:
            return False
        for _, slot, generation in plan.refs:
            if self._writes(slot, generation, plan.ranks):
                self._fail(slot, plan.ranks)
        plan.unanswered = 0
        self._close_if_finished(plan)
        return True

    # ------------------------------------------------------------------------------- the end of a write

    def _owes(self, slot: int, generation: int, ranks: int) -> bool:
        """True if one of these ranks has still to write, or to clear, that use of the slot."""
        return bool(self.owing.get(slot, 0) & ranks) and self._table.generation_of[slot] == generation

    def _writes(self, slot: int, generation: int, ranks: int) -> bool:
        """True if one of these ranks has still to write it. What a clear is owed, no store plan can answer."""
        return slot in self.plans_of and self._owes(slot, generation, ranks)

    def _fail(self, slot: int, ranks: int) -> None:
        """These ranks will not commit the slot, and do not write it any more."""
        self.owing[slot] &= ~ranks
        if self._table.states[slot] == SlotState.WRITING:
            self.abort_write(slot)
        elif not self.owing[slot]:
            self._all_have_answered((slot,))

    def abort_write(self, slot: int) -> None:
        """A WRITING slot will not become READY; it is FREE if nobody has still to answer, else QUARANTINED."""
        self._table.withdraw(slot)
        self.unjoined.pop(slot, None)
        self._decide(self.plans_of[slot][0])
        if not self.owing[slot]:
            self._all_have_answered((slot,))

    def _decide(self, opener: OpenStore) -> None:
        """One write that this plan opened is READY or aborted."""
        opener.undecided -= 1
        self._close_if_finished(opener)

    def _close_if_finished(self, plan: OpenStore) -> None:
        if not plan.unanswered and not plan.undecided:
            self.stores.pop(plan.plan_id, None)

    def expire(self, now: float) -> tuple[list[int], list[ChunkRef]]:
        """Abort what is unfinished of plans past their deadline: their ids and the chunks aborted."""
        if now < self._none_due_before:
            return [], []
        ended = self._end([plan for plan in self.stores.values() if plan.deadline <= now])
        self._none_due_before = min((plan.deadline for plan in self.stores.values()), default=inf)
        return ended

    def drop_client(self, client: str) -> tuple[list[int], list[ChunkRef]]:
        """Abort what is unfinished of the client's plans: their ids and the chunks aborted."""
        return self._end([plan for plan in self.stores.values() if plan.client == client and plan.deadline < inf])

    def _end(self, plans: Sequence[OpenStore]) -> tuple[list[int], list[ChunkRef]]:
        """Abort the writes that these plans opened, or owe answers for. The plans stay while answers are owed."""
        aborted: list[ChunkRef] = []
        for plan in plans:
            plan.deadline = inf
            for ref in plan.refs:
                _, slot, generation = ref
                if self._table.states[slot] != SlotState.WRITING or self._table.generation_of[slot] != generation:
                    continue
                if self.owing[slot] & plan.ranks or self.plans_of[slot][0] is plan:
                    aborted.append(ref)
                    self.abort_write(slot)
        return [plan.plan_id for plan in plans], aborted

    # ------------------------------------------------------------------------------- settling and clearing

    def unsettled(self, rank: int) -> list[ChunkRef]:
        """See `CacheIndex.unsettled`."""
        bit = self._bit(rank)
        slots = [slot for slot in self._table.slots_in(SlotState.QUARANTINED) if self.owing[slot] & bit]
        return list(self._table.refs(slots))

    def settle(self, rank: int, refs: Iterable[ChunkRef]) -> int:
        """See `CacheIndex.settle`."""
        bit = self._bit(rank)
        current = [slot for _, slot, generation in refs if self._table.is_current(slot, generation)]
        num_settled = 0
        for slot in current:
            if not self.owing.get(slot, 0) & bit:
                continue
            num_settled += 1
            plans = self.plans_of.get(slot, ())
            self._fail(slot, bit)
            for plan in plans:
                if plan.ranks & bit:
                    plan.unanswered -= 1
                    self._close_if_finished(plan)
        self._finish_clears(rank)
        return num_settled

    def open_clear(self, plan_id: int, slots: Sequence[int]) -> tuple[ChunkRef, ...]:
        """Take READY slots out of use until every holder has cleared them."""
        for slot in slots:
            self._table.withdraw(slot)
            self.owing[slot] = self.everyone
        refs = self._table.refs(slots)
        if refs:
            self.clears[plan_id] = OpenClear(refs, self.everyone)
        return refs

    def complete_clear(self, plan_id: int, rank: int) -> bool:
        """See `CacheIndex.complete_clear`."""
        bit = self._bit(rank)
        clear = self.clears.get(plan_id)
        if clear is None:
            return False
        for _, slot, generation in clear.refs:
            if self._owes(slot, generation, bit):
                self._fail(slot, bit)
        clear.owing &= ~bit
        if not clear.owing:
            del self.clears[plan_id]
        return True

    def _finish_clears(self, rank: int) -> None:
        """Complete the clears for which the rank owes no slot any more: it has settled them one by one."""
        bit = self._bit(rank)
        for plan_id, clear in list(self.clears.items()):
            if not any(self._owes(slot, generation, bit) for _, slot, generation in clear.refs):
                self.complete_clear(plan_id, rank)

    def _bit(self, rank: int) -> int:
        bit = self.bit_of.get(rank)
        if bit is None:
            raise ProtocolError(f"rank {rank} holds no chunks; holders are {', '.join(map(str, self.bit_of))}")
        return bit


def _checked_positions(plan: OpenStore, positions: Iterable[int]) -> Sequence[int]:
    """The positions as a sequence; ProtocolError if one is not a position of `plan.refs`."""
    positions = tuple(positions)
    if positions and not 0 <= min(positions) <= max(positions) < len(plan.refs):
        raise ProtocolError(
            f"store plan {plan.plan_id} has chunks 0 to {len(plan.refs) - 1}, but an answer names chunks "
            f"{min(positions)} to {max(positions)}"
        )
    return positions
