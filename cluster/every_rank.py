"""Asking every rank at once, under one deadline."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from lmcache_ray.errors import ConfigError

from .deadline import Deadline
from .link import ClusterLink
from .ray_calls import Ref, calling, wait_for_rank

Result = TypeVar("Result")


def run_on_every_rank(
    link: ClusterLink,
    function: str | Callable[..., Result],
    arguments: Sequence[object],
    timeout_s: float | None,
) -> list[Result]:
    """What the function returned on each rank; the first failure by rank is raised after all have ended."""
    if not isinstance(function, str) and not callable(function):
        raise ConfigError(f'a function, or its name as "module:function", is needed; got {function!r}')
    deadline = link.deadline() if timeout_s is None else Deadline(timeout_s)
    with calling("a rank"):
        calls = [worker.call.remote(function, *arguments) for worker in link.workers]
    answers: list[Result] = _answers(calls, deadline)
    return answers


def check_every_rank(link: ClusterLink) -> list[int]:
    """Chunks that each rank's arena holds. Raises `IntegrityError` if one contradicts itself."""
    with calling("a rank"):
        calls = [worker.check_integrity.remote() for worker in link.workers]
    counts: list[int] = _answers(calls, link.deadline())
    return counts


def _answers(calls: Sequence[Ref], deadline: Deadline) -> list[Result]:
    answers: list[Result] = []
    failure: Exception | None = None
    for rank, call in enumerate(calls):
        try:
            answers.append(wait_for_rank(call, timeout_s=deadline.remaining_s(), rank=rank))
        except Exception as error:  # whatever a user's function raises: raised again when all have ended
            failure = failure or error
    if failure is not None:
        raise failure
    return answers
