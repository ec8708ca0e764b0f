"""How one rank's retrieve goes, from checked arguments to a mask: pin, copy, believe what was intact, release.

Apart from the engine because there are three ways through it, of which each engine is given one: a rank that holds
its own chunks pins and reads them, rank 0 of a first-rank (MLA) world also sends its plan, and the others there read
by what they receive.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lmcache_ray.connector.base import KVConnector
from lmcache_ray.errors import BroadcastError, DeadlineError, LMCacheRayError
from lmcache_ray.first_rank import FirstRankChannel, ReceivedLoad, SharedLoad, matches
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index_service import IndexClient, LeaseNames
from lmcache_ray.prompt import Prompt
from lmcache_ray.shard import ChunkSource, leading, read_chunks


@dataclass(frozen=True, slots=True)
class RetrieveCall:
    """The checked arguments of one retrieve.

    `start` is the first wanted token and lies in chunk number `first_chunk`; `rows` is the KV row of each token.
    """

    prompt: Prompt
    start: int
    first_chunk: int
    rows: np.ndarray
    connector: KVConnector

    def nothing(self) -> torch.Tensor:
        """The answer to a miss."""
        return torch.zeros(self.prompt.num_tokens, dtype=torch.bool)


class Retrieval(Protocol):
    """The retrieves of one rank."""

    @property
    def min_tokens(self) -> int:
        """Prefixes of which fewer tokens are to be loaded are left alone."""
        ...

    def run(self, read_call: Callable[[], RetrieveCall]) -> torch.Tensor:
        """Bool ``[num_tokens]``, True where the row now holds the cached KV; raises what `read_call` raises.

        The arguments are read by it, and late: on a receiver the plan is awaited first, so that a call with wrong ones
        uses the channel once like any other and the ranks stay in step.
        """
        ...


class Delivery:
    """What every way ends with: copying pinned chunks into the rows, and ending the leases."""

    def __init__(self, index: IndexClient, *, min_tokens: int) -> None:
        self.index = index
        self.min_tokens = min_tokens

    def deliver(
        self, call: RetrieveCall, refs: Sequence[ChunkRef], source: ChunkSource, lease_ids: Sequence[str]
    ) -> torch.Tensor:
        """Scatter the chunks and end the leases; the mask has True where the bytes were intact to the end."""
        try:
            delivered = call.nothing()
            first = call.first_chunk
            end = call.prompt.tokens_in(first + len(refs)) if refs else 0
            if end <= call.start or end - call.start < self.min_tokens:
                return delivered
            rows = call.prompt.rows(call.rows, range(first, first + len(refs)), start=call.start)
            first_row = call.start - call.prompt.start_of(first)
            num_loaded = leading(read_chunks(source, refs, rows, call.connector, first_row=first_row))
            delivered[call.start : call.prompt.tokens_in(first + num_loaded)] = True
            return delivered
        finally:
            self.give_back(refs, lease_ids)

    def give_back(self, refs: Sequence[ChunkRef], lease_ids: Sequence[str]) -> None:
        """End the leases; without chunks there are none."""
        if refs:
            self.index.release(lease_ids)


class OwnRetrieval:
    """Of a rank that holds its own chunks and has nobody to tell: it pins and reads them."""

    def __init__(self, delivery: Delivery, source: ChunkSource, lease_names: LeaseNames) -> None:
        self._delivery = delivery
        self._source = source
        self._lease_names = lease_names

    @property
    def min_tokens(self) -> int:
        """See `Retrieval`."""
        return self._delivery.min_tokens

    def run(self, read_call: Callable[[], RetrieveCall]) -> torch.Tensor:
        """See `Retrieval`."""
        call = read_call()
        lease_ids = (self._lease_names.for_load(),)
        plan = self._delivery.index.prepare_load(call.prompt.keys, start=call.first_chunk, lease_ids=lease_ids)
        return self._delivery.deliver(call, plan.refs, self._source, lease_ids)


class SendingRetrieval:
    """Of rank 0 in a first-rank world of `world_size` ranks: it pins for all, sends its plan, and reads its chunks."""

    def __init__(
        self,
        delivery: Delivery,
        source: ChunkSource,
        lease_names: LeaseNames,
        channel: FirstRankChannel,
        *,
        world_size: int,
    ) -> None:
        self._delivery = delivery
        self._source = source
        self._lease_names = lease_names
        self._channel = channel
        self._world_size = world_size

    @property
    def min_tokens(self) -> int:
        """See `Retrieval`."""
        return self._delivery.min_tokens

    def run(self, read_call: Callable[[], RetrieveCall]) -> torch.Tensor:
        """See `Retrieval`."""
        with self._failure_told():
            call = read_call()
            load = self._pin(call)
            self._send(load)
        return self._delivery.deliver(call, load.refs, self._source, load.lease_ids[:1])

    @contextmanager
    def _failure_told(self) -> Iterator[None]:
        """Whatever fails here is a miss on the other ranks, at once."""
        try:
            yield
        except BaseException as error:
            with suppress(LMCacheRayError):  # what went wrong first is what the caller must see
                self._channel.fail(f"{type(error).__name__}: {error}")
            raise

    def _pin(self, call: RetrieveCall) -> SharedLoad:
        lease_ids = tuple(self._lease_names.for_load() for _ in range(self._world_size))
        plan = self._delivery.index.prepare_load(call.prompt.keys, start=call.first_chunk, lease_ids=lease_ids)
        return SharedLoad(plan.start, plan.refs, lease_ids)

    def _send(self, load: SharedLoad) -> None:
        try:
            self._channel.send(load)
        except (BroadcastError, DeadlineError):  # a miss on the others, who know or will find out; not here
            self._delivery.give_back(load.refs, load.lease_ids[1:])
        except BaseException:
            self._delivery.give_back(load.refs, load.lease_ids)
            raise


class ReceivingRetrieval:
    """Of another rank of a first-rank world: it reads what rank 0 says, if that is what was asked here."""

    def __init__(self, delivery: Delivery, channel: FirstRankChannel, rank: int) -> None:
        self._delivery = delivery
        self._channel = channel
        self._rank = rank

    @property
    def min_tokens(self) -> int:
        """See `Retrieval`."""
        return self._delivery.min_tokens

    def run(self, read_call: Callable[[], RetrieveCall]) -> torch.Tensor:
        """See `Retrieval`."""
        received = self._receive()
        if received is None:
            return read_call().nothing()
        load = received.load
        own_lease = load.lease_ids[self._rank :][:1]
        try:
            call = read_call()
        except BaseException:
            self._delivery.give_back(load.refs, own_lease)
            raise
        if matches(load, call.prompt.keys, call.first_chunk):
            return self._delivery.deliver(call, load.refs, received.source, own_lease)
        self._delivery.give_back(load.refs, own_lease)
        with suppress(LMCacheRayError):  # then the next call finds out; this one is a miss either way
            self._channel.out_of_step(f"rank {self._rank} was sent another prompt's load")
        return call.nothing()

    def _receive(self) -> ReceivedLoad | None:
        """What rank 0 sent; None if it failed, died or stayed silent."""
        try:
            return self._channel.receive()
        except (BroadcastError, DeadlineError):
            return None
