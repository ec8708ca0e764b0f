"""The self-check of the index: everything that two of its parts both know must agree.

Apart from the parts, because none of them alone can see a contradiction. It costs time in proportion to the number of
slots; tests run it after every step.
"""

from collections import Counter

from lmcache_ray.index.leases import LeaseTable
from lmcache_ray.index.plans import IndexCounts
from lmcache_ray.index.slot_table import SlotState, SlotTable
from lmcache_ray.index.write_ledger import OpenStore, WriteLedger

_MAPPED = (SlotState.WRITING, SlotState.READY)


def count_slots(table: SlotTable, ledger: WriteLedger, *, num_leases: int) -> IndexCounts:
    """How full the index is."""
    states = table.states
    return IndexCounts(
        ready=states.count(SlotState.READY),
        writing=states.count(SlotState.WRITING),
        free=states.count(SlotState.FREE),
        quarantined=states.count(SlotState.QUARANTINED),
        leases=num_leases,
        plans=len(ledger.stores) + len(ledger.clears),
        capacity=table.capacity,
    )


def contradictions(table: SlotTable, ledger: WriteLedger, leases: LeaseTable) -> list[str]:
    """Every contradiction, one sentence each: empty when sound."""
    return [
        *_of_map(table),
        *_of_free_slots(table),
        *_of_policy(table),
        *_of_generations(table),
        *_of_leases(table, leases),
        *_of_answers(table, ledger),
        *_of_plans(table, ledger),
    ]


def _of_map(table: SlotTable) -> list[str]:
    """Key map and slots name each other; only WRITING and READY slots are in the map."""
    found = [
        f"key {key.hex()} is mapped to slot {slot}, which is {SlotState(table.states[slot]).name} and has another key"
        for key, slot in table.slot_of.items()
        if table.key_of[slot] != key
    ]
    for slot, state in enumerate(table.states):
        key = table.key_of[slot]
        if (key is None) != (state == SlotState.FREE):
            found.append(f"slot {slot} is {SlotState(state).name} but its key is {key!r}")
        elif key is not None and (table.slot_of.get(key) == slot) != (state in _MAPPED):
            found.append(f"slot {slot} is {SlotState(state).name} but its key is mapped to {table.slot_of.get(key)}")
    return found


def _of_free_slots(table: SlotTable) -> list[str]:
    listed = Counter(table.free_slots)
    free = set(table.slots_in(SlotState.FREE))
    return [
        *(f"slot {slot} is {count} times in the free list" for slot, count in listed.items() if count > 1),
        *(f"slot {slot} is listed as free but is not FREE" for slot in sorted(listed.keys() - free)),
        *(f"slot {slot} is FREE but not listed" for slot in sorted(free - listed.keys())),
    ]


def _of_policy(table: SlotTable) -> list[str]:
    ordered = Counter(table.policy.candidates())
    mapped = set(table.slot_of.values())
    return [
        *(f"slot {slot} is {count} times in the eviction order" for slot, count in ordered.items() if count > 1),
        *(f"slot {slot} is in the eviction order but not in the map" for slot in sorted(ordered.keys() - mapped)),
        *(f"slot {slot} is in the map but not in the eviction order" for slot in sorted(mapped - ordered.keys())),
    ]


def _of_generations(table: SlotTable) -> list[str]:
    issued = Counter(generation for generation in table.generation_of if generation)
    return [
        *(f"generation {generation} has {count} slots" for generation, count in issued.items() if count > 1),
        *(f"generation {number} is not issued yet" for number in issued if number >= table.next_generation),
    ]


def _of_leases(table: SlotTable, leases: LeaseTable) -> list[str]:
    """Pins are those of the leases, on READY slots only."""
    return leases.contradictions() + [
        f"slot {slot} is leased but {SlotState(table.states[slot]).name}"
        for slot in sorted(leases.pinned_slots())
        if table.states[slot] != SlotState.READY
    ]


def _of_answers(table: SlotTable, ledger: WriteLedger) -> list[str]:
    """WRITING slots have an open plan and await somebody, QUARANTINED ones owe an answer, others owe nothing."""
    found = []
    for slot, state in enumerate(table.states):
        owing, unjoined, plans = ledger.owing.get(slot, 0), ledger.unjoined.get(slot, 0), ledger.plans_of.get(slot, ())
        if state == SlotState.WRITING:
            sound = bool(owing | unjoined) and not owing & unjoined and bool(plans)
        elif state == SlotState.QUARANTINED:
            sound = bool(owing) and not unjoined
        else:
            sound = slot not in ledger.owing and slot not in ledger.unjoined and slot not in ledger.plans_of
        if not sound:
            found.append(
                f"slot {slot} is {SlotState(state).name} with answers owed by {owing:b}, not joined by {unjoined:b}, "
                f"plans {[plan.plan_id for plan in plans]}"
            )
        found += [
            f"slot {slot} belongs to store plan {plan.plan_id}, which is closed"
            for plan in plans
            if (owing & plan.ranks or (plan is plans[0] and state == SlotState.WRITING))
            and ledger.stores.get(plan.plan_id) is not plan
        ]
    return found


def _of_plans(table: SlotTable, ledger: WriteLedger) -> list[str]:
    """What an open plan counts is what its slots say, and it counts something."""
    found = []
    for plan in ledger.stores.values():
        unanswered, undecided = _recount(plan, table, ledger)
        if (plan.unanswered, plan.undecided) != (unanswered, undecided) or not unanswered + undecided:
            found.append(
                f"store plan {plan.plan_id} counts {plan.unanswered} unanswered and {plan.undecided} undecided; "
                f"its slots say {unanswered} and {undecided}"
            )
    for plan_id, clear in ledger.clears.items():
        owing = 0
        for _, slot, generation in clear.refs:
            owing |= ledger.owing.get(slot, 0) if table.generation_of[slot] == generation else 0
        if owing & ~clear.owing or not clear.owing:
            found.append(f"clear plan {plan_id} awaits {clear.owing:b}, its slots {owing:b}")
    return found


def _recount(plan: OpenStore, table: SlotTable, ledger: WriteLedger) -> tuple[int, int]:
    unanswered = undecided = 0
    for _, slot, generation in plan.refs:
        plans = ledger.plans_of.get(slot, ())
        if plans and table.generation_of[slot] == generation:
            unanswered += (ledger.owing[slot] & plan.ranks).bit_count()
            undecided += table.states[slot] == SlotState.WRITING and plans[:1] == (plan,)
    return unanswered, undecided
