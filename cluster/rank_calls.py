"""The few calls that the coordinator makes to ranks: freeing and settling slots, and watching for their end.

Everything else goes from callers to ranks directly. Each call has a deadline, and a rank that cannot be reached is an
answer, not an exception: whether it is dead is for the watch to say.
"""

from collections.abc import Sequence

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from lmcache_ray.index.plans import ChunkRef

from .messages import PackedRefs
from .ray_calls import Actor, Ref


class RankCalls:
    """Calls to the adopted ranks, numbered by rank."""

    def __init__(self, *, call_timeout_s: float) -> None:
        self._call_timeout_s = call_timeout_s
        self._workers: list[Actor] = []
        self._watches: dict[Ref, int] = {}

    @property
    def workers(self) -> list[Actor]:
        """The adopted ranks' handles, in rank order."""
        return self._workers

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

    def free_slots(self, rank: int, refs: Sequence[ChunkRef]) -> bool:
        """Free these slots on the rank; False if it did not answer in time."""
        return self._ask(rank, "free_slots", PackedRefs.pack(refs)) is not None

    def settle(self, rank: int, refs: Sequence[ChunkRef]) -> bool:
        """Have the rank end its writes of `refs`; True is its proof that none of them is or will be written."""
        return self._ask(rank, "settle", PackedRefs.pack(refs)) is True

    def is_client_dead(self, rank: int, liveness_path: str) -> bool:
        """Whether the rank, on the client's node, finds that client's process ended."""
        return self._ask(rank, "is_client_dead", liveness_path) is True

    def _ask(self, rank: int, method: str, *arguments: object) -> object:
        if not self._workers:
            return None
        try:
            return ray.get(getattr(self._workers[rank], method).remote(*arguments), timeout=self._call_timeout_s)
        except (GetTimeoutError, RayError):
            return None


def _reason_of(watch: Ref) -> str:
    try:
        ray.get(watch, timeout=0)
        return "it was stopped"
    except (RayActorError, GetTimeoutError) as error:
        return str(error).splitlines()[0]
    except RayError as error:
        return f"{type(error).__name__}"
