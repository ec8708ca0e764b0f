"""`store` and `retrieve` of rows of the ranks' paged KV, many requests at a time.

The number of actor messages decides the speed, so a batch is one message to the coordinator for all its plans, one to
each rank for all its copies, and one to the coordinator for all its acknowledgements and releases.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from lmcache_ray.errors import LMCacheRayError, RankDiedError, RankUnavailableError
from lmcache_ray.layout import Placement
from lmcache_ray.prompt import Prompt
from lmcache_ray.shard import leading

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
    batches,
    pack_flags,
    pack_keys,
    unpack_flags,
    unpack_numbers,
)
from .ray_calls import Ref, wait_for_rank
from .requests import CheckedRows, Request, check_rows


class HasPrompt(Protocol):
    """A checked item of a batch."""

    @property
    def prompt(self) -> Prompt:
        """Its prompt."""
        ...


Item = TypeVar("Item")
Result = TypeVar("Result")


def store_rows(link: ClusterLink, requests: Sequence[Request]) -> list[int | Exception]:
    """Per request the leading tokens READY at return, or why it failed."""

    def check(request: Request) -> CheckedRows:
        return check_rows(link.hasher, request, num_kv_rows=link.num_kv_rows, aligned=True)

    return each_item(requests, check, lambda items: _store_batch(link, items), size_of=lambda item: item.keys_nbytes)


def retrieve_rows(link: ClusterLink, requests: Sequence[Request]) -> list[np.ndarray | Exception]:
    """Per request bool ``[num_tokens]``, True where the row is good on every rank, or why it failed."""

    def check(request: Request) -> CheckedRows:
        return check_rows(link.hasher, request, num_kv_rows=link.num_kv_rows, aligned=False)

    return each_item(requests, check, lambda items: _retrieve_batch(link, items), size_of=lambda item: item.keys_nbytes)


def each_item(
    requests: Sequence[Request],
    check: Callable[[Request], Item],
    run: Callable[[Sequence[Item]], Sequence[Result]],
    *,
    size_of: Callable[[Item], int],
) -> list[Result | Exception]:
    """Check each request, run the good ones in batches that fit a message, and put every answer in its place.

    A wrong request fails alone; an error of a whole batch is the answer of each of its items.
    """
    results: list[Result | Exception | None] = [None] * len(requests)
    good: list[tuple[int, Item]] = []
    for position, request in enumerate(requests):
        try:
            good.append((position, check(request)))
        except (LMCacheRayError, TypeError) as error:
            results[position] = error
    for batch in batches([size_of(item) for _, item in good]):
        part = [good[index] for index in batch]
        try:
            answers: Sequence[Result | Exception] = run([item for _, item in part])
        except LMCacheRayError as error:
            answers = [error] * len(part)
        for (position, _), answer in zip(part, answers, strict=True):
            results[position] = answer
    return results  # type: ignore[return-value]  # every place is filled now


def _store_batch(link: ClusterLink, items: Sequence[CheckedRows]) -> list[int]:
    chunk_size, deadline = link.hasher.chunk_size, link.deadline()
    wanted = [StoreItem(pack_keys(item.prompt.keys), item.start // chunk_size) for item in items]
    planned: list[PlannedStore] = link.ask("prepare_stores", link.client_id, wanted)  # type: ignore[assignment]
    writing = [index for index, plan in enumerate(planned) if len(plan.refs)]
    flags: dict[int, dict[int, bytes]] = {}
    failure: Exception | None = None
    if writing:
        tasks = [_store_task(items[index], planned[index]) for index in writing]
        results, failure = _fan_out(link, link.world.layout.holders, [], tasks, None, deadline)
        flags = {index: {rank: results[rank].stored[at] for rank in results} for at, index in enumerate(writing)}
    num_ready = report_stores(link, items, planned, flags, deadline)
    if failure is not None:
        raise failure
    return [item.prompt.tokens_in(count) for item, count in zip(items, num_ready, strict=True)]


def report_stores(
    link: ClusterLink,
    items: Sequence[HasPrompt],
    planned: Sequence[PlannedStore],
    flags: Mapping[int, Mapping[int, bytes]],
    deadline: Deadline,
) -> list[int]:
    """Report a batch of stores; per item the leading READY chunks. `flags[item][rank]` are what was written."""
    num_ready = [plan.num_ready for plan in planned]
    # Without a write in this batch nothing has changed since it was planned.
    unsettled = [index for index, count in enumerate(num_ready) if flags and count < len(items[index].prompt.keys)]
    if unsettled:
        done = [StoreDone(planned[index].plan_id, dict(flags.get(index, {}))) for index in unsettled]
        counts: list[int] = link.ask("complete", done, timeout_s=deadline.to_report_s())  # type: ignore[assignment]
        for index, count in zip(unsettled, counts, strict=True):
            num_ready[index] = count
    return num_ready


def _store_task(item: CheckedRows, plan: PlannedStore) -> StoreTask:
    return StoreTask(plan.refs, PackedRows.pack(item.prompt.rows(item.rows, unpack_numbers(plan.positions))))


def _retrieve_batch(link: ClusterLink, items: Sequence[CheckedRows]) -> list[np.ndarray]:
    chunk_size, deadline = link.hasher.chunk_size, link.deadline()
    leases = [link.lease_id() for _ in items]
    wanted = [
        LoadItem(pack_keys(item.prompt.keys), item.start // chunk_size, (lease,))
        for item, lease in zip(items, leases, strict=True)
    ]
    planned: list[PlannedLoad] = link.ask("prepare_loads", link.client_id, wanted)  # type: ignore[assignment]
    loading = [index for index, plan in enumerate(planned) if _is_wanted(link, items[index], plan)]
    results = [np.zeros(item.prompt.num_tokens, dtype=bool) for item in items]
    try:
        if loading:
            _load_into(link, [(items[index], planned[index], results[index]) for index in loading], deadline)
    finally:
        pinned = [lease for lease, plan in zip(leases, planned, strict=True) if len(plan.refs)]
        if pinned:
            link.ask("complete", [], pinned, timeout_s=deadline.to_report_s())
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
    for at, (item, plan, result) in enumerate(loads):
        num_good = min(leading(unpack_flags(flags[rank].loaded[at])) if rank in flags else 0 for rank in ranks)
        result[item.start : max(item.start, item.prompt.tokens_in(plan.start + num_good))] = True
    if failure is not None:
        raise failure


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
            path = self._first.arena_path
            return [LoadTask(task.refs, task.rows, task.first_row, arena_path=path) for task in tasks], None
        if self._payload is None:  # one export serves all other nodes: Ray moves it once to each
            refs = [ref for task in tasks for ref in task.refs.unpack()]
            self._payload = self._link.workers[0].export.remote(PackedRefs.pack(refs))
        shifted, start = [], 0
        for task in tasks:
            shifted.append(LoadTask(task.refs, task.rows, task.first_row, payload_start=start))
            start += len(task.refs)
        return shifted, self._payload


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
    references = {}
    for rank in ranks:
        tasks, payload = (list(loads), None) if first_rank is None else first_rank.for_rank(rank, loads)
        references[rank] = link.workers[rank].step.remote(tasks, list(stores), payload)
    results: dict[int, StepResult] = {}
    failure: Exception | None = None
    for rank, reference in references.items():
        try:
            result = wait_for_rank(reference, timeout_s=deadline.remaining_s(), rank=rank)
            assert isinstance(result, StepResult)
            results[rank] = result
        except RankDiedError:
            results[rank] = _all_failed(loads, stores)
        except RankUnavailableError:
            continue
        except LMCacheRayError as error:
            results[rank] = _all_failed(loads, stores)
            failure = failure or error
    return results, failure


def _all_failed(loads: Sequence[LoadTask], stores: Sequence[StoreTask]) -> StepResult:
    return StepResult(
        [pack_flags([False] * len(task.refs)) for task in loads],
        [pack_flags([False] * len(task.refs)) for task in stores],
    )

