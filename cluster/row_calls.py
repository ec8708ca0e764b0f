"""`store` and `retrieve` of rows of the ranks' paged KV, many requests at a time.

The number of actor messages decides the speed, so a batch is one message to the coordinator for all its plans, one to
each rank for all its copies, and one to the coordinator for all its acknowledgements and releases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lmcache_ray.errors import ClusterError, RankDiedError, RankUnavailableError
from lmcache_ray.layout import Placement
from lmcache_ray.shard import leading

from .batching import each_item, nbytes_of_refs
from .deadline import Deadline
from .link import ClusterLink
from .messages import (
    LoadItem,
    LoadTask,
    PackedRefs,
    PackedRows,
    PlannedLoad,
    PlannedStore,
    StepResult,
    StoreDone,
    StoreItem,
    StoreTask,
    pack_flags,
    pack_keys,
    unpack_flags,
    unpack_numbers,
)
from .packed_calls import pack, unpack
from .ray_calls import Ref, calling, wait_for_rank
from .requests import CheckedRows, HasPrompt, Request, check_rows
from .rounds import load_rounds, store_rounds


def store_rows(link: ClusterLink, requests: Sequence[Request]) -> list[int | Exception]:
    """Per request the leading tokens READY at return, or why it failed."""
    deadline = link.deadline()

    def check(request: Request) -> CheckedRows:
        return check_rows(link.hasher, request, num_kv_rows=link.num_kv_rows, aligned=True)

    return each_item(requests, check, lambda items: _store_batch(link, items, deadline), nbytes_of=_nbytes_of)


def retrieve_rows(link: ClusterLink, requests: Sequence[Request]) -> list[np.ndarray | Exception]:
    """Per request bool ``[num_tokens]``, True where the row is good on every rank, or why it failed."""
    deadline = link.deadline()

    def check(request: Request) -> CheckedRows:
        return check_rows(link.hasher, request, num_kv_rows=link.num_kv_rows, aligned=False)

    return each_item(requests, check, lambda items: _retrieve_batch(link, items, deadline), nbytes_of=_nbytes_of)


def _nbytes_of(item: CheckedRows) -> int:
    """Bytes of a step about all of the item's chunks."""
    return nbytes_of_refs(item) + PackedRows.most_nbytes(item.rows, len(item.prompt.keys))


# -- store ------------------------------------------------------------------------------------------------------------


def _store_batch(link: ClusterLink, items: Sequence[CheckedRows], deadline: Deadline) -> list[int | Exception]:
    wanted = [StoreItem(pack_keys(item.prompt.keys), item.start // link.hasher.chunk_size) for item in items]
    results: dict[int, int | Exception] = {}
    for indices, planned in store_rounds(link, wanted, deadline):
        stored = _store_planned(link, [items[index] for index in indices], planned, deadline)
        results.update(zip(indices, stored, strict=True))
    return [results[index] for index in range(len(items))]


def _store_planned(
    link: ClusterLink, items: Sequence[CheckedRows], planned: Sequence[PlannedStore], deadline: Deadline
) -> list[int | Exception]:
    writing = [index for index, plan in enumerate(planned) if len(plan.refs)]
    written: dict[int, dict[int, bytes]] = {}
    failures: dict[int, Exception] = {}
    if writing:
        tasks = [_store_task(items[index], planned[index]) for index in writing]
        results, failure = _fan_out(link, link.world.layout.holders, [], tasks, None, deadline)
        written = {index: {rank: results[rank].stored[at] for rank in results} for at, index in enumerate(writing)}
        failures = {} if failure is None else dict.fromkeys(writing, failure)
    return report_stores(link, items, planned, written, failures, deadline)


def _store_task(item: CheckedRows, plan: PlannedStore) -> StoreTask:
    return StoreTask(plan.refs, PackedRows.pack(item.prompt.rows(item.rows, unpack_numbers(plan.positions))))


def report_stores(
    link: ClusterLink,
    items: Sequence[HasPrompt],
    planned: Sequence[PlannedStore],
    written: Mapping[int, Mapping[int, bytes]],
    failures: Mapping[int, Exception],
    deadline: Deadline,
) -> list[int | Exception]:
    """Report what was written, ``written[item][rank]``; per item the leading READY tokens, or its failure."""
    num_ready = [plan.num_ready for plan in planned]
    # Without a write in this batch nothing has changed since it was planned.
    open_items = [index for index, count in enumerate(num_ready) if written and count < len(items[index].prompt.keys)]
    done = [
        StoreDone(plan_id, dict(written.get(index, {})))
        for index in open_items
        if (plan_id := planned[index].plan_id) is not None
    ]
    if done:
        counts = link.coordinator.complete(done, timeout_s=deadline.to_report_s())
        num_ready = [counts[open_items.index(at)] if at in open_items else count for at, count in enumerate(num_ready)]
    return [failures.get(at, item.prompt.tokens_in(num_ready[at])) for at, item in enumerate(items)]


# -- retrieve ---------------------------------------------------------------------------------------------------------


def _retrieve_batch(link: ClusterLink, items: Sequence[CheckedRows], deadline: Deadline) -> list[np.ndarray]:
    leases = [link.lease_names.for_load() for _ in items]
    wanted = [
        LoadItem(pack_keys(item.prompt.keys), item.start // link.hasher.chunk_size, (lease,))
        for item, lease in zip(items, leases, strict=True)
    ]
    results = [np.zeros(item.prompt.num_tokens, dtype=bool) for item in items]
    for indices, planned in load_rounds(link, wanted, deadline):
        found = [(items[index], plan, results[index]) for index, plan in zip(indices, planned, strict=True)]
        loads = [load for load in found if _is_wanted(link, *load[:2])]
        try:
            if loads:
                _load_into(link, loads, deadline)
        finally:
            pinned = [leases[index] for index, plan in zip(indices, planned, strict=True) if len(plan.refs)]
            if pinned:
                link.release(pinned)
    return results


def _is_wanted(link: ClusterLink, item: CheckedRows, plan: PlannedLoad) -> bool:
    num_tokens = item.prompt.tokens_in(plan.start + len(plan.refs)) - item.start if len(plan.refs) else 0
    return num_tokens > 0 and num_tokens >= link.world.min_retrieve_tokens


def _load_into(
    link: ClusterLink, loads: Sequence[tuple[CheckedRows, PlannedLoad, np.ndarray]], deadline: Deadline
) -> None:
    """Carry planned loads out on every rank and mark in each result the rows that are good on all of them."""
    tasks = [_load_task(item, plan) for item, plan, _ in loads]
    ranks = range(link.world.layout.world_size)
    first_rank = _FirstRankSource(link) if link.world.layout.placement is Placement.FIRST_RANK else None
    flags, failure = _fan_out(link, ranks, tasks, [], first_rank, deadline)
    if failure is not None:
        raise failure
    for at, (item, plan, result) in enumerate(loads):
        num_good = min(leading(unpack_flags(flags[rank].loaded[at])) if rank in flags else 0 for rank in ranks)
        if num_good < len(plan.refs):
            link.suspect()
        result[item.start : max(item.start, item.prompt.tokens_in(plan.start + num_good))] = True


def _load_task(item: CheckedRows, plan: PlannedLoad) -> LoadTask:
    positions = range(plan.start, plan.start + len(plan.refs))
    rows = item.prompt.rows(item.rows, positions, start=item.start)
    return LoadTask(plan.refs, PackedRows.pack(rows), item.start - item.prompt.spans[plan.start][0])


class _FirstRankSource:
    """Where each rank of a first-rank world reads rank 0's chunks: its arena on its node, one transfer a node else."""

    def __init__(self, link: ClusterLink) -> None:
        self._link = link
        self._first = link.hellos[0]
        self._payload: Ref | None = None

    def for_rank(self, rank: int, tasks: Sequence[LoadTask]) -> tuple[list[LoadTask], Ref | None]:
        """The tasks as this rank must do them, and the payload they need."""
        if self._link.hellos[rank].node_id == self._first.node_id:
            return [replace(task, arena_path=self._first.arena_path) for task in tasks], None
        if self._payload is None:  # one export serves all other nodes: Ray moves it once to each
            refs = [ref for task in tasks for ref in task.refs.unpack()]
            self._payload = self._link.workers[0].export.remote(PackedRefs.pack(refs))
        shifted, start = [], 0
        for task in tasks:
            shifted.append(replace(task, payload_start=start))
            start += len(task.refs)
        return shifted, self._payload


# -- both -------------------------------------------------------------------------------------------------------------


def _fan_out(
    link: ClusterLink,
    ranks: Sequence[int],
    loads: Sequence[LoadTask],
    stores: Sequence[StoreTask],
    first_rank: _FirstRankSource | None,
    deadline: Deadline,
) -> tuple[dict[int, StepResult], Exception | None]:
    """One `step` message to each rank; the results of those that answered, and what else went wrong there.

    A rank that is proven dead answers False for everything. One that is silent is left out: it may still be writing,
    so its slots are given back only when the coordinator has settled them.
    """
    nothing = StepResult(
        [pack_flags([False] * len(task.refs)) for task in loads],
        [pack_flags([False] * len(task.refs)) for task in stores],
    )
    references: dict[int, Ref] = {}
    results: dict[int, StepResult] = {}
    failure: Exception | None = None
    for rank in ranks:
        try:
            with calling(f"rank {rank}"):
                tasks, payload = (list(loads), None) if first_rank is None else first_rank.for_rank(rank, loads)
                references[rank] = link.workers[rank].step.remote(pack((tasks, list(stores))), payload)
        except ClusterError:  # the message was not taken, so the rank does nothing
            results[rank] = nothing
    for rank, reference in references.items():
        try:
            results[rank] = unpack(wait_for_rank(reference, timeout_s=deadline.remaining_s(), rank=rank))
        except RankDiedError:
            results[rank] = nothing
        except RankUnavailableError:
            link.suspect()
        except Exception as error:  # whatever a step raised, it is over, and what it did must be reported
            results[rank] = nothing
            failure = failure or error
    return results, failure
