"""The few calls that the coordinator makes to ranks: freeing and settling slots, and watching for their end.

Everything else goes from callers to ranks directly. Calls to several ranks go out together under one deadline, and a
rank that cannot be reached is an answer, not an exception: whether it is dead is for the watch to say.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from lmcache_ray.errors import LMCacheRayError
from lmcache_ray.index.plans import ChunkRef

from .deadline import Deadline
from .messages import PackedRefs, unpack_flags
from .ray_calls import Actor, Ref, calling, wait_for_rank

_HOUSEKEEPING_S: Final = 2.0


class RankCalls:
    """Calls to the adopted ranks, numbered by rank. `clear_timeout_s` is for freeing slots on all of them."""

    def __init__(self, *, clear_timeout_s: float) -> None:
        self._clear_timeout_s = clear_timeout_s
        self._workers: list[Actor] = []
        self._watches: dict[Ref, int] = {}

    @property
    def is_watching(self) -> bool:
        """True while some rank is watched."""
        return bool(self._watches)

    def adopt(self, workers: Sequence[Actor]) -> None:
        """Begin to watch: each rank answers `until_stopped` only by ending."""
        self._workers = list(workers)
        self._watches = {worker.until_stopped.remote(): rank for rank, worker in enumerate(workers)}

    def ended_ranks(self, *, timeout_s: float) -> list[tuple[int, str]]:
        """Ranks whose process has ended since the last call, with the reason; waits at most `timeout_s` for one."""
        if not self._watches:
            return []
        done, _ = ray.wait(list(self._watches), num_returns=1, timeout=timeout_s)
        return [(self._watches.pop(watch), _reason_of(watch)) for watch in done]

    def free_slots(self, ranks: Sequence[int], refs: Sequence[ChunkRef]) -> list[int]:
        """Free these slots on these ranks; the ranks that have done it in time."""
        packed = PackedRefs.pack(refs)
        answers = self._ask(dict.fromkeys(ranks, ("free_slots", packed)), self._clear_timeout_s)
        return list(answers)

    def settle(self, refs: Mapping[int, Sequence[ChunkRef]]) -> dict[int, list[ChunkRef]]:
        """Have each rank end its writes; per rank the refs that it proves it does not and will not write."""
        calls = {rank: ("settle", PackedRefs.pack(its_refs)) for rank, its_refs in refs.items()}
        settled = {}
        for rank, flags in self._ask(calls, _HOUSEKEEPING_S).items():
            if isinstance(flags, bytes):
                settled[rank] = [ref for ref, flag in zip(refs[rank], unpack_flags(flags), strict=True) if flag]
        return settled

    def move_chunks(self, calls: Mapping[int, bytes], *, timeout_s: float) -> dict[int, bytes]:
        """One packed `TierCall` a rank; the packed answers of those that gave one in time."""
        answers = self._ask({rank: ("tier_call", packed) for rank, packed in calls.items()}, timeout_s)
        return {rank: answer for rank, answer in answers.items() if isinstance(answer, bytes)}

    def ping(self, ranks: Sequence[int]) -> list[int]:
        """The ranks among these that answer."""
        return list(self._ask(dict.fromkeys(ranks, ("ping", None)), _HOUSEKEEPING_S))

    def is_client_dead(self, rank: int, liveness_path: str) -> bool:
        """Whether the rank, on the client's node, finds that client's process ended."""
        return self._ask({rank: ("is_client_dead", liveness_path)}, _HOUSEKEEPING_S).get(rank) is True

    def _ask(self, calls: Mapping[int, tuple[str, object]], timeout_s: float) -> dict[int, object]:
        """One call a rank, (method, argument or None); the answers of those that gave one in time."""
        deadline = Deadline(timeout_s)
        references: dict[int, Ref] = {}
        answers: dict[int, object] = {}
        for rank, (method, argument) in calls.items():
            try:
                with calling(f"rank {rank}"):
                    arguments = () if argument is None else (argument,)
                    references[rank] = getattr(self._workers[rank], method).remote(*arguments)
            except LMCacheRayError:
                continue
        for rank, reference in references.items():
            try:
                answers[rank] = wait_for_rank(reference, timeout_s=deadline.remaining_s(), rank=rank)
            except LMCacheRayError:
                continue
        return answers


def _reason_of(watch: Ref) -> str:
    try:
        ray.get(watch, timeout=0)
        return "it was stopped"
    except (RayActorError, GetTimeoutError) as error:
        return str(error).splitlines()[0]
    except RayError as error:
        return type(error).__name__
