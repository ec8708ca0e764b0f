"""The state machine behind every broadcast: who published what, who has taken it, and when it is over. Pure.

Apart from the broadcasters because it serves a Condition among threads and a coordinator among processes alike.
One broadcast goes through::

           publish              the last receiver took it
    OPEN ───────────► PUBLISHED ────────────────────────► TAKEN
      │ fail, source lost,  │ expiry
      ▼ expiry              ▼
    ABORTED ◄───────────────┘          TAKEN and ABORTED are forgotten at their next expiry

The source never waits: any number of payloads may lie unread, each at most `ttl_s` seconds; what bounds the log is
time, not a count, so that a slow receiver never blocks or breaks a fast source before that.

A broadcast is named by a tag that all ranks know (`NamedTag`), or by its place in a session (`SessionTag`): the k-th
untagged call of every rank is the same broadcast. A failure of the source takes its place in that order like a payload.
But when the ranks may no longer agree on the count (a skipped step, a receiver that gave up, a restarted rank, a
payload that expired unread), the session is broken for all until they agree on a new one.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from lmcache_ray.broadcast.tags import Aborted, Epoch, NamedTag, Payload, Pending, SessionTag, Tag, TakeResult
from lmcache_ray.errors import BroadcastAborted, IntegrityError, ProtocolError


class _State(Enum):
    OPEN = "open"
    PUBLISHED = "published"
    TAKEN = "taken"
    ABORTED = "aborted"


@dataclass(slots=True)
class _Broadcast:
    key: str | int
    src: int
    expires_at: float
    outstanding: set[int] = field(default_factory=set)  # receivers that have not taken it
    state: _State = _State.OPEN
    payload: object = None
    reason: str = ""


class BroadcastLog:
    """All broadcasts of one world in one life (`epoch`) of whoever keeps the log. Not safe for threads by itself.

    `now` is seconds on any clock that never goes back. `ttl_s` is how long a payload may lie unread, and how long the
    end of a broadcast is remembered: no shorter than receivers wait.
    """

    def __init__(self, epoch: Epoch, world_size: int, *, ttl_s: float) -> None:
        self.epoch: Final = epoch
        self.world_size: Final = world_size
        self.ttl_s: Final = ttl_s
        self._broadcasts: OrderedDict[str | int, _Broadcast] = OrderedDict()  # in order of expiry
        self._lost_sources: set[int] = set()
        self._lost_receivers: set[int] = set()
        self._session = 0
        self._session_fault = ""
        self._next_steps = [0] * world_size  # of each rank, in this session

    @property
    def session(self) -> int:
        """Number of the current session."""
        return self._session

    @property
    def session_fault(self) -> str:
        """Why the current session is broken; empty while it is not."""
        return self._session_fault

    def publish(self, tag: Tag, payload: object, now: float) -> None:
        """The source's payload, for every receiver that is not lost.

        Raises `BroadcastAborted` when receivers were already told that it will not come, and `ProtocolError` when it
        was published before.
        """
        refusal = self._refusal(tag, tag.src, now)
        if refusal:
            raise BroadcastAborted(refusal)
        broadcast = self._opened(tag, now)
        self._complete(tag, tag.src)
        if broadcast.state is _State.ABORTED:
            raise BroadcastAborted(broadcast.reason)
        if broadcast.state is not _State.OPEN:
            raise ProtocolError(f"{tag} was published twice")
        broadcast.state, broadcast.payload = _State.PUBLISHED, payload
        self._rearm(broadcast, now)
        self._drop_receiver(broadcast, tag.src)  # every receiver may be lost

    def fail(self, tag: Tag, reason: str, now: float) -> None:
        """The source's failure in place of a payload. A payload that was published before stands."""
        if self._refusal(tag, tag.src, now):
            return  # receivers are told of that, which is no better news
        broadcast = self._opened(tag, now)
        self._complete(tag, tag.src)
        if broadcast.state is _State.OPEN:
            self._abort(broadcast, f"rank {tag.src} failed: {reason}", now)

    def take(self, tag: Tag, rank: int, now: float) -> TakeResult:
        """What receiver `rank` gets. Asking again is harmless: a payload can be had until the last receiver took it."""
        if rank == tag.src:
            raise ProtocolError(f"rank {rank} is the source of {tag}, it cannot take")
        refusal = self._refusal(tag, rank, now)
        if refusal:
            return Aborted(refusal)
        broadcast = self._opened(tag, now)
        if broadcast.state is _State.OPEN:
            return Pending()
        self._complete(tag, rank)
        if broadcast.state is _State.ABORTED:
            return Aborted(broadcast.reason)
        if broadcast.state is _State.TAKEN:
            return Aborted("every receiver has taken it already")
        payload = Payload(broadcast.payload)
        self._drop_receiver(broadcast, rank)
        return payload

    def source_lost(self, rank: int, now: float) -> None:
        """`rank` died: what it has not published is aborted, now and until `source_back`."""
        self._check_rank(rank)
        self._lost_sources.add(rank)
        for broadcast in list(self._broadcasts.values()):
            if broadcast.src == rank and broadcast.state is _State.OPEN:
                self._abort(broadcast, f"rank {rank}, its source, is lost", now)

    def source_back(self, rank: int) -> None:
        """`rank` may publish again. It has lost count, so a session that has begun is broken."""
        self._back(rank, self._lost_sources)

    def receiver_lost(self, rank: int) -> None:
        """`rank` died: nothing is kept for it any more, until `receiver_back`."""
        self._check_rank(rank)
        self._lost_receivers.add(rank)
        for broadcast in self._broadcasts.values():
            self._drop_receiver(broadcast, rank)

    def receiver_back(self, rank: int) -> None:
        """Later broadcasts wait for `rank` again. It has lost count, so a session that has begun is broken."""
        self._back(rank, self._lost_receivers)

    def break_session(self, session: int, reason: str) -> None:
        """Ranks no longer agree on the count in `session` (a receiver gave up, say): all its steps are aborted."""
        if session == self._session and not self._session_fault:
            self._session_fault = reason
            self._forget_steps()

    def new_session(self) -> int:
        """Every rank begins to count at 0 again, under the number returned. Called when no rank is in a broadcast."""
        self._session += 1
        self._session_fault = ""
        self._next_steps = [0] * self.world_size
        self._forget_steps()
        return self._session

    def expire(self, now: float) -> None:
        """Give up what is older than `ttl_s`, and forget what ended so long ago."""
        while self._broadcasts:
            broadcast = next(iter(self._broadcasts.values()))
            if broadcast.expires_at > now:
                return
            if broadcast.state in (_State.TAKEN, _State.ABORTED):
                del self._broadcasts[broadcast.key]
                continue
            missing = "published" if broadcast.state is _State.OPEN else f"taken by ranks {broadcast.outstanding}"
            reason = f"not {missing} within {self.ttl_s:g} s"
            if isinstance(broadcast.key, int):
                self.break_session(self._session, f"step {broadcast.key} was {reason}")
            else:
                self._abort(broadcast, reason, now)

    def check_integrity(self) -> None:
        """Raises `IntegrityError` that lists every contradiction in the log."""
        faults = []
        for key, broadcast in self._broadcasts.items():
            if broadcast.state is not _State.PUBLISHED and broadcast.payload is not None:
                faults.append(f"{key!r} is {broadcast.state.value} but holds a payload")
            if broadcast.state is _State.PUBLISHED and not broadcast.outstanding:
                faults.append(f"{key!r} is held for nobody")
            if broadcast.outstanding & (self._lost_receivers | {broadcast.src}):
                faults.append(f"{key!r} waits for its source or for a lost rank: {broadcast.outstanding}")
            if isinstance(key, int) and (self._session_fault or key > max(self._next_steps)):
                faults.append(f"step {key} lies outside of session {self._session}")
        expiries = [broadcast.expires_at for broadcast in self._broadcasts.values()]
        if expiries != sorted(expiries):
            faults.append("broadcasts are not in order of expiry")
        if faults:
            raise IntegrityError("; ".join(faults))

    def _refusal(self, tag: Tag, rank: int, now: float) -> str:
        """Why `rank` cannot take part in `tag`; empty when it can."""
        self._check_rank(rank)
        self._check_rank(tag.src)
        if tag.epoch != self.epoch:
            return f"epoch {tag.epoch} is not the current one, {self.epoch}"
        if isinstance(tag, SessionTag):
            return self._step_refusal(tag, rank)
        known = self._broadcasts.get(tag.name)
        if known and known.src != tag.src:
            reason = f"ranks disagree whether {known.src} or {tag.src} sends {tag.name!r}"
            self._abort(known, reason, now)
            return reason
        return ""

    def _step_refusal(self, tag: SessionTag, rank: int) -> str:
        if tag.session != self._session:
            return f"session {tag.session} is over; the current one is {self._session}"
        due = self._next_steps[rank]
        known = self._broadcasts.get(tag.sequence)
        if tag.sequence not in (due, due - 1):  # the last step may be asked for again: an answer can get lost
            self.break_session(tag.session, f"rank {rank} is at step {tag.sequence} where step {due} was due")
        elif known and known.src != tag.src:
            self.break_session(
                tag.session, f"ranks disagree whether {known.src} or {tag.src} sends step {tag.sequence}"
            )
        elif not known and tag.sequence < due and not self._session_fault:
            return f"step {tag.sequence} ended more than {self.ttl_s:g} s ago"
        return f"session {tag.session} is broken: {self._session_fault}" if self._session_fault else ""

    def _opened(self, tag: Tag, now: float) -> _Broadcast:
        key = tag.name if isinstance(tag, NamedTag) else tag.sequence
        broadcast = self._broadcasts.get(key)
        if broadcast is None:
            receivers = set(range(self.world_size)) - self._lost_receivers - {tag.src}
            broadcast = self._broadcasts[key] = _Broadcast(key, tag.src, now + self.ttl_s, receivers)
        if broadcast.state is _State.OPEN and tag.src in self._lost_sources:
            self._abort(broadcast, f"rank {tag.src}, its source, is lost", now)
        return broadcast

    def _complete(self, tag: Tag, rank: int) -> None:
        if isinstance(tag, SessionTag):
            self._next_steps[rank] = tag.sequence + 1

    def _abort(self, broadcast: _Broadcast, reason: str, now: float) -> None:
        broadcast.state, broadcast.payload, broadcast.reason = _State.ABORTED, None, reason
        self._rearm(broadcast, now)

    def _rearm(self, broadcast: _Broadcast, now: float) -> None:
        broadcast.expires_at = now + self.ttl_s
        self._broadcasts.move_to_end(broadcast.key)

    def _drop_receiver(self, broadcast: _Broadcast, rank: int) -> None:
        broadcast.outstanding.discard(rank)
        if broadcast.state is _State.PUBLISHED and not broadcast.outstanding:
            broadcast.state, broadcast.payload = _State.TAKEN, None

    def _back(self, rank: int, lost: set[int]) -> None:
        if rank in lost and any(self._next_steps):
            self.break_session(self._session, f"rank {rank} restarted")
        lost.discard(rank)

    def _forget_steps(self) -> None:
        for key in [key for key in self._broadcasts if isinstance(key, int)]:
            del self._broadcasts[key]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ProtocolError(f"rank {rank} is not in a world of {self.world_size} ranks")
