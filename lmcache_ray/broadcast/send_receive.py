"""What a broadcaster does with objects and tensors, given a way to send one message and to receive one.

Apart from `inprocess.py`, so that the ends of a broadcast between processes, which live outside this library, behave
the same: they derive from `SendReceiveBroadcaster` too.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmcache_ray.broadcast.base import check_rank
from lmcache_ray.broadcast.tensors import TensorSpec, fill, specs_of
from lmcache_ray.errors import BroadcastAborted


@dataclass(frozen=True, slots=True)
class TensorMessage:
    """Tensors on their way, as bytes: between processes, torch cannot pickle those of every dtype (float8).

    A type of its own, so that a rank which expects an object notices.
    """

    specs: tuple[TensorSpec, ...]
    contents: tuple[bytearray, ...]

    @staticmethod
    def pack(tensors: Sequence[torch.Tensor]) -> "TensorMessage":
        """A copy of all bytes: the source may reuse its tensors at once."""
        flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        return TensorMessage(specs_of(tensors), tuple(bytearray(content.numpy().data) for content in flat))

    def unpack(self) -> list[torch.Tensor]:
        """The tensors again, over these very bytes: read them only, others may too."""
        return [
            torch.frombuffer(content, dtype=spec.dtype).reshape(spec.shape)
            if content
            else torch.empty(spec.shape, dtype=spec.dtype)
            for content, spec in zip(self.contents, self.specs, strict=True)
        ]


class SendReceiveBroadcaster(ABC):
    """One rank's end; see `Broadcaster` for the contract. A subclass says how one message travels, and what a break is.

    Untagged calls that turn out not to be the same on both sides break the session.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        check_rank("rank", rank, world_size)
        self._rank = rank
        self._world_size = world_size

    @property
    def rank(self) -> int:
        """This end's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @abstractmethod
    def send_message(self, message: object, *, tag: str | None) -> None:
        """Publish `message` as this rank's next untagged call, or as `tag`, without waiting for receivers."""

    @abstractmethod
    def receive_message(self, src: int, *, tag: str | None) -> object:
        """What `src` published for this rank's next untagged call, or as `tag`.

        Raises `BroadcastAborted` if it will not come, `DeadlineError` at the deadline.
        """

    @abstractmethod
    def abort(self, reason: str, *, tag: str | None = None) -> None:
        """Receivers of this rank's next untagged call, or of `tag`, raise `BroadcastAborted` with the reason."""

    @abstractmethod
    def break_session(self, reason: str) -> None:
        """Untagged calls are refused until every rank has been told."""

    def broadcast_object(self, obj: object, *, src: int, tag: str | None = None) -> object:
        """`obj` of rank `src`, on every rank."""
        check_rank("src", src, self._world_size)
        if self._rank == src:
            self.send_message(obj, tag=tag)
            return obj
        received = self.receive_message(src, tag=tag)
        if isinstance(received, TensorMessage):
            raise self._out_of_step(f"rank {src} sent tensors where rank {self._rank} expected an object", tag)
        return received

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], *, src: int, tag: str | None = None) -> None:
        """Copies the tensors of rank `src` into those of the other ranks, in place."""
        check_rank("src", src, self._world_size)
        if self._rank == src:
            self.send_message(TensorMessage.pack(tensors), tag=tag)
            return
        received = self.receive_message(src, tag=tag)
        if not isinstance(received, TensorMessage):
            raise self._out_of_step(f"rank {src} sent an object where rank {self._rank} expected tensors", tag)
        fill(tensors, received.unpack(), src=src)

    def _out_of_step(self, reason: str, tag: str | None) -> BroadcastAborted:
        """An untagged call got what another one sent: breaks the session. Returns the error to raise."""
        if tag is None:
            self.break_session(reason)
        return BroadcastAborted(reason)
