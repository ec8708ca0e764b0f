"""`get`: cached bytes out of the arenas to the driver, past the ranks' paged KV, as copies or as views.

Arenas of the driver's own node are mapped; the chunks of each rank of another node come as one NumPy array through
Ray's object store, for a whole batch at once.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from lmcache_ray.connector.base import KVConnector
from lmcache_ray.connector.dense import DenseConnector
from lmcache_ray.errors import ArenaError, CapacityError, RankUnavailableError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.shard import ArenaSource, ChunkSource, PayloadSource, leading, read_chunks

from .batching import each_item
from .deadline import Deadline
from .link import ClusterLink
from .local_arenas import WORTH_A_THREAD_NBYTES, LocalArenas
from .messages import LoadItem, PackedRefs, Payload, PlannedLoad, pack_keys, unpack_flags
from .ray_calls import Ref, calling, wait_for_rank
from .requests import CheckedSpan, Request, check_span
from .result_memory import ResultMemory
from .rounds import load_rounds
from .views import CachedViews, ViewedChunks, ViewedShard, ViewLease, split_chunks, view_chunks

if TYPE_CHECKING:
    import torch

    Copies = tuple[int, list[list[torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class _Found:
    """What one `get` reads: chunks, and of each the rows that are wanted, as rows of the chunk and of the result.

    `exported` are its chunks' places in the payloads of a batch.
    """

    item: CheckedSpan
    first_chunk: int
    refs: tuple[ChunkRef, ...]
    rows: tuple[range, ...]
    exported: slice

    @staticmethod
    def of(item: CheckedSpan, plan: PlannedLoad, exported_from: int) -> "_Found":
        """The part of a plan that is wanted: nothing, if no row from the item's start on is cached."""
        refs, prompt, start = plan.refs.unpack(), item.prompt, item.start
        exported = slice(exported_from, exported_from + len(refs))
        ends = [prompt.tokens_in(plan.start + count) for count in range(1, len(refs) + 1)]
        if not refs or ends[-1] <= start:
            return _Found(item, plan.start, (), (), exported)
        begins = [prompt.start_of(plan.start + position) for position in range(len(refs))]
        rows = [range(max(0, start - begin), end - begin) for begin, end in zip(begins, ends, strict=True)]
        return _Found(item, plan.start, refs, tuple(rows), exported)

    @property
    def num_rows(self) -> int:
        """Rows of the result if every chunk is good."""
        return sum(map(len, self.rows))

    def num_tokens(self, num_good: int) -> int:
        """Tokens up to the last row of the first `num_good` chunks, counted from the prompt's first."""
        return self.item.prompt.tokens_in(self.first_chunk + num_good) if num_good else 0


class GetPath:
    """`get` over one link. Thread-safe."""

    def __init__(self, link: ClusterLink, arenas: LocalArenas) -> None:
        self._link = link
        self._arenas = arenas
        self._memory = ResultMemory()

    def close(self) -> None:
        """Keep no memory for further results."""
        self._memory.close()

    def get(self, requests: Sequence[Request]) -> "list[Copies | Exception]":
        """Per request (tokens, copies of the rows from `start` on), or why it failed.

        The number of tokens counts from 0 and is that of the last row delivered; 0 if there is none.
        """
        with self._arenas.call() as deadline:
            return each_item(requests, self._check, lambda items: self._copy_batch(items, deadline))

    def view(self, requests: Sequence[Request]) -> list[CachedViews | Exception]:
        """As `get`, but views wherever that is possible."""
        with self._arenas.call() as deadline:
            return each_item(requests, self._check, lambda items: self._view_batch(items, deadline))

    def _check(self, request: Request) -> CheckedSpan:
        return check_span(self._link.hasher, request, aligned=False)

    # -- copies -------------------------------------------------------------------------------------------------------

    def _copy_batch(self, items: Sequence[CheckedSpan], deadline: Deadline) -> "list[Copies]":
        lease_ids = [self._link.lease_names.for_load() for _ in items]
        copies: dict[int, Copies] = {}
        for indices, planned in load_rounds(self._link, self._loads(items, lease_ids, keep=False), deadline):
            try:
                exports = self._exports(planned, deadline)
                found = _wanted([items[index] for index in indices], planned)
                copies.update(zip(indices, [self._copied(one, exports) for one in found], strict=True))
            finally:
                self._end_loads([lease_ids[index] for index in indices], planned)
        return [copies[index] for index in range(len(items))]

    def _copied(self, found: _Found, exports: Mapping[int, Payload]) -> "Copies":
        holders = self._link.world.layout.holders
        copies = self._copy(found, holders, exports)
        num_tokens = found.num_tokens(min(num_good for _, num_good in copies.values()))
        num_rows = max(0, num_tokens - found.item.start)
        return num_tokens, [[tensor[:, :, :num_rows] for tensor in copies[rank][0]] for rank in holders]

    def _copy(
        self, found: _Found, ranks: Sequence[int], exports: Mapping[int, Payload]
    ) -> "dict[int, tuple[list[torch.Tensor], int]]":
        """Per rank its rows, and how many leading chunks of them are good."""
        layout = self._link.world.layout
        shards = {rank: self._memory.empty_shard(layout.ranks[rank], found.num_rows) for rank in ranks}
        jobs: list[Callable[[], list[bool]]] = []
        num_jobs = {}
        for rank, shard in shards.items():
            connector = DenseConnector(layout.ranks[rank], shard, found.num_rows, name="shard")
            source = self._source_of(rank, exports.get(rank), found.exported)
            parts = self._parts(found, rank, len(ranks))
            num_jobs[rank] = len(parts)
            jobs += [partial(_read_part, source, found, part, connector) for part in parts]
        nbytes = found.num_rows * sum(layout.ranks[rank].token_nbytes for rank in ranks)
        flags = iter(self._arenas.run_together(jobs, nbytes=nbytes))
        good = {rank: [flag for _ in range(num_jobs[rank]) for flag in next(flags)] for rank in ranks}
        return {rank: (shard, leading(good[rank])) for rank, shard in shards.items()}

    def _parts(self, found: _Found, rank: int, num_ranks: int) -> list[range]:
        """The chunks of one rank, in as many parts as there are processors for it."""
        num_chunks, nbytes = len(found.refs), found.num_rows * self._link.world.layout.ranks[rank].token_nbytes
        most = max(1, self._arenas.num_processors // num_ranks) if self._link.is_here(rank) else 1
        num_parts = max(1, min(most, num_chunks, nbytes // WORTH_A_THREAD_NBYTES))
        borders = [num_chunks * part // num_parts for part in range(num_parts + 1)]
        return [range(begin, end) for begin, end in pairwise(borders)]

    def _source_of(self, rank: int, export: Payload | None, part: slice) -> ChunkSource:
        """Where the rank's chunks are read: one that is out of reach has none of them."""
        nothing = PayloadSource(np.empty((0, 0), dtype=np.uint8), [False] * (part.stop - part.start))
        if not self._link.is_here(rank):
            if export is None:
                return nothing
            return PayloadSource(export.data[part], unpack_flags(export.present[part]))
        try:
            return ArenaSource(self._arenas.of_rank(rank).mapped.slots)
        except ArenaError:
            return nothing

    # -- views --------------------------------------------------------------------------------------------------------

    def _view_batch(self, items: Sequence[CheckedSpan], deadline: Deadline) -> list[CachedViews]:
        link = self._link
        lease_ids = [link.lease_names.for_load() for _ in items]
        epochs = self._arenas.epochs()
        keep = bool(epochs) and link.liveness is not None
        views: dict[int, CachedViews] = {}
        try:
            for indices, planned in load_rounds(link, self._loads(items, lease_ids, keep=keep), deadline):
                viewed = self._view_planned(
                    [items[index] for index in indices],
                    [lease_ids[index] for index in indices],
                    planned,
                    epochs,
                    deadline,
                )
                views.update(zip(indices, viewed, strict=True))
        except BaseException:
            for answer in views.values():
                answer.close()
            for lease_id in lease_ids:
                link.abandon(lease_id)  # it may have been granted, and would not end by time
            raise
        return [views[index] for index in range(len(items))]

    def _view_planned(
        self,
        items: Sequence[CheckedSpan],
        lease_ids: Sequence[str],
        planned: Sequence[PlannedLoad],
        epochs: Mapping[int, int],
        deadline: Deadline,
    ) -> list[CachedViews]:
        leases = [
            self._held(lease_id, plan, epochs) if plan.is_kept else None
            for lease_id, plan in zip(lease_ids, planned, strict=True)
        ]
        try:
            exports = self._exports(planned, deadline)
            return [
                self._viewed(found, lease, exports)
                for found, lease in zip(_wanted(items, planned), leases, strict=True)
            ]
        except BaseException:
            for lease in filter(None, leases):
                lease.close()
            raise
        finally:
            self._end_loads(lease_ids, planned)

    def _held(self, lease_id: str, plan: PlannedLoad, epochs: Mapping[int, int]) -> ViewLease | None:
        """The lease of views, noted where the next coordinator finds it; None if that has come since `epochs`.

        The order matters: first the note, then the look (see `arena/liveness.py`).
        """
        link, liveness = self._link, self._link.liveness
        held = [(ref.slot, ref.generation) for ref in plan.refs.unpack()]

        def release(lease_id: str) -> None:
            link.release([lease_id])
            if liveness is not None:
                liveness.let_go(held)

        def abandon(lease_id: str) -> None:
            link.abandon(lease_id)
            if liveness is not None:
                liveness.let_go(held)

        try:
            if liveness is not None:
                liveness.hold(held)
        except CapacityError:  # without the note there are no views, only copies
            link.release([lease_id])
            return None
        lease = ViewLease(lease_id, release=release, abandon=abandon)
        if self._arenas.epochs() != epochs:
            lease.close()
            return None
        return lease

    def _viewed(self, found: _Found, lease: ViewLease | None, exports: Mapping[int, Payload]) -> CachedViews:
        """Views of the ranks whose arenas can be mapped under the lease, copies of the others."""
        layout = self._link.world.layout
        shards: dict[int, ViewedShard] = {}
        viewed: list[ViewedChunks] = []
        if lease is not None:
            for rank in filter(self._link.is_here, layout.holders):
                with suppress(ArenaError):  # what cannot be viewed is copied
                    chunks, shards[rank] = self._view(found, rank, lease)
                    viewed.append(chunks)
        copied = [rank for rank in layout.holders if rank not in shards]
        num_good = min((chunks.num_good() for chunks in viewed), default=len(found.refs))
        for rank, (shard, num_copied) in self._copy(found, copied, exports).items():
            shards[rank] = split_chunks(shard, found.rows[:num_copied])
            num_good = min(num_good, num_copied)
        cut = [[chunks[:num_good] for chunks in shards[rank]] for rank in layout.holders]
        if lease is not None and not (viewed and num_good):
            lease.close()
        return CachedViews(
            found.num_tokens(num_good),
            cut,
            copied_ranks=copied,
            viewed=[chunks.first(num_good) for chunks in viewed],
            lease=lease,
        )

    def _view(self, found: _Found, rank: int, lease: ViewLease) -> tuple[ViewedChunks, ViewedShard]:
        arena, layout = self._arenas.of_rank(rank), self._link.world.layout.ranks[rank]
        slots, geometry = [ref.slot for ref in found.refs], arena.mapped.spec.geometry
        shard = view_chunks(arena.views, geometry, slots, layout, found.rows, lease)
        return ViewedChunks(arena.mapped.slots, found.refs), shard

    # -- both ---------------------------------------------------------------------------------------------------------

    def _loads(self, items: Sequence[CheckedSpan], lease_ids: Sequence[str], *, keep: bool) -> list[LoadItem]:
        chunk_size = self._link.hasher.chunk_size
        return [
            LoadItem(pack_keys(item.prompt.keys), item.start // chunk_size, (lease_id,), keep)
            for item, lease_id in zip(items, lease_ids, strict=True)
        ]

    def _end_loads(self, lease_ids: Sequence[str], planned: Sequence[PlannedLoad]) -> None:
        """End the leases that end with the call."""
        pinned = [
            lease_id for lease_id, plan in zip(lease_ids, planned, strict=True) if len(plan.refs) and not plan.is_kept
        ]
        if pinned:
            self._link.release(pinned)

    def _exports(self, planned: Sequence[PlannedLoad], deadline: Deadline) -> dict[int, Payload]:
        """All planned chunks of every rank of another node, by rank; a rank that is out of reach has none."""
        elsewhere = [rank for rank in self._link.world.layout.holders if not self._link.is_here(rank)]
        if not elsewhere or not any(len(plan.refs) for plan in planned):
            return {}
        packed = PackedRefs.joined([plan.refs for plan in planned])
        calls: dict[int, Ref] = {}
        for rank in elsewhere:
            with calling(f"rank {rank}"):
                calls[rank] = self._link.workers[rank].export.remote(packed)
        exports: dict[int, Payload] = {}
        for rank, call in calls.items():
            try:
                exports[rank] = wait_for_rank(call, timeout_s=deadline.remaining_s(), rank=rank)
            except RankUnavailableError:
                continue
        return exports


def _wanted(items: Sequence[CheckedSpan], planned: Sequence[PlannedLoad]) -> list[_Found]:
    """What of each plan is wanted."""
    exported_from = accumulate((len(plan.refs) for plan in planned), initial=0)
    return [_Found.of(item, plan, at) for item, plan, at in zip(items, planned, exported_from, strict=False)]


def _read_part(source: ChunkSource, found: _Found, part: range, connector: KVConnector) -> list[bool]:
    """Copy these chunks into the result; a flag for each."""
    counts = [len(rows) for rows in found.rows]
    ends = list(accumulate(counts))
    rows = [np.arange(ends[position] - counts[position], ends[position]) for position in part]
    first_row = found.rows[part.start].start if part else 0
    return read_chunks(source, found.refs[part.start : part.stop], rows, connector, first_row=first_row)
