"""How one rank's retrieve goes, from checked arguments to a mask: pin, copy, believe what was intact, release.

Apart from the engine because a first-rank (MLA) world has three ways through it: rank 0 pins and sends, the others
receive, and every rank of any other world pins for itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import torch

from lmcache_ray.connector.base import KVConnector
from lmcache_ray.errors import BroadcastError, DeadlineError, LMCacheRayError
from lmcache_ray.first_rank import FIRST_RANK, FirstRankChannel, ReceivedLoad, SharedLoad, matches
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index_service import IndexClient, LeaseNames
from lmcache_ray.layout import Placement, WorldLayout
from lmcache_ray.prompt import Prompt
from lmcache_ray.shard import ArenaSource, ChunkSource, EngineShard, leading, read_chunks


@dataclass(frozen=True, slots=True)
class RetrieveCall:
    """The checked arguments of one retrieve: `rows` is the KV row of each token, `start` the first wanted token."""

    prompt: Prompt
    start: int
    rows: np.ndarray
    connector: KVConnector


@dataclass(frozen=True, slots=True)
class _PinnedLoad:
    """What to read and from where; readable until `lease_ids` are released."""

    refs: tuple[ChunkRef, ...]
    source: ChunkSource
    lease_ids: tuple[str, ...]


class Retrieval:
    """The retrieves of one rank. `shard` is None where no chunks are held, `channel` where none is needed.

    Prefixes of fewer than `min_tokens` tokens to load are left alone.
    """

    def __init__(
        self,
        worker_id: int,
        layout: WorldLayout,
        *,
        index: IndexClient,
        shard: EngineShard | None,
        channel: FirstRankChannel | None,
        lease_names: LeaseNames,
        min_tokens: int,
    ) -> None:
        self._worker_id = worker_id
        self._layout = layout
        self._index = index
        self._shard = shard
        self._channel = channel
        self._lease_names = lease_names
        self._min_tokens = min_tokens

    def run(self, read_call: Callable[[], RetrieveCall]) -> torch.Tensor:
        """Bool ``[num_tokens]``, True where the row now holds the cached KV; raises what `read_call` raises.

        The arguments are read late: on a receiver the plan is awaited first, so that a call with wrong ones uses the
        channel once like any other and the ranks stay in step.
        """
        if self._layout.placement is Placement.FIRST_RANK and self._worker_id != FIRST_RANK:
            return self._run_received(read_call)
        with self._failure_told():
            call = read_call()
            load = self._pin(call)
        return self._deliver(call, load)

    @contextmanager
    def _failure_told(self) -> Iterator[None]:
        """On rank 0 of a first-rank world: whatever fails here is a miss on the other ranks, at once."""
        try:
            yield
        except BaseException as error:
            if self._channel is not None:
                with suppress(LMCacheRayError):  # what went wrong first is what the caller must see
                    self._channel.fail(f"{type(error).__name__}: {error}")
            raise

    def _pin(self, call: RetrieveCall) -> _PinnedLoad:
        """On a holder: pin what is to be read; on rank 0 of a first-rank world also send it to the others."""
        assert self._shard is not None, "a rank that retrieves for itself holds chunks"
        num_leases = 1 if self._channel is None else self._layout.world_size
        lease_ids = tuple(self._lease_names.for_load() for _ in range(num_leases))
        plan = self._index.prepare_load(
            call.prompt.keys, start=call.start // self._layout.chunk_size, lease_ids=lease_ids
        )
        if self._channel is not None:
            try:
                self._channel.send(SharedLoad(plan.start, plan.refs, lease_ids))
            except (BroadcastError, DeadlineError):  # a miss on the others, who know or will find out; not here
                self._index.release(lease_ids[1:])
            except BaseException:
                self._index.release(lease_ids)
                raise
        return _PinnedLoad(plan.refs, ArenaSource(self._shard.slots), lease_ids[:1])

    def _run_received(self, read_call: Callable[[], RetrieveCall]) -> torch.Tensor:
        """On another rank of a first-rank world: read what rank 0 says, if it is what was asked here."""
        received = self._receive()
        try:
            call = read_call()
        except BaseException:
            self._give_back(received)
            raise
        if received is None:
            return _nothing(call)
        if not matches(received.load, call.prompt.keys, call.start // self._layout.chunk_size):
            self._give_back(received)
            assert self._channel is not None, "what was received came through a channel"
            with suppress(LMCacheRayError):  # then the next call finds out; this one is a miss either way
                self._channel.out_of_step(f"rank {self._worker_id} was sent another prompt's load")
            return _nothing(call)
        return self._deliver(call, _PinnedLoad(received.load.refs, received.source, self._own_lease(received.load)))

    def _receive(self) -> ReceivedLoad | None:
        """What rank 0 sent; None if it failed, died or stayed silent."""
        assert self._channel is not None, "a receiver is built with a channel"
        try:
            return self._channel.receive()
        except (BroadcastError, DeadlineError):
            return None

    def _deliver(self, call: RetrieveCall, load: _PinnedLoad) -> torch.Tensor:
        """Scatter the pinned chunks and end the lease; the mask has True where the bytes were intact to the end."""
        try:
            delivered = _nothing(call)
            first = call.start // self._layout.chunk_size
            end = call.prompt.tokens_in(first + len(load.refs)) if load.refs else 0
            if end <= call.start or end - call.start < self._min_tokens:
                return delivered
            rows = call.prompt.rows(call.rows, range(first, first + len(load.refs)), start=call.start)
            first_row = call.start - call.prompt.spans[first][0]
            num_loaded = leading(read_chunks(load.source, load.refs, rows, call.connector, first_row=first_row))
            delivered[call.start : call.prompt.tokens_in(first + num_loaded)] = True
            return delivered
        finally:
            if load.refs:
                self._index.release(load.lease_ids)

    def _give_back(self, received: ReceivedLoad | None) -> None:
        if received is not None and received.load.refs:
            self._index.release(self._own_lease(received.load))

    def _own_lease(self, load: SharedLoad) -> tuple[str, ...]:
        return load.lease_ids[self._worker_id :][:1]


def _nothing(call: RetrieveCall) -> torch.Tensor:
    return torch.zeros(call.prompt.num_tokens, dtype=torch.bool)
