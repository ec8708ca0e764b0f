"""What a clear takes out of use at once: the chunks that are READY and not leased, and the writes that it aborts.

Apart from the index, as the planning of stores is.
"""

from collections.abc import Container, Iterable

from lmcache_ray.index.plans import ClearPlan
from lmcache_ray.index.slot_table import SlotState, SlotTable
from lmcache_ray.index.write_ledger import WriteLedger


def plan_clear(
    table: SlotTable, ledger: WriteLedger, keys: Iterable[bytes] | None, *, pinned: Container[int]
) -> ClearPlan:
    """See `CacheIndex.prepare_clear`."""
    known = table.slot_of.values() if keys is None else map(table.slot_of.get, dict.fromkeys(keys))
    slots = [slot for slot in known if slot is not None]
    writing = [slot for slot in slots if table.states[slot] == SlotState.WRITING]
    ready = [slot for slot in slots if table.states[slot] == SlotState.READY]
    removed = [slot for slot in ready if slot not in pinned]
    kept = table.refs([slot for slot in ready if slot in pinned])
    aborted = table.refs(writing)
    for slot in writing:
        ledger.abort_write(slot)
    plan_id = ledger.issue_plan_id()
    return ClearPlan(plan_id, ledger.open_clear(plan_id, removed), aborted, kept)
