"""LMCache's two broadcast functions, both ways: made from a `Broadcaster`, and made into one.

An engine that has its own collectives hands over ``broadcast_fn(tensor, src)`` and ``broadcast_object_fn(obj, src)``.
Such functions know no tags and no failure, so each broadcast here begins with one object that carries both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from lmcache_ray.broadcast.base import Broadcaster, check_rank
from lmcache_ray.broadcast.tensors import TensorSpec, check_specs, specs_of
from lmcache_ray.errors import BroadcastAborted, BroadcastError, shown

if TYPE_CHECKING:
    import torch

BroadcastFn: TypeAlias = Callable[["torch.Tensor", int], object]
"""``(tensor, src)``: fills the tensor in place on every rank but `src`. What it returns is not used."""
BroadcastObjectFn: TypeAlias = Callable[[object, int], object]
"""``(obj, src)``: returns src's object on every rank."""


class BroadcastFns(NamedTuple):
    """LMCache's pair of functions."""

    broadcast_fn: BroadcastFn
    broadcast_object_fn: BroadcastObjectFn


def broadcast_fns(broadcaster: Broadcaster) -> BroadcastFns:
    """The pair that broadcasts through `broadcaster`, untagged."""

    def broadcast_fn(tensor: "torch.Tensor", src: int) -> None:
        broadcaster.broadcast_tensors([tensor], src=src)

    def broadcast_object_fn(obj: object, src: int) -> object:
        return broadcaster.broadcast_object(obj, src=src)

    return BroadcastFns(broadcast_fn, broadcast_object_fn)


@dataclass(frozen=True, slots=True)
class _ObjectMessage:
    tag: str | None
    obj: object


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    """Says which tensors follow."""

    tag: str | None
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class _AbortMarker:
    """Stands in place of the object or header that the source could not send."""

    tag: str | None
    reason: str


_Sent: TypeAlias = _ObjectMessage | _TensorHeader
_Message = TypeVar("_Message", _ObjectMessage, _TensorHeader)


class CallableBroadcaster:
    """A `Broadcaster` over a user's two functions. Every rank of the world must use one.

    Calls are matched by order; a tag is compared, not looked up: a rank that receives another tag or kind than its
    own raises `BroadcastAborted`. Deadlines are those of the functions, whose errors pass through unchanged.
    """

    def __init__(
        self, rank: int, world_size: int, broadcast_fn: BroadcastFn, broadcast_object_fn: BroadcastObjectFn
    ) -> None:
        check_rank("rank", rank, world_size)
        self._rank = rank
        self._world_size = world_size
        self._broadcast_fn = broadcast_fn
        self._broadcast_object_fn = broadcast_object_fn

    @property
    def rank(self) -> int:
        """This end's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    def broadcast_object(self, obj: object, *, src: int, tag: str | None = None) -> object:
        """One call of ``broadcast_object_fn``."""
        check_rank("src", src, self._world_size)
        if self._rank == src:
            self._broadcast_object_fn(_ObjectMessage(tag, obj), src)
            return obj
        return self._receive(_ObjectMessage, src, tag).obj

    def broadcast_tensors(self, tensors: "Sequence[torch.Tensor]", *, src: int, tag: str | None = None) -> None:
        """One call of ``broadcast_object_fn``, then one of ``broadcast_fn`` per tensor."""
        check_rank("src", src, self._world_size)
        if self._rank == src:
            self._broadcast_object_fn(_TensorHeader(tag, specs_of(tensors)), src)
            for tensor in tensors:
                self._broadcast_fn(tensor, src)
            return
        header = self._receive(_TensorHeader, src, tag)
        try:
            check_specs(specs_of(tensors), header.specs, src=src)
        except BroadcastError:
            self._drain(header.specs, src)
            raise
        for tensor in tensors:
            self._broadcast_fn(tensor, src)

    def abort(self, reason: str, *, tag: str | None = None) -> None:
        """Sends a marker where receivers expect an object."""
        self._broadcast_object_fn(_AbortMarker(tag, reason), self._rank)

    def break_session(self, reason: str) -> None:
        """Nothing to do: the functions know no sessions, their order is all there is."""

    def _receive(self, expected: type[_Message], src: int, tag: str | None) -> _Message:
        message = self._broadcast_object_fn(None, src)
        if isinstance(message, _AbortMarker):
            raise BroadcastAborted(f"broadcast from rank {src}: rank {src} failed: {message.reason}")
        if isinstance(message, expected) and message.tag == tag:
            return message
        if isinstance(message, _TensorHeader):
            self._drain(message.specs, src)
        due = _described(expected, tag)
        sent = _described(type(message), message.tag) if isinstance(message, _Sent) else shown(message)
        raise BroadcastAborted(f"rank {src} sent {sent} where rank {self._rank} expected {due}")

    def _drain(self, specs: Sequence[TensorSpec], src: int) -> None:
        # The other ranks make these collective calls too: leaving them out would put all later ones out of step.
        import torch

        for spec in specs:
            self._broadcast_fn(torch.empty(spec.shape, dtype=spec.dtype), src)


def _described(kind: type[_Sent], tag: str | None) -> str:
    return f"{'tensors' if kind is _TensorHeader else 'an object'} {f'of tag {tag!r}' if tag else 'without a tag'}"
