"""Making actor calls and waiting for them: always with a deadline, and Ray's errors become this project's.

What a call itself raised is raised again as it is; only what went wrong on the way is translated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias

import ray
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from lmcache_ray.errors import (
    ClusterError,
    CoordinatorUnavailableError,
    DeadlineError,
    RankDiedError,
    RankUnavailableError,
)

Actor: TypeAlias = ActorHandle[object]
"""One of our actors. Ray's type for handles knows no methods, so answers are given their types where they arrive."""
Ref: TypeAlias = ray.ObjectRef[object]
"""What an actor call will answer, or an object in Ray's store."""


def wait_for(reference: Ref, *, timeout_s: float, what: str) -> Any:
    """The answer of `what` to an actor call, of the type that its method says.

    Raises `DeadlineError` if it is silent, `ClusterError` if it cannot be reached (`CoordinatorUnavailableError` if its
    process has ended and Ray starts another), or what the call itself raised.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError as error:
        raise DeadlineError(f"{what} did not answer within {timeout_s:.3g} s") from error
    except RayTaskError as error:
        _raise_cause(error)
    except ActorUnavailableError as error:
        raise CoordinatorUnavailableError(f"{what} is being restarted: {_first_line(error)}") from error
    except RayActorError as error:
        raise ClusterError(f"{what} is not running any more: {_first_line(error)}") from error
    except RayError as error:
        raise ClusterError(f"{what} cannot be reached: {type(error).__name__}: {_first_line(error)}") from error


def wait_for_rank(reference: Ref, *, timeout_s: float, rank: int) -> Any:
    """As `wait_for`, with other errors: `RankDiedError` if the rank is proven dead, else `RankUnavailableError`."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        _raise_cause(error)
    except ActorDiedError as error:
        raise RankDiedError(f"rank {rank} is dead: {_first_line(error)}") from error
    except GetTimeoutError as error:
        raise RankUnavailableError(f"rank {rank} did not answer within {timeout_s:.3g} s") from error
    except RayError as error:
        raise RankUnavailableError(
            f"rank {rank} cannot be reached: {type(error).__name__}: {_first_line(error)}"
        ) from error


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Around `.remote(...)` and `ray.put`: `ClusterError` if Ray takes nothing more (a full queue, a full store)."""
    try:
        yield
    except RayTaskError:
        raise
    except RayError as error:
        raise ClusterError(f"{what} takes no call now: {type(error).__name__}: {_first_line(error)}") from error


def _raise_cause(error: RayTaskError) -> NoReturn:
    raise error.cause if isinstance(error.cause, Exception) else error from None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
