"""Looking after a running cluster: restarting its ranks one by one, and draining it before it ends."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import ray

from lmcache_ray.errors import ConfigError, DeadlineError, LMCacheRayError

from .deadline import Deadline
from .launch import end_remains
from .link import ClusterLink
from .ray_calls import calling

_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Drained:
    """How a drained cluster ended.

    `open_stores` had not been reported when the time for it was over, and `unflushed` chunks were in memory alone, not
    on the disk that there is, when the cluster was told to end. Both are 0 if all went well.
    """

    open_stores: int
    unflushed: int


def restart_ranks(link: ClusterLink, ranks: Sequence[int] | None = None, *, timeout_s: float) -> dict[int, float]:
    """Start the process of each of these ranks (None: all) anew, one after the other; the seconds that each was away.

    The next one is not touched before the world is whole again, so what is committed stays cached: a rank takes its
    arena over from its predecessor. Meanwhile calls end as misses or named errors.

    Raises `ConfigError` for a rank that the world has not, and `DeadlineError`, with the reason, if one has not come
    back within `timeout_s`; those after it go on untouched.
    """
    world_size = link.world.layout.world_size
    chosen = range(world_size) if ranks is None else ranks
    for rank in chosen:
        if not 0 <= rank < world_size:
            raise ConfigError(f"there is no rank {rank} in a world of {world_size}")
    away: dict[int, float] = {}
    for rank in chosen:
        deadline, begun = Deadline(timeout_s), time.monotonic()
        before = _await_whole(link, rank, 0, deadline)
        with calling(f"rank {rank}"):
            ray.kill(link.workers[rank], no_restart=False)
        _await_whole(link, rank, before + 1, deadline)
        away[rank] = time.monotonic() - begun
    return away


def drain(link: ClusterLink, *, timeout_s: float) -> Drained:
    """End a cluster without losing anything: finish what is being stored, copy down what waits, stop every process.

    No store is planned from now on; lookups and retrieves go on until the end. The remote store gets what it gets in
    the time that is left. `timeout_s` is for the waiting; ending takes some seconds more.
    """
    open_stores, unflushed = link.coordinator.drain(timeout_s=timeout_s)
    end_remains(link.world.name, link.world.namespace)
    return Drained(open_stores, unflushed)


def _await_whole(link: ClusterLink, rank: int, least_epoch: int, deadline: Deadline) -> int:
    """Wait until the world is whole and this rank's process is of `least_epoch`; its epoch."""
    problems: Sequence[str] = ()
    while True:
        try:
            status = link.coordinator.status()
        except LMCacheRayError as error:
            problems = (str(error),)
        else:
            problems = status.problems
            if status.can_serve and status.ranks[rank].alive and status.ranks[rank].epoch >= least_epoch:
                return status.ranks[rank].epoch
        if deadline.remaining_s() == 0:
            why = "; ".join(problems) or "no reason is known"
            raise DeadlineError(f"rank {rank} was not back within {deadline.timeout_s:g} s: {why}")
        time.sleep(_POLL_S)
