"""`put` and `get`: the driver's own bytes into and out of the arenas, past the ranks' paged KV.

On a rank's node the driver maps its arena and copies there itself, once; to and from each rank of another node the
bytes of a whole batch go as one NumPy array through Ray's object store.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import ray

from lmcache_ray.arena.mapped import ArenaMap
from lmcache_ray.connector.dense import DenseConnector, empty_shard
from lmcache_ray.errors import (
    ArenaError,
    ClosedError,
    InvalidRequestError,
    LMCacheRayError,
    RankDiedError,
    RankUnavailableError,
)
from lmcache_ray.shard import ArenaSource, ChunkSource, EngineShard, PayloadSource, leading, read_chunks

from .batching import each_item
from .deadline import Deadline
from .link import ClusterLink
from .messages import (
    LoadItem,
    PackedRefs,
    Payload,
    PlannedLoad,
    PlannedStore,
    StoreItem,
    pack_flags,
    pack_keys,
    unpack_flags,
    unpack_numbers,
)
from .ray_calls import Ref, calling, wait_for_rank
from .requests import CheckedSpan, Request, check_span
from .row_calls import report_stores

if TYPE_CHECKING:
    import torch

    Shards = list[list[torch.Tensor]]


class DirectPath:
    """The driver's data path of one link. Thread-safe; maps of arenas are kept open until `close`."""

    def __init__(self, link: ClusterLink) -> None:
        self._link = link
        self._maps: dict[int, tuple[ArenaMap, EngineShard]] = {}
        self._changed = threading.Condition()
        self._num_calls = 0
        self._closing = False

    def close(self, *, timeout_s: float) -> bool:
        """Refuse new calls and wait for those under way. False if one is still copying: the maps stay open then."""
        with self._changed:
            self._closing = True
            is_idle = self._changed.wait_for(lambda: self._num_calls == 0, timeout_s)
            while is_idle and self._maps:
                _, (mapped, _) = self._maps.popitem()
                mapped.close()
        return is_idle

    def put(self, requests: Sequence[Request]) -> list[int | Exception]:
        """Per request the leading tokens READY at return, or why it failed."""
        with self._call() as deadline:
            return each_item(requests, self._check_put, lambda items: self._put_batch(items, deadline))

    def get(self, requests: Sequence[Request]) -> "list[tuple[int, Shards] | Exception]":
        """Per request (tokens, the shards' rows from `start` on), or why it failed.

        The number of tokens counts from 0 and is that of the last row delivered; 0 if there is none.
        """

        def check(request: Request) -> CheckedSpan:
            return check_span(self._link.hasher, request, aligned=False)

        with self._call() as deadline:
            return each_item(requests, check, lambda items: self._get_batch(items, deadline))

    @contextmanager
    def _call(self) -> Iterator[Deadline]:
        """Counts a call that may be copying, so that nobody gives the arenas away under it."""
        with self._changed:
            if self._closing:
                raise ClosedError(f"this connection to cluster {self._link.world.name!r} is closed")
            self._num_calls += 1
        try:
            yield self._link.deadline()
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    # -- put ----------------------------------------------------------------------------------------------------------

    def _check_put(self, request: Request) -> "_CheckedPut":
        span = check_span(self._link.hasher, request, aligned=True)
        if request.shards is None:
            raise InvalidRequestError("shards is missing: one list of tensors for each holder rank")
        layout, num_rows = self._link.world.layout, span.prompt.num_tokens - span.start
        if len(request.shards) != len(layout.holders):
            raise InvalidRequestError(
                f"shards must be one list of tensors for each of {len(layout.holders)} holder ranks; "
                f"got {len(request.shards)}"
            )
        connectors = {
            rank: DenseConnector(layout.ranks[rank], tensors, num_rows, name=f"shards[{rank}]")
            for rank, tensors in zip(layout.holders, request.shards, strict=True)
        }
        return _CheckedPut(span, connectors)

    def _put_batch(self, items: "Sequence[_CheckedPut]", deadline: Deadline) -> list[int | Exception]:
        link = self._link
        wanted = [StoreItem(pack_keys(item.prompt.keys), item.start // link.hasher.chunk_size) for item in items]
        planned = link.coordinator.prepare_stores(wanted, direct=True, timeout_s=deadline.remaining_s())
        writes = {index: _Write(items[index], plan) for index, plan in enumerate(planned) if len(plan.refs)}
        written: dict[int, dict[int, bytes]] = {index: {} for index in writes}
        failures: dict[int, Exception] = {}
        calls: dict[int, Ref] = {}
        try:
            remote = [rank for rank in link.world.layout.holders if not link.is_here(rank)] if writes else []
            for rank in remote:  # all sent first: they travel while this process copies
                with calling(f"rank {rank}"):
                    calls[rank] = self._send(rank, list(writes.values()))
            for rank in link.world.layout.holders:
                if link.is_here(rank):
                    self._write_here(rank, writes, written, failures)
            for rank, call in calls.items():
                self._take_answer(rank, call, writes, written, deadline)
        except LMCacheRayError as error:
            failures.update(dict.fromkeys(writes, error))
        finally:
            results = report_stores(link, items, planned, written, failures, deadline)
        return results

    def _write_here(
        self,
        rank: int,
        writes: "Mapping[int, _Write]",
        written: dict[int, dict[int, bytes]],
        failures: dict[int, Exception],
    ) -> None:
        """Copy every item's chunks into the arena of a rank of this node; a failed copy is answered as such."""
        for index, write in writes.items():
            written[index][rank] = pack_flags([False] * len(write.refs))
            try:
                done = self._shard_of(rank).store(write.refs, write.rows, write.item.connectors[rank])
                written[index][rank] = pack_flags(done)
            except LMCacheRayError as error:
                failures[index] = error

    def _send(self, rank: int, writes: "Sequence[_Write]") -> Ref:
        """One message with all chunks for a rank of another node."""
        refs = [ref for write in writes for ref in write.refs]
        num_tokens = [len(rows) for write in writes for rows in write.rows]
        data = np.zeros((len(refs), self._link.world.layout.ranks[rank].slot_nbytes), dtype=np.uint8)
        chunks = iter(data)
        for write in writes:
            for rows in write.rows:
                write.item.connectors[rank].gather(next(chunks), rows)
        worker = self._link.workers[rank]
        call: Ref = worker.take_in.remote(PackedRefs.pack(refs), num_tokens, ray.put(data))
        return call

    def _take_answer(
        self,
        rank: int,
        call: Ref,
        writes: "Mapping[int, _Write]",
        written: dict[int, dict[int, bytes]],
        deadline: Deadline,
    ) -> None:
        num_chunks = sum(len(write.refs) for write in writes.values())
        try:
            flags: bytes = wait_for_rank(call, timeout_s=deadline.remaining_s(), rank=rank)
        except RankDiedError:
            flags = pack_flags([False] * num_chunks)
        except RankUnavailableError:
            return  # it may still be writing: the coordinator settles that
        at = 0
        for index, write in writes.items():
            written[index][rank] = flags[at : at + len(write.refs)]
            at += len(write.refs)

    # -- get ----------------------------------------------------------------------------------------------------------

    def _get_batch(self, items: Sequence[CheckedSpan], deadline: Deadline) -> "list[tuple[int, Shards]]":
        link = self._link
        leases = [link.lease_names.for_load() for _ in items]
        wanted = [
            LoadItem(pack_keys(item.prompt.keys), item.start // link.hasher.chunk_size, (lease,))
            for item, lease in zip(items, leases, strict=True)
        ]
        planned = link.coordinator.prepare_loads(wanted, timeout_s=deadline.remaining_s())
        try:
            exports = self._exports(planned, deadline)
            reads = []
            at = 0
            for item, plan in zip(items, planned, strict=True):
                reads.append(self._read(item, plan, exports, at))
                at += len(plan.refs)
            return reads
        finally:
            pinned = [lease for lease, plan in zip(leases, planned, strict=True) if len(plan.refs)]
            if pinned:
                link.coordinator.complete([], pinned, timeout_s=deadline.to_report_s())

    def _exports(self, planned: Sequence[PlannedLoad], deadline: Deadline) -> dict[int, Payload]:
        """All planned chunks of every rank of another node, by rank; a rank that is out of reach has none."""
        refs = [ref for plan in planned for ref in plan.refs.unpack()]
        ranks = [rank for rank in self._link.world.layout.holders if not self._link.is_here(rank)] if refs else []
        packed = PackedRefs.pack(refs)
        calls: dict[int, Ref] = {}
        for rank in ranks:
            with calling(f"rank {rank}"):
                calls[rank] = self._link.workers[rank].export.remote(packed)
        exports: dict[int, Payload] = {}
        for rank, call in calls.items():
            try:
                exports[rank] = wait_for_rank(call, timeout_s=deadline.remaining_s(), rank=rank)
            except RankUnavailableError:
                continue
        return exports

    def _read(
        self, item: CheckedSpan, plan: PlannedLoad, exports: Mapping[int, Payload], at: int
    ) -> "tuple[int, Shards]":
        """Read one item; its chunks are number `at` and on of each export."""
        layout = self._link.world.layout
        refs = plan.refs.unpack()
        num_rows = max(0, item.prompt.tokens_in(plan.start + len(refs)) - item.start) if refs else 0
        shards = [empty_shard(layout.ranks[rank], num_rows) for rank in layout.holders]
        if not num_rows:
            return 0, shards
        rows = item.prompt.rows(
            np.arange(-item.start, num_rows), range(plan.start, plan.start + len(refs)), start=item.start
        )
        first_row = item.start - item.prompt.spans[plan.start][0]
        num_chunks = len(refs)
        for rank, shard in zip(layout.holders, shards, strict=True):
            connector = DenseConnector(layout.ranks[rank], shard, num_rows, name="shard")
            source = self._source_of(rank, exports.get(rank), slice(at, at + len(refs)))
            num_chunks = min(num_chunks, leading(read_chunks(source, refs, rows, connector, first_row=first_row)))
        num_tokens = item.prompt.tokens_in(plan.start + num_chunks) if num_chunks else 0
        return num_tokens, [[tensor[:, :, : max(0, num_tokens - item.start)] for tensor in shard] for shard in shards]

    def _source_of(self, rank: int, export: Payload | None, part: slice) -> ChunkSource:
        """Where the rank's chunks are read: one that is out of reach has none of them."""
        nothing = PayloadSource(np.empty((0, 0), dtype=np.uint8), [False] * (part.stop - part.start))
        if not self._link.is_here(rank):
            if export is None:
                return nothing
            return PayloadSource(export.data[part], unpack_flags(export.present[part]))
        try:
            return ArenaSource(self._shard_of(rank).slots)
        except ArenaError:
            return nothing

    def _shard_of(self, rank: int) -> EngineShard:
        """The arena of a rank of this node."""
        with self._changed:
            if rank not in self._maps:
                path = self._link.hellos[rank].arena_path
                if path is None:
                    raise ArenaError(f"rank {rank} holds no arena")
                mapped = ArenaMap.open(path, expected_fingerprint=self._link.world.layout.fingerprint)
                self._maps[rank] = (mapped, EngineShard(mapped.slots))
            return self._maps[rank][1]


class _CheckedPut:
    """A checked put: one connector to the caller's tensors for each holder rank."""

    def __init__(self, span: CheckedSpan, connectors: Mapping[int, DenseConnector]) -> None:
        self.prompt = span.prompt
        self.start = span.start
        self.connectors = connectors


class _Write:
    """What one planned put writes: chunks, and the rows of the caller's tensors that are theirs."""

    def __init__(self, item: _CheckedPut, plan: PlannedStore) -> None:
        self.item = item
        self.refs = plan.refs.unpack()
        rows = np.arange(-item.start, item.prompt.num_tokens - item.start)
        self.rows = item.prompt.rows(rows, unpack_numbers(plan.positions))
