"""Broadcast among ranks in different processes: through the coordinator, small objects only, never a hang.

Bytes do not go this way. `ClusterChannel` sends rank 0's load plan; ranks on its node then read its arena, and for
the others rank 0 exports the chunks once into Ray's object store and sends the reference.
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import ray
from ray import cloudpickle
from ray.exceptions import RayError

from lmcache_ray.broadcast.exchange import described
from lmcache_ray.broadcast.send_receive import SendReceiveBroadcaster
from lmcache_ray.broadcast.tags import Aborted, Call, Payload, Tag
from lmcache_ray.errors import ArenaError, BroadcastAborted, BroadcastError, ClusterError
from lmcache_ray.first_rank import FIRST_RANK, ReceivedLoad, SharedLoad
from lmcache_ray.shard import ArenaSource, ChunkSource, PayloadSource, export_chunks

from .coordinator_client import CoordinatorClient
from .messages import Parcel, pack_flags, unpack_flags
from .messages import Payload as ChunkPayload
from .rank import Rank
from .ray_calls import Ref

_POLL_S: Final = 1.0  # a waiting rank holds one of the coordinator's threads at most this long at a time


class CoordinatorBroadcaster(SendReceiveBroadcaster):
    """One rank's end of the broadcasts that a coordinator keeps, which carries them: small tensors only."""

    def __init__(self, rank: int, world_size: int, coordinator: CoordinatorClient, *, timeout_s: float) -> None:
        super().__init__(rank, world_size)
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._numbers = itertools.count()  # of untagged calls

    def send_message(self, message: object, *, tag: str | None) -> None:
        """See `SendReceiveBroadcaster.send_message`; the message is pickled."""
        self.send(message, tag=tag)

    def receive_message(self, src: int, *, tag: str | None) -> object:
        """See `SendReceiveBroadcaster.receive_message`."""
        message, _ = self.receive(src, tag=tag)
        return message

    def abort(self, reason: str, *, tag: str | None = None) -> None:
        """Receivers of this rank's next untagged call, or of `tag`, raise `BroadcastAborted` with the reason."""
        with _possible():
            self._coordinator.fail_broadcast(self._rank, tag, reason, call=self._call(tag))

    def break_session(self, reason: str) -> None:
        """Untagged calls are refused until every rank has been told."""
        with _possible():
            self._coordinator.break_broadcasts(reason)

    def send(self, obj: object, *, references: Sequence[Ref] = (), tag: str | None = None) -> None:
        """As the source: publish `obj`, and with it references to objects in Ray's store."""
        parcel = Parcel(cloudpickle.dumps(obj), tuple(references))
        with _possible():
            self._coordinator.publish(self._rank, tag, parcel, call=self._call(tag))

    def receive(self, src: int, *, tag: str | None = None) -> tuple[object, tuple[Ref, ...]]:
        """What `src` sent: object and references. Raises `BroadcastAborted`, or `DeadlineError`.

        Asks again and again, because the coordinator answers `Pending` rather than keep a thread for one rank.
        """
        deadline = time.monotonic() + self._timeout_s
        taking: Tag | None = None
        call = self._call(tag)
        while True:
            wait_s = max(0.0, min(_POLL_S, deadline - time.monotonic()))
            with _possible():
                taking, result = self._coordinator.take(self._rank, src, tag, taking, wait_s, call=call)
            if isinstance(result, Payload):
                parcel = result.value
                assert isinstance(parcel, Parcel)
                return cloudpickle.loads(parcel.pickled), parcel.references
            if isinstance(result, Aborted):
                raise BroadcastAborted(f"broadcast {described(taking)} from rank {src}: {result.reason}")
            if time.monotonic() >= deadline:
                with _possible():
                    raise self._coordinator.give_up_broadcast(self._rank, taking)

    def _call(self, tag: str | None) -> Call | None:
        """A call that begins now, if it has no tag: it may be overtaken on its way by the next one."""
        return Call(os.getpid(), next(self._numbers)) if tag is None else None


@contextmanager
def _possible() -> Iterator[None]:
    """A coordinator that is gone or silent makes a broadcast impossible; a refusal by it passes through."""
    try:
        yield
    except ClusterError as error:
        raise BroadcastError(f"broadcast is not possible: {error}") from error


@dataclass(frozen=True, slots=True)
class _FirstRankLoad:
    """What rank 0 sends: its plan and where its arena is; a reference to the chunks' bytes goes with it if needed."""

    load: SharedLoad
    node_id: str
    arena_path: str


class ClusterChannel:
    """The `FirstRankChannel` of ranks in actors."""

    def __init__(self, broadcaster: CoordinatorBroadcaster, rank: Rank, *, has_other_nodes: bool) -> None:
        self._broadcaster = broadcaster
        self._rank = rank
        self._has_other_nodes = has_other_nodes

    def send(self, load: SharedLoad) -> None:
        """Publish the plan; one export serves all ranks of other nodes."""
        shard, path = self._rank.shard, self._rank.arena_path
        if shard is None or path is None:
            raise BroadcastError("only the first rank, which holds the chunks, can send them")
        references: list[Ref] = []
        if self._has_other_nodes and load.refs:
            data, present = export_chunks(ArenaSource(shard.slots), load.refs, self._rank.layout.slot_nbytes)
            references.append(ray.put(ChunkPayload(data, pack_flags(present))))
        self._broadcaster.send(_FirstRankLoad(load, self._rank.place.node_id, path), references=references)

    def fail(self, reason: str) -> None:
        """Publish the failure."""
        self._broadcaster.abort(reason)

    def out_of_step(self, reason: str) -> None:
        """Have the ranks agree on their order again."""
        self._broadcaster.break_session(reason)

    def receive(self) -> ReceivedLoad:
        """Wait for the plan, and for its bytes where they come from another node."""
        message, references = self._broadcaster.receive(FIRST_RANK)
        if not isinstance(message, _FirstRankLoad):
            raise BroadcastAborted(f"rank {FIRST_RANK} sent {type(message).__name__} where a load plan was due")
        return ReceivedLoad(message.load, self._source_of(message, references))

    def _source_of(self, message: _FirstRankLoad, references: Sequence[Ref]) -> ChunkSource:
        """A source that cannot be reached holds no chunk: a miss."""
        nothing = PayloadSource(np.empty((0, 0), dtype=np.uint8), [False] * len(message.load.refs))
        if not message.load.refs:
            return nothing
        try:
            if message.node_id == self._rank.place.node_id:
                return self._rank.source_at(message.arena_path)
            payload = ray.get(references[0], timeout=self._rank.world.call_timeout_s / 3)
        except (ArenaError, RayError, IndexError):
            return nothing
        assert isinstance(payload, ChunkPayload)
        return PayloadSource(payload.data, unpack_flags(payload.present))
