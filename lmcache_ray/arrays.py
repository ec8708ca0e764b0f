"""Arrays out of the lists and tensors that callers hand over. Pure.

Apart because tokens, masks and slot mappings all come that way, and must be read and refused alike. The good path does
no Python work per value; only a refusal looks at single ones.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
from numpy.typing import NDArray

from lmcache_ray.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

AnyArray: TypeAlias = NDArray[Any]
"""An array whose dtype is still to be checked."""


def packed_integers(values: Sequence[int]) -> NDArray[np.int64]:
    """A list or tuple of integers as a contiguous little-endian int64 array of its own.

    Raises TypeError if anything in it is no integer (bools, floats and strings are none), and OverflowError if a value
    does not fit 64 bits: `integer_of` finds the one at fault.
    """
    try:
        packed = array("I", values)  # many times faster than "q" and than NumPy, and most ids and rows are small
    except OverflowError:
        packed = array("q", values)
    integers = np.array(packed, dtype="<i8")
    # Bools pass as 1 and 0 above: only where these stand can one be.
    suspects = np.flatnonzero(integers.view(np.uint64) < 2).tolist()
    if set(map(type, map(values.__getitem__, suspects))) - {int} and any(_is_bool(values[at]) for at in suspects):
        raise TypeError("a bool is no integer here")
    return integers


def integer_of(value: object) -> int | None:
    """`value` as Python's int, if it is an integer of any library, and no bool."""
    # `__index__` is how Python tells an integer from a number that happens to be whole; bools have it too.
    if _is_bool(value) or not hasattr(value, "__index__"):
        return None
    try:
        return int(value.__index__())
    except TypeError:  # an array of several, say
        return None


def is_torch_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Whether `value` is a torch tensor. Never imports torch: where nobody has, there is no tensor either."""
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_type is not None and isinstance(value, tensor_type)


def tensor_values(tensor: "torch.Tensor", name: str) -> AnyArray:
    """The values of a tensor of any device; memory is shared if it is the CPU's.

    Raises `InvalidRequestError` that begins with `name` if there are none, or none that NumPy can hold.
    """
    if tensor.is_meta or tensor.is_nested or str(tensor.layout) != "torch.strided":
        raise InvalidRequestError(
            f"{name} is a torch tensor on device {tensor.device} with layout {tensor.layout}; "
            "accepted: a dense tensor that has values"
        )
    try:
        is_freed = tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0
        values: AnyArray | None = None if is_freed else tensor.detach().cpu().numpy()
    except (RuntimeError, TypeError) as error:  # a dtype that NumPy has not, or a tensor that only stands for one
        raise InvalidRequestError(f"{name} cannot be read as a NumPy array: {error}") from error
    if values is None:  # NumPy would read at address 0
        raise InvalidRequestError(f"{name} is a torch tensor whose memory was given back; accepted: one with values")
    return values


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
