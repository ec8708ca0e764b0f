"""The few calls that the coordinator makes to ranks: enlisting, freeing and settling slots, watching for their end.

Everything else goes from callers to ranks directly. It is a `RankPort` over actors. Calls to several ranks go out
together under one deadline, and a rank that cannot be reached is an answer, not an exception: whether it is dead is for
the watch to say.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Final

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError

from lmcache_ray.errors import LMCacheRayError
from lmcache_ray.index.arena_report import ViewedSlots
from lmcache_ray.index.plans import ChunkRef

from .deadline import Deadline
from .messages import PackedRefs, RankHello, unpack_flags
from .packed_calls import pack, unpack
from .rank_port import Enlisted, Enlistment
from .ray_calls import Actor, Ref, calling, wait_for_rank
from .record import MissedClear

_HOUSEKEEPING_S: Final = 2.0


class RankCalls:
    """Calls of a coordinator of this `epoch` to its ranks, which are numbered and known once they are `given`.

    `clear_timeout_s` is for freeing slots on all of them. Thread-safe.
    """

    def __init__(self, *, epoch: int, myself: Actor, clear_timeout_s: float) -> None:
        self._epoch = epoch
        self._myself = myself
        self._clear_timeout_s = clear_timeout_s
        self._workers: list[Actor] = []
        self._lock = threading.Lock()  # guards what follows
        self._watches: dict[Ref, int] = {}
        self._gone_for_good: set[int] = set()

    @property
    def workers(self) -> tuple[Actor, ...]:
        """All ranks."""
        return tuple(self._workers)

    @property
    def is_watching(self) -> bool:
        """True while some rank is watched."""
        return bool(self._watches)

    def give(self, workers: Sequence[Actor]) -> None:
        """The actors of the ranks. They stay the same when their processes change."""
        self._workers = list(workers)

    def can_return(self, rank: int) -> bool:
        """Whether Ray, as far as it has said, will start the rank's process again."""
        with self._lock:
            return bool(self._workers) and rank not in self._gone_for_good

    def watch(self, hello: RankHello) -> None:
        """Learn of this process's end: it answers `until_stopped` only by ending."""
        with calling(f"rank {hello.worker_id}"):
            reference = self._workers[hello.worker_id].until_stopped.remote(hello.pid)
        with self._lock:
            self._watches[reference] = hello.worker_id

    def ended_ranks(self, *, timeout_s: float) -> list[tuple[int, str]]:
        """Ranks whose process has ended since the last call, with the reason; waits at most `timeout_s` for one."""
        with self._lock:
            watches = list(self._watches)
        if not watches:
            return []
        done, _ = ray.wait(watches, num_returns=1, timeout=timeout_s)
        return [self._ended(watch) for watch in done]

    def _ended(self, watch: Ref) -> tuple[int, str]:
        reason, is_for_good = _end_of(watch)
        with self._lock:
            rank = self._watches.pop(watch)
            if is_for_good:
                self._gone_for_good.add(rank)
        return rank, reason

    def node_of(self, rank: int, *, timeout_s: float) -> str:
        """See `RankPort`."""
        with calling(f"rank {rank}"):
            reference = self._workers[rank].node_id.remote()
        return str(wait_for_rank(reference, timeout_s=timeout_s, rank=rank))

    def enlist(self, rank: int, enlistment: Enlistment, *, timeout_s: float) -> Enlisted:
        """See `RankPort`. Its process is watched from then on."""
        with calling(f"rank {rank}"):
            reference = self._workers[rank].enlist.remote(enlistment, self._myself)
        enlisted: Enlisted = unpack(wait_for_rank(reference, timeout_s=timeout_s, rank=rank))
        self.watch(enlisted.hello)
        return enlisted

    def free_slots(self, ranks: Sequence[int], refs: Sequence[ChunkRef]) -> list[int]:
        """See `RankPort`."""
        packed = PackedRefs.pack(refs)
        answers = self._ask(dict.fromkeys(ranks, ("free_slots", packed, self._epoch)), self._clear_timeout_s)
        return list(answers)

    def forget(self, ranks: Sequence[int], clear: MissedClear) -> list[int]:
        """See `RankPort`."""
        answers = self._ask(dict.fromkeys(ranks, ("forget", pack(clear), self._epoch)), self._clear_timeout_s)
        return list(answers)

    def settle(self, refs: Mapping[int, Sequence[ChunkRef]]) -> dict[int, list[ChunkRef]]:
        """See `RankPort`."""
        calls = {rank: ("settle", PackedRefs.pack(its_refs), self._epoch) for rank, its_refs in refs.items()}
        settled = {}
        for rank, flags in self._ask(calls, _HOUSEKEEPING_S).items():
            if isinstance(flags, bytes):
                settled[rank] = [ref for ref, flag in zip(refs[rank], unpack_flags(flags), strict=True) if flag]
        return settled

    def move_chunks(self, calls: Mapping[int, bytes], *, timeout_s: float) -> dict[int, bytes]:
        """One packed `TierCall` a rank; the packed answers of those that gave one in time."""
        answers = self._ask({rank: ("tier_call", packed, self._epoch) for rank, packed in calls.items()}, timeout_s)
        return {rank: answer for rank, answer in answers.items() if isinstance(answer, bytes)}

    def viewed(self, ranks: Sequence[int]) -> dict[int, tuple[ViewedSlots, ...]]:
        """See `RankPort`."""
        answers = self._ask(dict.fromkeys(ranks, ("viewed",)), _HOUSEKEEPING_S)
        return {rank: unpack(answer) for rank, answer in answers.items() if isinstance(answer, bytes)}

    def ping(self, ranks: Sequence[int]) -> dict[int, int]:
        """See `RankPort`."""
        answers = self._ask(dict.fromkeys(ranks, ("ping",)), _HOUSEKEEPING_S)
        return {rank: pid for rank, pid in answers.items() if isinstance(pid, int)}

    def is_client_dead(self, rank: int, liveness_path: str) -> bool:
        """See `RankPort`."""
        return self._ask({rank: ("is_client_dead", liveness_path)}, _HOUSEKEEPING_S).get(rank) is True

    def _ask(self, calls: Mapping[int, tuple[object, ...]], timeout_s: float) -> dict[int, object]:
        """One call a rank, method and arguments; the answers of those that gave one in time."""
        deadline = Deadline(timeout_s)
        references: dict[int, Ref] = {}
        answers: dict[int, object] = {}
        for rank, (method, *arguments) in calls.items():
            try:
                with calling(f"rank {rank}"):
                    references[rank] = getattr(self._workers[rank], str(method)).remote(*arguments)
            except LMCacheRayError:
                continue
        for rank, reference in references.items():
            try:
                answers[rank] = wait_for_rank(reference, timeout_s=deadline.remaining_s(), rank=rank)
            except LMCacheRayError:
                continue
        return answers


def _end_of(watch: Ref) -> tuple[str, bool]:
    """Why a watched process has ended, and whether Ray starts no other in its place."""
    try:
        ray.get(watch, timeout=0)
        return "it was stopped", True
    except (RayActorError, GetTimeoutError) as error:
        return str(error).splitlines()[0], isinstance(error, ActorDiedError)
    except RayTaskError as error:  # another process answers in its place
        return str(error.cause), False
    except RayError as error:
        return type(error).__name__, False
