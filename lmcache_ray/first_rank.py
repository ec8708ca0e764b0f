"""How the ranks of a first-rank (MLA) world get rank 0's chunks when each rank calls `retrieve` itself.

Rank 0 asks the index, sends its load plan once, and every rank reads the planned chunks into its own paged KV. A
channel carries the plan and tells the receiver where the bytes are. Rank 0 never waits for receivers; when it fails
it sends that instead, and the receivers call it a miss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lmcache_ray.arena.slots import ArenaSlots
from lmcache_ray.broadcast.base import Broadcaster
from lmcache_ray.errors import BroadcastAborted, BroadcastError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.shard import ArenaSource, ChunkSource, PayloadSource, export_chunks

FIRST_RANK = 0


@dataclass(frozen=True, slots=True)
class SharedLoad:
    """Rank 0's plan as it is broadcast. `lease_ids[rank]` pins the chunks until that rank releases it."""

    start: int
    refs: tuple[ChunkRef, ...]
    lease_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReceivedLoad:
    """A load as a receiver sees it: what to read and from where."""

    load: SharedLoad
    source: ChunkSource


class FirstRankChannel(Protocol):
    """One direction, rank 0 to the others; each `retrieve` of a rank uses it exactly once."""

    def send(self, load: SharedLoad) -> None:
        """On rank 0: publish the plan."""
        ...

    def fail(self, reason: str) -> None:
        """On rank 0: publish that this retrieve failed."""
        ...

    def receive(self) -> ReceivedLoad:
        """On another rank: wait for the plan.

        Raises `BroadcastAborted` if rank 0 failed or died, `DeadlineError` if it stayed silent.
        """
        ...

    def out_of_step(self, reason: str) -> None:
        """On another rank: what came belongs to another call, so the ranks must agree on their order again."""
        ...


class ArenaChannel:
    """For ranks in one process: the plan is broadcast, the bytes are read in rank 0's arena."""

    def __init__(self, broadcaster: Broadcaster, first_rank_slots: ArenaSlots) -> None:
        self._broadcaster = broadcaster
        self._source = ArenaSource(first_rank_slots)

    def send(self, load: SharedLoad) -> None:
        """Publish the plan."""
        self._broadcaster.broadcast_object(load, src=FIRST_RANK)

    def fail(self, reason: str) -> None:
        """Publish the failure."""
        self._broadcaster.abort(reason)

    def out_of_step(self, reason: str) -> None:
        """Have the ranks agree on their order again."""
        self._broadcaster.break_session(reason)

    def receive(self) -> ReceivedLoad:
        """Wait for the plan."""
        return ReceivedLoad(_as_load(self._broadcaster.broadcast_object(None, src=FIRST_RANK)), self._source)


class TensorChannel:
    """For ranks joined by nothing but LMCache's two callables: one object and one tensor of all bytes a retrieve.

    `slots` are rank 0's, None on the others. The others read a copy and have no part in rank 0's index, so
    ``release(lease_ids)`` ends their leases there as soon as it is made.
    """

    def __init__(
        self,
        broadcaster: Broadcaster,
        slots: ArenaSlots | None,
        slot_nbytes: int,
        *,
        release: Callable[[Sequence[str]], None],
    ) -> None:
        self._broadcaster = broadcaster
        self._slots = slots
        self._slot_nbytes = slot_nbytes
        self._release = release

    def send(self, load: SharedLoad) -> None:
        """Publish the plan, then the bytes of its chunks; a chunk that is gone by then is marked so."""
        if self._slots is None:
            raise BroadcastError("only the first rank, which holds the chunks, can send them")
        payload, present = export_chunks(ArenaSource(self._slots), load.refs, self._slot_nbytes)
        self._release(load.lease_ids[FIRST_RANK + 1 :])
        self._broadcaster.broadcast_object((load, tuple(present)), src=FIRST_RANK)
        if load.refs:
            self._broadcaster.broadcast_tensors([torch.from_numpy(payload)], src=FIRST_RANK)

    def fail(self, reason: str) -> None:
        """Publish the failure."""
        self._broadcaster.abort(reason)

    def out_of_step(self, reason: str) -> None:
        """Have the ranks agree on their order again."""
        self._broadcaster.break_session(reason)

    def receive(self) -> ReceivedLoad:
        """Wait for the plan and its bytes."""
        message = self._broadcaster.broadcast_object(None, src=FIRST_RANK)
        if not (isinstance(message, tuple) and len(message) == 2):
            raise BroadcastAborted(f"rank {FIRST_RANK} sent {type(message).__name__} where a load plan was due")
        load = _as_load(message[0])
        payload = np.empty((len(load.refs), self._slot_nbytes), dtype=np.uint8)
        if load.refs:
            self._broadcaster.broadcast_tensors([torch.from_numpy(payload)], src=FIRST_RANK)
        return ReceivedLoad(load, PayloadSource(payload, message[1]))


def _as_load(message: object) -> SharedLoad:
    if not isinstance(message, SharedLoad):
        raise BroadcastAborted(f"rank {FIRST_RANK} sent {type(message).__name__} where a load plan was due")
    return message


def matches(load: SharedLoad, keys: Sequence[bytes], start: int) -> bool:
    """True if the load is of this prompt from this chunk on: a receiver that finds others calls it a miss."""
    return load.start == start and [ref.key for ref in load.refs] == list(keys[start : start + len(load.refs)])
