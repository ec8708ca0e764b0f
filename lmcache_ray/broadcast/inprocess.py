"""Broadcast among ranks that are threads of one process.

::

    group = InProcessGroup(world_size=4, timeout_s=30.0)
    group.broadcaster(rank).broadcast_object(plan if rank == 0 else None, src=0)   # in rank's thread
"""

from typing import Final

from lmcache_ray.broadcast.base import check_rank
from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.broadcast.send_receive import SendReceiveBroadcaster
from lmcache_ray.errors import ConfigError

_EPOCH: Final = "in-process"  # a group and its log live and die together


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

    def rank_lost(self, rank: int) -> None:
        """Rank's thread has ended: what it has not published is aborted, nothing is kept for it."""
        check_rank("rank", rank, len(self._broadcasters))
        self._exchange.rank_lost(rank)

    def rank_back(self, rank: int) -> None:
        """A new thread serves `rank`. Breaks a session that has begun."""
        check_rank("rank", rank, len(self._broadcasters))
        self._exchange.rank_back(rank)


class InProcessBroadcaster(SendReceiveBroadcaster):
    """One rank's end of an `InProcessGroup`: an object broadcast is the very same object on every rank."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(rank, exchange.world_size)
        self._exchange = exchange

    def send_message(self, message: object, *, tag: str | None) -> None:
        """See `SendReceiveBroadcaster`."""
        self._exchange.publish(message, self.rank, tag)

    def receive_message(self, src: int, *, tag: str | None) -> object:
        """See `SendReceiveBroadcaster`."""
        return self._exchange.receive(self.rank, src, tag)

    def abort(self, reason: str, *, tag: str | None = None) -> None:
        """See `SendReceiveBroadcaster`."""
        self._exchange.fail(reason, self.rank, tag)

    def break_session(self, reason: str) -> None:
        """See `SendReceiveBroadcaster`."""
        self._exchange.break_session(reason)
