"""Waiting for actor calls: always with a deadline, and Ray's errors become this project's."""

from typing import TypeAlias

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayTaskError

from lmcache_ray.errors import ClusterError, DeadlineError, RankDiedError, RankUnavailableError

Actor: TypeAlias = ActorHandle[object]
"""One of our actors. Ray's type for handles knows no methods; every answer is checked where it arrives."""
Ref: TypeAlias = ray.ObjectRef[object]
"""What an actor call will answer, or an object in Ray's store."""


def wait_for(reference: Ref, *, timeout_s: float, what: str) -> object:
    """The result of an actor call.

    Ray's errors become ours: `DeadlineError`, `ClusterError`, or what the call itself raised.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as error:
        raise DeadlineError(f"{what} did not answer within {timeout_s:g} s") from error
    except RayActorError as error:
        raise ClusterError(f"{what} is not running any more: {str(error).splitlines()[0]}") from error
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None


def wait_for_rank(reference: Ref, *, timeout_s: float, rank: int) -> object:
    """As `wait_for`. A rank that is silent is a `RankUnavailableError`, one that is proven dead a `RankDiedError`."""
    try:
        return wait_for(reference, timeout_s=timeout_s, what=f"rank {rank}")
    except (DeadlineError, ClusterError) as error:
        kind = RankDiedError if isinstance(error.__cause__, ActorDiedError) else RankUnavailableError
        raise kind(str(error)) from error
