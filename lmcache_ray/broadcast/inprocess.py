"""Broadcast among ranks that are threads of one process.

::

    group = InProcessGroup(world_size=4, timeout_s=30.0)
    group.broadcaster(rank).broadcast_object(plan if rank == 0 else None, src=0)   # in rank's thread
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lmcache_ray.broadcast.base import check_rank
from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.broadcast.tensors import fill, snapshot
from lmcache_ray.errors import BroadcastAborted, ConfigError

if TYPE_CHECKING:
    import torch

_EPOCH: Final = "in-process"  # a group and its log live and die together


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Marks a payload as tensors, so that a rank which expects an object notices."""

    tensors: "tuple[torch.Tensor, ...]"


class InProcessGroup:
    """A world of `world_size` ranks in one process, one `Broadcaster` each.

    A receiver waits at most `timeout_s` seconds. A payload that some rank has not taken lies for four times as long,
    however many of them there are; then it is given up. Untagged calls work as long as the ranks keep step
    (`session_fault`); after a fault each rank's next one is refused, then all are in step again.
    """

    def __init__(self, world_size: int, timeout_s: float) -> None:
        if world_size < 1:
            raise ConfigError(f"world_size is {world_size}; accepted: at least 1")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s is {timeout_s}; accepted: more than 0")
        self._exchange = Exchange(_EPOCH, world_size, timeout_s)
        self._broadcasters = tuple(InProcessBroadcaster(self._exchange, rank) for rank in range(world_size))

    def broadcaster(self, rank: int) -> "InProcessBroadcaster":
        """The one end of `rank`; its thread, and no other, makes the untagged calls."""
        check_rank("rank", rank, len(self._broadcasters))
        return self._broadcasters[rank]

    @property
    def session_fault(self) -> str:
        """Why untagged calls are aborted; empty while they work."""
        return self._exchange.session_fault

    def new_session(self) -> None:
        """Let all ranks count their untagged calls from 0 again."""
        self._exchange.new_session()

    def rank_lost(self, rank: int) -> None:
        """Rank's thread has ended: what it has not published is aborted, nothing is kept for it."""
        check_rank("rank", rank, len(self._broadcasters))
        self._exchange.rank_lost(rank)

    def rank_back(self, rank: int) -> None:
        """A new thread serves `rank`. Breaks a session that has begun."""
        check_rank("rank", rank, len(self._broadcasters))
        self._exchange.rank_back(rank)


class InProcessBroadcaster:
    """One rank's end of an `InProcessGroup`; see `Broadcaster` for the contract."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange = exchange
        self._rank = rank

    @property
    def rank(self) -> int:
        """This end's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._exchange.world_size

    def broadcast_object(self, obj: object, *, src: int, tag: str | None = None) -> object:
        """`obj` of rank `src`: the very same object on every rank."""
        check_rank("src", src, self.world_size)
        if self._rank == src:
            self._exchange.publish(obj, src, tag)
            return obj
        received = self._exchange.receive(self._rank, src, tag)
        if isinstance(received, _Tensors):
            raise self._out_of_step(f"rank {src} sent tensors where rank {self._rank} expected an object", tag)
        return received

    def broadcast_tensors(self, tensors: "Sequence[torch.Tensor]", *, src: int, tag: str | None = None) -> None:
        """Copies the tensors of rank `src` into those of the other ranks; see `Broadcaster`."""
        check_rank("src", src, self.world_size)
        if self._rank == src:
            self._exchange.publish(_Tensors(snapshot(tensors)), src, tag)
            return
        received = self._exchange.receive(self._rank, src, tag)
        if not isinstance(received, _Tensors):
            raise self._out_of_step(f"rank {src} sent an object where rank {self._rank} expected tensors", tag)
        fill(tensors, received.tensors, src=src)

    def abort(self, reason: str, *, tag: str | None = None) -> None:
        """Receivers of this rank's next untagged call, or of `tag`, raise `BroadcastAborted` with the reason."""
        self._exchange.fail(reason, self._rank, tag)

    def break_session(self, reason: str) -> None:
        """Untagged calls are refused until every rank has been told."""
        self._exchange.break_session(reason)

    def _out_of_step(self, reason: str, tag: str | None) -> BroadcastAborted:
        """An untagged call got what another one sent: breaks the session. Returns the error to raise."""
        if tag is None:
            self._exchange.break_session(reason)
        return BroadcastAborted(reason)
