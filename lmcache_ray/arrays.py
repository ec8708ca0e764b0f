"""Arrays out of the lists and tensors that callers hand over. Pure.

Apart because tokens, masks and slot mappings all come that way, and must be read and refused alike. The good path does
no Python work per value; only a refusal looks at single ones.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from lmcache_ray.compiled import compiled_module
from lmcache_ray.errors import InvalidRequestError

if TYPE_CHECKING:
    import torch

AnyArray: TypeAlias = NDArray[Any]
"""An array whose dtype is still to be checked."""

_FORMAT: Final = 1  # of the compiled module's arguments; see `_integers.c`


class _CompiledIntegers(Protocol):
    """What `_integers.c` defines."""

    def pack(self, values: Sequence[int], packed: NDArray[np.int64], /) -> bool:
        """Write each value; False, and unfinished, if one is no exact int or not within 0 to 2**63 - 1."""
        ...


def packed_integers(values: Sequence[int]) -> NDArray[np.int64]:
    """A list or tuple of integers from 0 to 2**63 - 1 as a contiguous array of its own.

    Raises TypeError if anything in it is no integer (bools, floats and strings are none), and OverflowError for other
    integers: `integer_of` tells the ones at fault. ValueError if its length changed meanwhile.
    """
    integers = np.empty(len(values), dtype=np.int64)
    compiled = _compiled()
    if compiled is not None and compiled.pack(values, integers):
        return integers
    return _packed_in_python(values)


def _packed_in_python(values: Sequence[int]) -> NDArray[np.int64]:
    """`packed_integers`, of anything."""
    if not values:
        return np.empty(0, dtype=np.int64)
    # Of all ways from a list, "Q" alone is fast and has 8 bytes. It takes bools, and more than 63 bits: as int64, one
    # is 0 or 1 and the other negative.
    integers = np.frombuffer(array("Q", values), dtype=np.int64)
    if len(integers) != len(values):
        raise ValueError("the length of a sequence changed while it was read")
    small = np.flatnonzero(integers < 2)
    if small.size:
        if integers[small].min() < 0:
            raise OverflowError("an integer has more than 63 bits")
        suspects = [values[position] for position in small.tolist()]
        if set(map(type, suspects)) != {int} and any(map(_is_bool, suspects)):
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
        values: AnyArray | None = tensor.detach().cpu().numpy() if has_memory(tensor) else None
    except (RuntimeError, TypeError) as error:  # a dtype that NumPy has not, or a tensor that only stands for one
        raise InvalidRequestError(f"{name} cannot be read as a NumPy array: {error}") from error
    if values is None:  # NumPy would read beyond it
        raise InvalidRequestError(f"{name} is a torch tensor whose memory was given back; accepted: one with values")
    return values


def has_memory(tensor: "torch.Tensor") -> bool:
    """Whether the memory of all its values is there: a storage can be resized under tensors, which keep their shape.

    `tensor` is dense. Raises RuntimeError for one that only stands for a tensor.
    """
    if tensor.numel() == 0:
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def _compiled() -> _CompiledIntegers | None:
    return cast(_CompiledIntegers | None, compiled_module("lmcache_ray._integers", form=_FORMAT))


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
