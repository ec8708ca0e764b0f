"""`put`: the driver's own bytes into the arenas, past the ranks' paged KV.

On a rank's node the driver maps its arena and copies there itself, once; to each rank of another node the bytes of a
whole batch go as one NumPy array through Ray's object store.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import ray

from lmcache_ray.connector.dense import DenseConnector
from lmcache_ray.errors import InvalidRequestError, LMCacheRayError, RankDiedError, RankUnavailableError, shown

from .batching import each_item
from .deadline import Deadline
from .link import ClusterLink
from .local_arenas import LocalArenas
from .messages import PackedRefs, PlannedStore, StoreItem, pack_flags, pack_keys, unpack_numbers
from .ray_calls import Ref, calling, wait_for_rank
from .requests import CheckedSpan, Request, check_span
from .rounds import store_rounds
from .row_calls import report_stores


class PutPath:
    """`put` over one link. Thread-safe."""

    def __init__(self, link: ClusterLink, arenas: LocalArenas) -> None:
        self._link = link
        self._arenas = arenas

    def put(self, requests: Sequence[Request]) -> list[int | Exception]:
        """Per request the leading tokens READY at return, or why it failed."""
        with self._arenas.call() as deadline, self._link.writing() as call:
            return each_item(requests, self._check_put, lambda items: self._put_batch(items, deadline, call))

    def _check_put(self, request: Request) -> "_CheckedPut":
        span = check_span(self._link.hasher, request, aligned=True)
        if request.shards is None:
            raise InvalidRequestError("shards is missing: one list of tensors for each holder rank")
        layout, num_rows = self._link.world.layout, span.prompt.num_tokens - span.start
        num_shards = len(request.shards) if isinstance(request.shards, Sequence) else None
        if num_shards != len(layout.holders):
            raise InvalidRequestError(
                f"shards must be one list of tensors for each of {len(layout.holders)} holder ranks; "
                f"got {shown(request.shards) if num_shards is None else num_shards}"
            )
        connectors = {
            rank: DenseConnector(layout.ranks[rank], tensors, num_rows, name=f"shards[{rank}]")
            for rank, tensors in zip(layout.holders, request.shards, strict=True)
        }
        return _CheckedPut(span, connectors)

    def _put_batch(
        self, items: "Sequence[_CheckedPut]", deadline: Deadline, call: int
    ) -> list[int | Exception]:
        link = self._link
        wanted = [StoreItem(pack_keys(item.prompt.keys), item.start // link.hasher.chunk_size) for item in items]
        results: dict[int, int | Exception] = {}
        for indices, planned in store_rounds(link, wanted, deadline, call=call):
            stored = self._put_planned([items[index] for index in indices], planned, deadline)
            results.update(zip(indices, stored, strict=True))
        return [results[index] for index in range(len(items))]

    def _put_planned(
        self, items: "Sequence[_CheckedPut]", planned: Sequence[PlannedStore], deadline: Deadline
    ) -> list[int | Exception]:
        link = self._link
        writes = {index: _Write(items[index], plan) for index, plan in enumerate(planned) if len(plan.refs)}
        written: dict[int, dict[int, bytes]] = {index: {} for index in writes}
        failures: dict[int, Exception] = {}
        calls: dict[int, Ref] = {}
        try:
            remote = [rank for rank in link.world.layout.holders if not self._is_written_here(rank)] if writes else []
            for rank in remote:  # all sent first: they travel while this process copies
                with calling(f"rank {rank}"):
                    calls[rank] = self._send(rank, list(writes.values()))
            here = list(filter(self._is_written_here, link.world.layout.holders))
            for index, write in writes.items():
                written[index].update(dict.fromkeys(here, pack_flags([False] * len(write.refs))))
            num_chunks = sum(len(write.refs) for write in writes.values())
            with self._noted(writes if here else {}):
                self._arenas.run_together(
                    [partial(self._write_here, rank, writes, written, failures) for rank in here],
                    nbytes=num_chunks * sum(link.world.layout.ranks[rank].slot_nbytes for rank in here),
                )
            for rank, call in calls.items():
                self._take_answer(rank, call, writes, written, deadline)
        except LMCacheRayError as error:
            failures.update(dict.fromkeys(writes, error))
        finally:
            results = report_stores(link, items, planned, written, failures, deadline)
        return results

    def _is_written_here(self, rank: int) -> bool:
        """A process that cannot note what it writes leaves that to the ranks."""
        return self._link.is_here(rank) and self._link.liveness is not None

    def _noted(self, writes: "Mapping[int, _Write]") -> AbstractContextManager[None]:
        """Around copies into arenas: what may be written is noted where a rank, or its successor, looks for it."""
        liveness = self._link.liveness
        if liveness is None or not writes:
            return nullcontext()
        return liveness.writing([(ref.slot, ref.generation) for write in writes.values() for ref in write.refs])

    def _write_here(
        self,
        rank: int,
        writes: "Mapping[int, _Write]",
        written: dict[int, dict[int, bytes]],
        failures: dict[int, Exception],
    ) -> None:
        """Copy every item's chunks into the arena of a rank of this node; a failed copy is answered as such."""
        for index, write in writes.items():
            try:
                done = self._arenas.of_rank(rank).shard.store(write.refs, write.rows, write.item.connectors[rank])
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
