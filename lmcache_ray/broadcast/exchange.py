"""The log of broadcasts with its lock: the only place where the ends of a world's broadcasts meet.

Threads of one process share it directly (`inprocess.py`); a cluster's coordinator keeps one for the ranks' processes.

Ranks whose untagged calls are out of step agree again by themselves: a broken session refuses each rank's next call,
and when every living rank has been told in this way, all count from 0 in a new session.

Calls that come as messages may be overtaken, or not come at all, when their rank has given up waiting for the answer.
So such a rank numbers its untagged calls itself: one that was overtaken is refused, and where one is missing the
session is broken, rather than have every later call take another's place.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lmcache_ray.broadcast.log import BroadcastLog
from lmcache_ray.broadcast.tags import Aborted, Call, Epoch, NamedTag, Payload, Pending, SessionTag, Tag, TakeResult
from lmcache_ray.errors import BroadcastAborted, DeadlineError

_KEEP_TIMEOUTS: Final = 4


class Exchange:
    """Thread-safe. A payload that some rank has not taken lies for four times `timeout_s`; then it is given up."""

    def __init__(self, epoch: Epoch, world_size: int, timeout_s: float) -> None:
        self.world_size: Final = world_size
        self.timeout_s: Final = timeout_s
        self._log = BroadcastLog(epoch, world_size, ttl_s=timeout_s * _KEEP_TIMEOUTS)
        self._changed = threading.Condition()
        self._num_untagged = [0] * world_size  # calls that each rank has begun in this session
        self._next_numbers: dict[int, int] = {}  # of the calls of ranks that number them
        self._processes: dict[int, int] = {}  # of these ranks
        self._told: set[int] = set()  # ranks that know the session to be broken
        self._lost: set[int] = set()

    def begin(self, rank: int, src: int, name: str | None, *, call: Call | None = None) -> Tag:
        """What `rank` is about to take from `src`: by name, or as its next untagged call.

        `call` numbers untagged calls where they may overtake each other. Raises `BroadcastAborted` for one that was
        overtaken, or is of a process that does not serve the rank any more; so do the next two.
        """
        with self._change():
            return self._tag(rank, src, name, call)

    def publish(self, payload: object, src: int, name: str | None, *, call: Call | None = None) -> None:
        """The source's payload. Raises `BroadcastAborted` when receivers were told that it will not come."""
        with self._change() as now:
            tag = self._tag(src, src, name, call)
            try:
                self._log.publish(tag, payload, now)
            finally:
                self._note_told(tag, src)

    def fail(self, reason: str, src: int, name: str | None, *, call: Call | None = None) -> None:
        """The source's failure in place of a payload."""
        with self._change() as now:
            tag = self._tag(src, src, name, call)
            self._log.fail(tag, reason, now)
            self._note_told(tag, src)

    def poll(self, tag: Tag, rank: int, wait_s: float) -> TakeResult:
        """What `rank` gets for `tag`, waiting at most `wait_s` seconds for it; `Pending` if it is still to come."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                now = self._expired_now()
                result = self._log.take(tag, rank, now)
                if isinstance(result, Aborted):
                    self._note_told(tag, rank)
                    self._changed.notify_all()  # an answer that broke the session concerns the others as well
                if not isinstance(result, Pending) or now >= deadline:
                    return result
                self._changed.wait(deadline - now)

    def receive(self, rank: int, src: int, name: str | None) -> object:
        """The payload of `src`. Raises `BroadcastAborted`, or `DeadlineError` after `timeout_s`."""
        tag = self.begin(rank, src, name)
        result = self.poll(tag, rank, self.timeout_s)
        if isinstance(result, Payload):
            return result.value
        if isinstance(result, Aborted):
            raise BroadcastAborted(f"broadcast {described(tag)} from rank {src}: {result.reason}")
        raise self.give_up(tag, rank)

    def give_up(self, tag: Tag, rank: int) -> DeadlineError:
        """`rank` waits for `tag` no longer: an untagged call breaks the session. Returns the error to raise."""
        message = f"rank {rank} waited {self.timeout_s:g} s for broadcast {described(tag)} from rank {tag.src}"
        if isinstance(tag, SessionTag):
            with self._change():
                self._log.break_session(tag.session, message)
                self._note_told(tag, rank)
        return DeadlineError(message)

    def break_session(self, reason: str) -> None:
        """A rank got what another call sent: untagged calls are refused until all ranks agree again."""
        with self._change():
            self._log.break_session(self._log.session, reason)

    def expire(self) -> None:
        """Give up what nobody took in time; every other call does this too."""
        with self._change():
            pass

    @property
    def session_fault(self) -> str:
        """Why untagged calls are refused; empty while they work."""
        with self._changed:
            return self._log.session_fault

    def rank_lost(self, rank: int) -> None:
        """A rank has ended: what it has not published is aborted, nothing is kept for it."""
        with self._change() as now:
            self._lost.add(rank)
            self._log.source_lost(rank, now)
            self._log.receiver_lost(rank)
            self._renew_if_all_told()

    def rank_back(self, rank: int, *, process: int | None = None) -> None:
        """A new process (of this number) or thread serves `rank`. Breaks a session that has begun."""
        with self._change():
            self._next_numbers.pop(rank, None)
            if process is not None:
                self._processes[rank] = process
            self._lost.discard(rank)
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

    def _tag(self, rank: int, src: int, name: str | None, call: Call | None) -> Tag:
        if name is not None:
            return NamedTag(self._log.epoch, src, name)
        if call is not None:
            self._check_order(rank, call)
        sequence = self._num_untagged[rank]
        self._num_untagged[rank] += 1
        return SessionTag(self._log.epoch, src, self._log.session, sequence)

    def _check_order(self, rank: int, call: Call) -> None:
        process, number = call
        if self._processes.get(rank, process) != process:
            raise BroadcastAborted(f"untagged call {number} of rank {rank} is of an earlier process")
        due = self._next_numbers.get(rank, 0)
        if number < due:
            raise BroadcastAborted(f"untagged call {number} of rank {rank} came after its call {due - 1}")
        self._next_numbers[rank] = number + 1
        if number > due:
            reason = f"untagged calls {due} to {number - 1} of rank {rank} have not come"
            self._log.break_session(self._log.session, reason)

    def _expired_now(self) -> float:
        now = time.monotonic()
        self._log.expire(now)
        return now

    def _note_told(self, tag: Tag, rank: int) -> None:
        """The call of `rank` has ended: if that was because the session is broken, the rank knows now."""
        if isinstance(tag, SessionTag) and tag.session == self._log.session and self._log.session_fault:
            self._told.add(rank)
            self._renew_if_all_told()

    def _renew_if_all_told(self) -> None:
        if self._log.session_fault and self._told | self._lost >= set(range(self.world_size)):
            self._renew()

    def _renew(self) -> None:
        self._log.new_session()
        self._num_untagged = [0] * self.world_size
        self._told.clear()


def described(tag: Tag) -> str:
    """The tag as messages name it."""
    return repr(tag.name) if isinstance(tag, NamedTag) else f"number {tag.sequence}"
