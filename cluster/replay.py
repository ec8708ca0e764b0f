"""Replaying a workload against a cluster: look up, load and store every request, and check every byte on demand.

Requests go through in windows. One message plans a whole window in file order, one message per rank carries it out,
one reports back; a request that depends on an earlier one of its window begins the next, so hit rates are those of a
replay one by one.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

from lmcache_ray.errors import ClusterError, WorkloadError
from lmcache_ray.keys import KEY_NBYTES
from lmcache_ray.layout import Placement
from lmcache_ray.tiers.spec import Tier

from .client import CacheCluster
from .every_rank import check_every_rank
from .link import ClusterLink
from .messages import (
    MESSAGE_NBYTES,
    PackedRefs,
    PlannedLoad,
    PlannedStore,
    StoreDone,
    pack_keys,
    pack_numbers,
    unpack_numbers,
)
from .ray_calls import Ref, wait_for_rank
from .replay_rank import ReplayResult, ReplayWindow
from .report import Latencies, ReplayReport
from .workload import BLOCK_SIZE, TraceRequest, prompt_tokens

Advance = Callable[[int], None]
"""Called with the number of requests that have just been finished."""

_LOOK_AGAIN_S = 0.5
_RUN_WINDOW = "cluster.replay_rank:run_window"


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One request as the cluster sees it, and the lease under which it will be loaded."""

    keys: list[bytes]
    packed: bytes
    lease_id: str


@dataclass(slots=True)
class _Totals:
    requests: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    disk_blocks: int = 0
    remote_blocks: int = 0
    verified_bytes: int = 0
    byte_mismatches: int = 0
    latencies: Latencies = field(default_factory=Latencies)


def replay(
    cluster: CacheCluster,
    requests: Sequence[TraceRequest],
    *,
    window: int,
    verify: bool,
    advance: Advance = lambda count: None,
) -> ReplayReport:
    """Run `requests` in order through `cluster`, whose chunk size must be that of a trace's blocks.

    Raises `ClusterError` if the cluster does not fit the workload, or a rank fails on the way.
    """
    link = cluster.link
    _check_fit(link, requests, window)
    run = _Replay(link, window, verify)
    begin = time.perf_counter()
    run.run(requests, advance)
    seconds = time.perf_counter() - begin
    return _report(cluster, run.totals, window, seconds)


class _Replay:
    """One run. Prompts are hashed one window ahead, while the ranks are at work."""

    def __init__(self, link: ClusterLink, window: int, verify: bool) -> None:
        self._link = link
        self._window = window
        self._verify = verify
        self._num_rows = link.num_kv_rows
        self._promoted: dict[str, tuple[int, int]] = {}  # per lease, blocks that came from disk and from the remote
        self.totals = _Totals()

    def run(self, requests: Sequence[TraceRequest], advance: Advance) -> None:
        source = self._prompts(requests)
        waiting: deque[_Prompt] = deque()
        self._refill(waiting, source)
        while waiting:
            part = self._next_window(waiting)
            begin = time.perf_counter()
            plans = self._plan(part)
            lookup_s = time.perf_counter() - begin
            calls = self._send(plans)
            for _ in plans:
                waiting.popleft()
            self._refill(waiting, source)
            self._finish(plans, calls, [prompt.lease_id for prompt in part])
            self._count(part[: len(plans)], plans, lookup_s)
            advance(len(plans))

    def _plan(self, prompts: Sequence[_Prompt]) -> Sequence[tuple[PlannedLoad, PlannedStore]]:
        """Plans of the leading prompts, at least one; what they have below memory is brought up, or room awaited."""
        coordinator, deadline = self._link.coordinator, self._link.deadline()
        packed, leases = [prompt.packed for prompt in prompts], [prompt.lease_id for prompt in prompts]
        while True:
            is_patient = self._link.world.tiers.has_lower and deadline.remaining_s() > 0
            window = coordinator.prepare_window(packed, leases, promoted=list(self._promoted), patient=is_patient)
            if window.plans:
                return window.plans
            if window.must_promote:
                most = self._num_promotable(prompts)
                counts = coordinator.promote(packed[:most], leases[:most], timeout_s=deadline.timeout_s)
                self._promoted.update(zip(leases, counts, strict=False))
            else:
                coordinator.wait_for_room(timeout_s=_LOOK_AGAIN_S)

    def _num_promotable(self, prompts: Sequence[_Prompt]) -> int:
        """As many as fit into memory with all that they store: what is promoted stays there until it is loaded."""
        ends = accumulate(len(prompt.keys) for prompt in prompts)
        return max(1, sum(end <= self._link.world.num_slots for end in ends))

    def _prompts(self, requests: Sequence[TraceRequest]) -> Iterator[_Prompt]:
        for request in requests:
            keys = self._link.hasher.keys(prompt_tokens(request))
            yield _Prompt(keys, pack_keys(keys), self._link.lease_names.for_load())

    def _refill(self, waiting: deque[_Prompt], source: Iterator[_Prompt]) -> None:
        waiting.extend(islice(source, self._window - len(waiting)))

    def _next_window(self, waiting: deque[_Prompt]) -> list[_Prompt]:
        """As many prompts as one message and the ranks' KV rows can take."""
        most = min(MESSAGE_NBYTES // KEY_NBYTES, self._num_rows // BLOCK_SIZE)
        part: list[_Prompt] = []
        num_blocks = 0
        for prompt in waiting:
            num_blocks += len(prompt.keys)
            if part and num_blocks > most:
                break
            part.append(prompt)
        return part

    def _send(self, plans: Sequence[tuple[PlannedLoad, PlannedStore]]) -> dict[int, Ref]:
        """One message to each rank; every request has KV rows of its own."""
        window = _as_window(plans, self._verify)
        link, layout = self._link, self._link.world.layout
        calls, payload = {}, None
        for rank, worker in enumerate(link.workers):
            if layout.placement is Placement.PER_RANK:
                calls[rank] = worker.call.remote(_RUN_WINDOW, window)
            elif link.hellos[rank].node_id == link.hellos[0].node_id or not len(window.loads):
                calls[rank] = worker.call.remote(_RUN_WINDOW, replace(window, arena_path=link.hellos[0].arena_path))
            else:
                payload = link.workers[0].export.remote(window.loads) if payload is None else payload
                calls[rank] = worker.call.remote(_RUN_WINDOW, window, payload)
        return calls

    def _finish(
        self,
        plans: Sequence[tuple[PlannedLoad, PlannedStore]],
        calls: dict[int, Ref],
        leases: Sequence[str],
    ) -> None:
        """Take the ranks' answers, report them, and release the window's leases."""
        timeout_s = self._link.world.call_timeout_s
        results: dict[int, ReplayResult] = {}
        for rank, call in calls.items():
            result = wait_for_rank(call, timeout_s=timeout_s, rank=rank)
            assert isinstance(result, ReplayResult)
            results[rank] = result
        done, at = [], 0
        for _, store in plans:
            count = len(store.refs)
            if store.plan_id is not None and count:
                flags = {rank: results[rank].stored[at : at + count] for rank in self._link.world.layout.holders}
                done.append(StoreDone(store.plan_id, flags))
            at += count
        pinned = [lease for lease, (load, _) in zip(leases, plans, strict=False) if len(load.refs)]
        if done or pinned:
            self._link.coordinator.complete(done, pinned)
        self._count_results(results, plans)

    def _count_results(
        self, of_ranks: Mapping[int, ReplayResult], plans: Sequence[tuple[PlannedLoad, PlannedStore]]
    ) -> None:
        totals, results = self.totals, of_ranks.values()
        totals.verified_bytes += sum(result.verified_bytes for result in results)
        totals.byte_mismatches += sum(result.byte_mismatches for result in results)
        for rank, result in of_ranks.items():
            _check_complete(rank, result)
        for at, (load, store) in enumerate(plans):
            if len(load.refs):
                totals.latencies.retrieve.append(max(result.load_s[at] for result in results))
            if len(store.refs):
                totals.latencies.store.append(max(result.store_s[at] for result in results if result.store_s))

    def _count(
        self, prompts: Sequence[_Prompt], plans: Sequence[tuple[PlannedLoad, PlannedStore]], lookup_s: float
    ) -> None:
        totals = self.totals
        totals.requests += len(prompts)
        totals.lookup_blocks += sum(len(prompt.keys) for prompt in prompts)
        totals.hit_blocks += sum(len(load.refs) for load, _ in plans)
        totals.latencies.lookup += [lookup_s] * len(prompts)
        for prompt in prompts:
            from_disk, from_remote = self._promoted.pop(prompt.lease_id, (0, 0))
            totals.disk_blocks += from_disk
            totals.remote_blocks += from_remote


def _as_window(plans: Sequence[tuple[PlannedLoad, PlannedStore]], verify: bool) -> ReplayWindow:
    load_rows: list[int] = []
    store_rows: list[int] = []
    first_row = 0
    for load, store in plans:
        positions = unpack_numbers(store.positions)
        load_rows += [first_row + block * BLOCK_SIZE for block in range(len(load.refs))]
        store_rows += [first_row + block * BLOCK_SIZE for block in positions]
        first_row += max(len(load.refs), max(positions, default=-1) + 1) * BLOCK_SIZE
    return ReplayWindow(
        loads=_joined([load.refs for load, _ in plans]),
        load_rows=pack_numbers(load_rows),
        load_counts=tuple(len(load.refs) for load, _ in plans),
        stores=_joined([store.refs for _, store in plans]),
        store_rows=pack_numbers(store_rows),
        store_counts=tuple(len(store.refs) for _, store in plans),
        verify=verify,
    )


def _joined(parts: Sequence[PackedRefs]) -> PackedRefs:
    return PackedRefs(
        b"".join(part.keys for part in parts),
        b"".join(part.slots for part in parts),
        b"".join(part.generations for part in parts),
    )


def _check_complete(rank: int, result: ReplayResult) -> None:
    """A run in which a planned chunk was left out is not the run that was asked for."""
    left_out = [
        f"{flags.count(0)} of {len(flags)} chunks that it was to {verb}"
        for verb, flags in (("load", result.loaded), ("store", result.stored))
        if 0 in flags
    ]
    if left_out:
        raise ClusterError(
            f"rank {rank} left out {' and '.join(left_out)}: another driver has cleared them, or their leases ended "
            "(lease_timeout_s) before the rank came to them; replay on a cluster that nobody clears"
        )


def _check_fit(link: ClusterLink, requests: Sequence[TraceRequest], window: int) -> None:
    if window < 1:
        raise WorkloadError(f"window must be at least 1 request; got {window}")
    chunk_size = link.world.layout.chunk_size
    if chunk_size != BLOCK_SIZE:
        raise ClusterError(
            f"cluster {link.world.name!r} has chunk_size {chunk_size}; a replay needs {BLOCK_SIZE}, a trace's block"
        )
    longest = max((len(request.hash_ids) for request in requests), default=0) * BLOCK_SIZE
    if longest > link.num_kv_rows:
        raise ClusterError(
            f"the longest prompt has {longest} tokens; {link.world.name!r} has {link.num_kv_rows} KV rows per rank: "
            "start it with more num_blocks"
        )


def _report(cluster: CacheCluster, totals: _Totals, window: int, seconds: float) -> ReplayReport:
    link = cluster.link
    world, layout = link.world, link.world.layout
    link.coordinator.check_integrity()
    resident = check_every_rank(link)
    return ReplayReport(
        requests=totals.requests,
        lookup_blocks=totals.lookup_blocks,
        hit_blocks=totals.hit_blocks,
        hit_rate=totals.hit_blocks / totals.lookup_blocks if totals.lookup_blocks else 0.0,
        hit_blocks_by_tier={
            Tier.CPU.value: totals.hit_blocks - totals.disk_blocks - totals.remote_blocks,
            Tier.DISK.value: totals.disk_blocks,
            Tier.REMOTE.value: totals.remote_blocks,
        },
        world_size=layout.world_size,
        num_nodes=len({hello.node_id for hello in link.hellos}),
        use_mla=layout.placement is Placement.FIRST_RANK,
        policy=world.cache_policy.lower(),
        capacity_blocks=world.num_slots,
        window=window,
        stored_bytes=[count * layout.ranks[rank].chunk_nbytes for rank, count in enumerate(resident)],
        verified_bytes=totals.verified_bytes,
        byte_mismatches=totals.byte_mismatches,
        seconds=round(seconds, 3),
        latency_ms=totals.latencies.in_ms(),
    )
