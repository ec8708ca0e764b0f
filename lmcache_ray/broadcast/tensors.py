"""What every broadcaster does with tensors: describe, compare, fill.

Apart from the broadcasters so that a receiver's tensors are checked in one place. Imports no torch by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcache_ray.errors import BroadcastError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: "torch.dtype"


def specs_of(tensors: "Sequence[torch.Tensor]") -> tuple[TensorSpec, ...]:
    """The specs of `tensors`, in order."""
    return tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def check_specs(own: Sequence[TensorSpec], sent: Sequence[TensorSpec], *, src: int) -> None:
    """Raises `BroadcastError` that names the first difference between a receiver's tensors and those sent."""
    if len(own) != len(sent):
        raise BroadcastError(f"rank {src} sent {len(sent)} tensors, this rank gave room for {len(own)}")
    for index, (mine, theirs) in enumerate(zip(own, sent, strict=True)):
        if mine != theirs:
            raise BroadcastError(
                f"tensors[{index}] from rank {src} is {list(theirs.shape)} of {theirs.dtype}, "
                f"this rank gave room for {list(mine.shape)} of {mine.dtype}"
            )


def fill(tensors: "Sequence[torch.Tensor]", sent: "Sequence[torch.Tensor]", *, src: int) -> None:
    """Copies `sent` into `tensors`, byte for byte; raises `BroadcastError` before the first one if any differs."""
    check_specs(specs_of(tensors), specs_of(sent), src=src)
    for tensor, source in zip(tensors, sent, strict=True):
        tensor.detach().copy_(source)
