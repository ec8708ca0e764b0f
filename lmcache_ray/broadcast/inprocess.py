"""Broadcast among ranks that are threads of one process.

::

    group = InProcessGroup(world_size=4, timeout_s=30.0)
    group.broadcaster(rank).broadcast_object(plan if rank == 0 else None, src=0)   # in rank's thread
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lmcache_ray.broadcast.base import check_rank
from lmcache_ray.broadcast.log import Aborted, BroadcastLog, NamedTag, Payload, SessionTag, Tag
from lmcache_ray.broadcast.tensors import fill, snapshot
from lmcache_ray.errors import BroadcastAborted, ConfigError, DeadlineError

if TYPE_CHECKING:
    import torch

_EPOCH: Final = "in-process"  # a group and its log live and die together
_KEEP_TIMEOUTS: Final = 4


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Marks a payload as tensors, so that a rank which expects an object notices."""

    tensors: "tuple[torch.Tensor, ...]"


class InProcessGroup:
    """A world of `world_size` ranks in one process, one `Broadcaster` each.

    A receiver waits at most `timeout_s` seconds. A payload that some rank has not taken lies for four times as long,
    however many of them there are; then it is given up. Untagged calls work as long as the ranks keep step
    (`session_fault`); after a fault, `new_session` at a moment when no rank is in a broadcast.
    """

    def __init__(self, world_size: int, timeout_s: float) -> None:
        if world_size < 1:
            raise ConfigError(f"world_size is {world_size}; accepted: at least 1")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s is {timeout_s}; accepted: more than 0")
        log = BroadcastLog(_EPOCH, world_size, ttl_s=timeout_s * _KEEP_TIMEOUTS)
        self._exchange = _Exchange(log, timeout_s)
        self._broadcasters = tuple(InProcessBroadcaster(self._exchange, rank) for rank in range(world_size))

    def broadcaster(self, rank: int) -> "InProcessBroadcaster":
        """The one end of `rank`; its thread, and no other, makes the untagged calls."""
        check_rank("rank", rank, len(self._broadcasters))
        return self._broadcasters[rank]

    @property
    def session_fault(self) -> str:
        """Why untagged calls are aborted; empty while they work."""
        return self._exchange.session_fault()

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

    def __init__(self, exchange: "_Exchange", rank: int) -> None:
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
            raise self._exchange.out_of_step(f"rank {src} sent tensors where rank {self._rank} expected an object", tag)
        return received

    def broadcast_tensors(self, tensors: "Sequence[torch.Tensor]", *, src: int, tag: str | None = None) -> None:
        """Copies the tensors of rank `src` into those of the other ranks; see `Broadcaster`."""
        check_rank("src", src, self.world_size)
        if self._rank == src:
            self._exchange.publish(_Tensors(snapshot(tensors)), src, tag)
            return
        received = self._exchange.receive(self._rank, src, tag)
        if not isinstance(received, _Tensors):
            raise self._exchange.out_of_step(f"rank {src} sent an object where rank {self._rank} expected tensors", tag)
        fill(tensors, received.tensors, src=src)

    def abort(self, reason: str, *, tag: str | None = None) -> None:
        """Receivers of this rank's next untagged call, or of `tag`, raise `BroadcastAborted` with the reason."""
        self._exchange.fail(reason, self._rank, tag)


class _Exchange:
    """The log with its lock: the only place where the ranks' threads meet. Payloads are copied outside of it."""

    def __init__(self, log: BroadcastLog, timeout_s: float) -> None:
        self.world_size: Final = log.world_size
        self._log = log
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._num_untagged = [0] * log.world_size  # calls that each rank has begun in this session

    def publish(self, payload: object, src: int, name: str | None) -> None:
        with self._change() as now:
            self._log.publish(self._tag(src, src, name), payload, now)

    def fail(self, reason: str, src: int, name: str | None) -> None:
        with self._change() as now:
            self._log.fail(self._tag(src, src, name), reason, now)

    def receive(self, rank: int, src: int, name: str | None) -> object:
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            tag = self._tag(rank, src, name)
            while True:
                now = self._expired_now()
                result = self._log.take(tag, rank, now)
                if isinstance(result, Payload):
                    return result.value
                if isinstance(result, Aborted):
                    self._changed.notify_all()  # an answer that broke the session concerns the others as well
                    raise BroadcastAborted(f"broadcast {_named(tag)} from rank {src}: {result.reason}")
                if now >= deadline:
                    raise self._timed_out(tag, rank)
                self._changed.wait(deadline - now)

    def out_of_step(self, reason: str, name: str | None) -> BroadcastAborted:
        """An untagged call got what another one sent: breaks the session. Returns the error to raise."""
        if name is None:
            with self._change():
                self._log.break_session(self._log.session, reason)
        return BroadcastAborted(reason)

    def session_fault(self) -> str:
        with self._changed:
            return self._log.session_fault

    def new_session(self) -> None:
        with self._change():
            self._log.new_session()
            self._num_untagged = [0] * self.world_size

    def rank_lost(self, rank: int) -> None:
        with self._change() as now:
            self._log.source_lost(rank, now)
            self._log.receiver_lost(rank)

    def rank_back(self, rank: int) -> None:
        with self._change():
            self._log.source_back(rank)
            self._log.receiver_back(rank)

    @contextmanager
    def _change(self) -> Iterator[float]:
        """Holds the lock, gives the time, and wakes every waiter in the end: a refused step may break a session."""
        with self._changed:
            try:
                yield self._expired_now()
            finally:
                self._changed.notify_all()

    def _tag(self, rank: int, src: int, name: str | None) -> Tag:
        if name is not None:
            return NamedTag(_EPOCH, src, name)
        sequence = self._num_untagged[rank]
        self._num_untagged[rank] += 1
        return SessionTag(_EPOCH, src, self._log.session, sequence)

    def _expired_now(self) -> float:
        now = time.monotonic()
        self._log.expire(now)
        return now

    def _timed_out(self, tag: Tag, rank: int) -> DeadlineError:
        message = f"rank {rank} waited {self._timeout_s:g} s for broadcast {_named(tag)} from rank {tag.src}"
        if isinstance(tag, SessionTag):
            self._log.break_session(tag.session, message)
            self._changed.notify_all()
        return DeadlineError(message)


def _named(tag: Tag) -> str:
    return repr(tag.name) if isinstance(tag, NamedTag) else f"number {tag.sequence}"
