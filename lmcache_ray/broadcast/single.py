"""The broadcaster of a world of one rank: everybody has everything already."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_ray.broadcast.base import check_rank

if TYPE_CHECKING:
    import torch


class SingleRankBroadcaster:
    """A `Broadcaster` without receivers: tags are of no use to it, and an abort has nobody to tell."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def world_size(self) -> int:
        """Always 1."""
        return 1

    def broadcast_object(self, obj: object, *, src: int, tag: str | None = None) -> object:
        """`obj` itself."""
        check_rank("src", src, self.world_size)
        return obj

    def broadcast_tensors(self, tensors: "Sequence[torch.Tensor]", *, src: int, tag: str | None = None) -> None:
        """Leaves the tensors as they are: they are the source's."""
        check_rank("src", src, self.world_size)

    def abort(self, reason: str, *, tag: str | None = None) -> None:
        """No rank waits."""

    def break_session(self, reason: str) -> None:
        """No other rank could be out of step."""
