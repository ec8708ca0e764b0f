"""`put` and `get`: the driver's own bytes into and out of the arenas, past the ranks' paged KV.

On a rank's node the driver maps its arena and copies there itself, once; to and from ranks of other nodes the bytes
go as one NumPy array through Ray's object store. Which of the two is decided by node id, never by whether a file is
visible: several nodes may share one file system.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import ray

from lmcache_ray.arena.mapped import ArenaMap
from lmcache_ray.connector.dense import DenseConnector, empty_shard
from lmcache_ray.errors import ArenaError, InvalidRequestError, LMCacheRayError, RankDiedError, RankUnavailableError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.shard import ArenaSource, ChunkSource, EngineShard, PayloadSource, leading, read_chunks

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
from .ray_calls import Ref, wait_for_rank
from .requests import CheckedSpan, Request, check_span
from .row_calls import report_stores

if TYPE_CHECKING:
    import torch


class DirectPath:
    """The driver's data path of one link. Thread-safe; maps of arenas are kept open until `close`."""

    def __init__(self, link: ClusterLink) -> None:
        self._link = link
        self._maps: dict[int, tuple[ArenaMap, EngineShard]] = {}

    def close(self) -> None:
        """Let all maps go."""
        while self._maps:
            _, (mapped, _) = self._maps.popitem()
            mapped.close()

    # -- put ----------------------------------------------------------------------------------------------------------

    def check_put(self, request: Request) -> "_CheckedPut":
        """Raises `InvalidRequestError` or `LayoutError` naming what does not fit."""
        span = check_span(self._link.hasher, request, aligned=True)
        if request.shards is None:
            raise InvalidRequestError("shards is missing: one list of tensors for each holder rank")
        return _CheckedPut(span, self._connectors(request.shards, span.prompt.num_tokens - span.start))

    def put(self, items: "Sequence[_CheckedPut]") -> list[int]:
        """Per item the leading tokens READY at return."""
        link, chunk_size, deadline = self._link, self._link.hasher.chunk_size, self._link.deadline()
        wanted = [StoreItem(pack_keys(item.span.prompt.keys), item.span.start // chunk_size) for item in items]
        planned: list[PlannedStore] = link.ask("prepare_stores", link.client_id, wanted, True)  # type: ignore[assignment]
        writes = {index: _Write(items[index], plan) for index, plan in enumerate(planned) if len(plan.refs)}
        flags: dict[int, dict[int, bytes]] = {index: {} for index in writes}
        failure: Exception | None = None
        try:
            for rank in link.world.layout.holders:
                try:
                    self._write_rank(rank, writes, flags, deadline)
                except LMCacheRayError as error:
                    failure = failure or error
        finally:
            num_ready = report_stores(link, [item.span for item in items], planned, flags, deadline)
        if failure is not None:
            raise failure
        return [item.span.prompt.tokens_in(count) for item, count in zip(items, num_ready, strict=True)]

    def _write_rank(
        self, rank: int, writes: "Mapping[int, _Write]", flags: dict[int, dict[int, bytes]], deadline: Deadline
    ) -> None:
        """Write every item's chunks to one rank; what this process wrote or tried to write is always answered."""
        if self._is_here(rank):
            for index, write in writes.items():
                flags[index][rank] = pack_flags([False] * len(write.refs))
                done = self._shard_of(rank).store(write.refs, write.rows, write.item.connectors[rank])
                flags[index][rank] = pack_flags(done)
            return
        calls = {
            index: self._link.workers[rank].take_in.remote(
                PackedRefs.pack(write.refs), [len(rows) for rows in write.rows], self._payload(rank, write)
            )
            for index, write in writes.items()
        }
        for index, call in calls.items():
            try:
                answer = wait_for_rank(call, timeout_s=deadline.remaining_s(), rank=rank)
                assert isinstance(answer, bytes)
                flags[index][rank] = answer
            except RankDiedError:
                flags[index][rank] = pack_flags([False] * len(writes[index].refs))
            except RankUnavailableError:
                continue  # it may still be writing: the coordinator settles that

    def _payload(self, rank: int, write: "_Write") -> Ref:
        data = np.zeros((len(write.refs), self._link.world.layout.ranks[rank].slot_nbytes), dtype=np.uint8)
        for chunk, rows in zip(data, write.rows, strict=True):
            write.item.connectors[rank].gather(chunk, rows)
        return ray.put(data)

    # -- get ----------------------------------------------------------------------------------------------------------

    def check_get(self, request: Request) -> CheckedSpan:
        """Raises `InvalidRequestError` naming the argument at fault."""
        return check_span(self._link.hasher, request, aligned=False)

    def get(self, items: Sequence[CheckedSpan]) -> "list[tuple[int, list[list[torch.Tensor]]]]":
        """Per item the number of leading tokens delivered, and the shards' rows from `start` on."""
        link, chunk_size, deadline = self._link, self._link.hasher.chunk_size, self._link.deadline()
        leases = [link.lease_id() for _ in items]
        wanted = [
            LoadItem(pack_keys(item.prompt.keys), item.start // chunk_size, (lease,))
            for item, lease in zip(items, leases, strict=True)
        ]
        planned: list[PlannedLoad] = link.ask("prepare_loads", link.client_id, wanted)  # type: ignore[assignment]
        try:
            return [self._read(item, plan, deadline) for item, plan in zip(items, planned, strict=True)]
        finally:
            pinned = [lease for lease, plan in zip(leases, planned, strict=True) if len(plan.refs)]
            if pinned:
                link.ask("complete", [], pinned, timeout_s=deadline.to_report_s())

    def _read(
        self, item: CheckedSpan, plan: PlannedLoad, deadline: Deadline
    ) -> "tuple[int, list[list[torch.Tensor]]]":
        layout = self._link.world.layout
        refs = plan.refs.unpack()
        end = item.prompt.tokens_in(plan.start + len(refs)) if refs else 0
        if end <= item.start:
            return min(end, item.start), [empty_shard(layout.ranks[rank], 0) for rank in layout.holders]
        rows = item.prompt.rows(
            np.arange(-item.start, end - item.start), range(plan.start, plan.start + len(refs)), start=item.start
        )
        first_row = item.start - item.prompt.spans[plan.start][0]
        shards, num_chunks = [], len(refs)
        for rank in layout.holders:
            shard = empty_shard(layout.ranks[rank], end - item.start)
            connector = DenseConnector(layout.ranks[rank], shard, end - item.start, name="shard")
            source = self._source_of(rank, refs, deadline)
            num_chunks = min(num_chunks, leading(read_chunks(source, refs, rows, connector, first_row=first_row)))
            shards.append(shard)
        num_tokens = max(item.start, item.prompt.tokens_in(plan.start + num_chunks))
        return num_tokens, [[tensor[:, :, : num_tokens - item.start] for tensor in shard] for shard in shards]

    def _source_of(self, rank: int, refs: Sequence[ChunkRef], deadline: Deadline) -> ChunkSource:
        """Where the rank's chunks are read: a rank that is out of reach has none."""
        nothing = PayloadSource(np.empty((len(refs), 0), dtype=np.uint8), [False] * len(refs))
        try:
            if self._is_here(rank):
                return ArenaSource(self._shard_of(rank).slots)
            call = self._link.workers[rank].export.remote(PackedRefs.pack(refs))
            payload = wait_for_rank(call, timeout_s=deadline.remaining_s(), rank=rank)
        except (ArenaError, RankUnavailableError):
            return nothing
        assert isinstance(payload, Payload)
        return PayloadSource(payload.data, unpack_flags(payload.present))

    # -- arenas of this node ------------------------------------------------------------------------------------------

    def _is_here(self, rank: int) -> bool:
        return self._link.hellos[rank].node_id == self._link.node_id

    def _shard_of(self, rank: int) -> EngineShard:
        if rank not in self._maps:
            path = self._link.hellos[rank].arena_path
            if path is None:
                raise ArenaError(f"rank {rank} holds no arena")
            mapped = ArenaMap.open(path, expected_fingerprint=self._link.world.layout.fingerprint)
            self._maps[rank] = (mapped, EngineShard(mapped.slots))
        return self._maps[rank][1]

    def _connectors(
        self, shards: "Sequence[Sequence[torch.Tensor]]", num_rows: int
    ) -> dict[int, DenseConnector]:
        layout = self._link.world.layout
        if len(shards) != len(layout.holders):
            raise InvalidRequestError(
                f"shards must be one list of tensors for each of {len(layout.holders)} holder ranks; got {len(shards)}"
            )
        return {
            rank: DenseConnector(layout.ranks[rank], tensors, num_rows, name=f"shards[{rank}]")
            for rank, tensors in zip(layout.holders, shards, strict=True)
        }


class _CheckedPut:
    """A checked put: one connector to the caller's tensors for each holder rank."""

    def __init__(self, span: CheckedSpan, connectors: Mapping[int, DenseConnector]) -> None:
        self.span = span
        self.connectors = connectors


class _Write:
    """What one planned put writes: chunks, and the rows of the caller's tensors that are theirs."""

    def __init__(self, item: _CheckedPut, plan: PlannedStore) -> None:
        self.item = item
        self.refs = plan.refs.unpack()
        start, num_tokens = item.span.start, item.span.prompt.num_tokens
        self.rows = item.span.prompt.rows(np.arange(-start, num_tokens - start), unpack_numbers(plan.positions))


