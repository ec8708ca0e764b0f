"""The one thing the library asks of a broadcast, whoever carries it.

It never hangs and never blocks the source: every wait has a deadline, and a source that cannot send says so.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from lmcache_ray.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch


class Broadcaster(Protocol):
    """One rank's end of a world's broadcasts.

    Calls are matched by `tag`, a name issued for one attempt; without one, the k-th untagged call of every rank is the
    same broadcast, so these must come in the same order on each rank, from one thread at a time.

    The source returns without waiting for receivers. A receiver returns when the source has published, or raises
    `BroadcastAborted` as soon as it is known that the source will not, or `DeadlineError` at its deadline. Every
    method raises `InvalidRequestError` for a `src` outside the world.
    """

    @property
    def rank(self) -> int:
        """This end's rank."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def broadcast_object(self, obj: object, *, src: int, tag: str | None = None) -> object:
        """`obj` of rank `src`, on every rank; what the other ranks pass (None) is ignored.

        The object may be shared among ranks of one process: nobody changes it after the call.
        """
        ...

    def broadcast_tensors(self, tensors: "Sequence[torch.Tensor]", *, src: int, tag: str | None = None) -> None:
        """Copies the tensors of rank `src` into those of every other rank, in place.

        The source may reuse its tensors at once. A receiver whose tensors differ in number, shape or dtype raises
        `BroadcastError` with none of them touched; the other ranks do not notice.
        """
        ...

    def abort(self, reason: str, *, tag: str | None = None) -> None:
        """This rank, as the source, fails the broadcast it would have made: receivers raise `BroadcastAborted`."""
        ...

    def break_session(self, reason: str) -> None:
        """This rank was given what another untagged call sent: the ranks are not in step.

        Each rank's next untagged call is refused (`BroadcastAborted`); when all have been told so, they are in step.
        """
        ...


def check_rank(name: str, rank: int, world_size: int) -> None:
    """Raises `InvalidRequestError` unless `rank`, given as `name`, is a rank of the world."""
    if not 0 <= rank < world_size:
        raise InvalidRequestError(f"{name} is {rank}; accepted: 0 <= {name} < {world_size}")
