"""Broadcast among ranks in different processes: through the coordinator, small objects only, never a hang.

Bytes do not go this way. `ClusterChannel` sends rank 0's load plan; ranks on its node then read its arena, and for
the others rank 0 exports the chunks once into Ray's object store and sends the reference.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayError

from lmcache_ray.broadcast.base import check_rank
from lmcache_ray.broadcast.exchange import described
from lmcache_ray.broadcast.tags import Aborted, Payload, Tag
from lmcache_ray.broadcast.tensors import TensorSpec, fill, specs_of
from lmcache_ray.errors import ArenaError, BroadcastAborted, BroadcastError, ClusterError
from lmcache_ray.first_rank import FIRST_RANK, ReceivedLoad, SharedLoad
from lmcache_ray.shard import ArenaSource, ChunkSource, PayloadSource, export_chunks

from .coordinator_client import CoordinatorClient
from .messages import Parcel, pack_flags, unpack_flags
from .messages import Payload as ChunkPayload
from .rank import Rank
from .ray_calls import Ref

_POLL_S: Final = 1.0  # a waiting rank holds one of the coordinator's threads at most this long at a time


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Tensors on their way, as bytes: torch cannot pickle those of every dtype (float8).

    A type of its own, so that a rank which expects an object notices.
    """

    specs: tuple[TensorSpec, ...]
    contents: tuple[bytes, ...]

    @staticmethod
    def pack(tensors: Sequence[torch.Tensor]) -> "_Tensors":
        """A copy of all bytes."""
        flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        return _Tensors(specs_of(tensors), tuple(content.numpy().tobytes() for content in flat))

    def unpack(self) -> list[torch.Tensor]:
        """The tensors again."""
        flat = [torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy()) for content in self.contents]
        return [
            content.view(spec.dtype).reshape(spec.shape) for content, spec in zip(flat, self.specs, strict=True)
        ]


class CoordinatorBroadcaster:
    """One rank's end of the broadcasts that a coordinator keeps; see `Broadcaster` for the contract."""

    def __init__(self, rank: int, world_size: int, coordinator: CoordinatorClient, *, timeout_s: float) -> None:
        check_rank("rank", rank, world_size)
        self._rank = rank
        self._world_size = world_size
        self._coordinator = coordinator
        self._timeout_s = timeout_s

    @property
    def rank(self) -> int:
        """This end's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    def broadcast_object(self, obj: object, *, src: int, tag: str | None = None) -> object:
        """`obj` of rank `src`; it is pickled on its way."""
        check_rank("src", src, self._world_size)
        if self._rank == src:
            self.send(obj, tag=tag)
            return obj
        received, _ = self.receive(src, tag=tag)
        if isinstance(received, _Tensors):
            raise self._out_of_step(f"rank {src} sent tensors where rank {self._rank} expected an object", tag)
        return received

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], *, src: int, tag: str | None = None) -> None:
        """Copies the tensors of rank `src` into those of the others. For small ones: the coordinator carries them."""
        check_rank("src", src, self._world_size)
        if self._rank == src:
            self.send(_Tensors.pack(tensors), tag=tag)
            return
        received, _ = self.receive(src, tag=tag)
        if not isinstance(received, _Tensors):
            raise self._out_of_step(f"rank {src} sent an object where rank {self._rank} expected tensors", tag)
        fill(tensors, received.unpack(), src=src)

    def abort(self, reason: str, *, tag: str | None = None) -> None:
        """Receivers of this rank's next untagged call, or of `tag`, raise `BroadcastAborted` with the reason."""
        with _possible():
            self._coordinator.fail_broadcast(self._rank, tag, reason)

    def break_session(self, reason: str) -> None:
        """Untagged calls are refused until every rank has been told."""
        with _possible():
            self._coordinator.break_broadcasts(reason)

    def send(self, obj: object, *, references: Sequence[Ref] = (), tag: str | None = None) -> None:
        """As the source: publish `obj`, and with it references to objects in Ray's store."""
        parcel = Parcel(cloudpickle.dumps(obj), tuple(references))
        with _possible():
            self._coordinator.publish(self._rank, tag, parcel)

    def receive(self, src: int, *, tag: str | None = None) -> tuple[object, tuple[Ref, ...]]:
        """What `src` sent: object and references. Raises `BroadcastAborted`, or `DeadlineError`.

        Asks again and again, because the coordinator answers `Pending` rather than keep a thread for one rank.
        """
        deadline = time.monotonic() + self._timeout_s
        taking: Tag | None = None
        while True:
            wait_s = max(0.0, min(_POLL_S, deadline - time.monotonic()))
            with _possible():
                taking, result = self._coordinator.take(self._rank, src, tag, taking, wait_s)
            if isinstance(result, Payload):
                parcel = result.value
                assert isinstance(parcel, Parcel)
                return cloudpickle.loads(parcel.pickled), parcel.references
            if isinstance(result, Aborted):
                raise BroadcastAborted(f"broadcast {described(taking)} from rank {src}: {result.reason}")
            if time.monotonic() >= deadline:
                with _possible():
                    raise self._coordinator.give_up_broadcast(self._rank, taking)

    def _out_of_step(self, reason: str, tag: str | None) -> BroadcastAborted:
        if tag is None:
            self.break_session(reason)
        return BroadcastAborted(reason)


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
