"""Token ids from whatever an engine hands over, as one checked array.

Apart from `keys.py` because every call that takes tokens needs it, also those that then compute no key. The good path
does no Python work per token; only a refusal looks at single values, to name the first wrong one.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias, TypeGuard, Union

import numpy as np
from numpy.typing import NDArray

from lmcache_ray.errors import InvalidRequestError, shown

if TYPE_CHECKING:
    import torch

TokenSequence: TypeAlias = Union[Sequence[int], NDArray[np.integer], "array[int]", "torch.Tensor"]

MAX_TOKEN_ID: Final = 2**63 - 1
_ACCEPTED: Final = "a list, tuple, range, array.array, or one-dimensional integer NumPy array or torch tensor"
_ACCEPTED_ID: Final = "token ids are integers, 0 <= id < 2**63"
_TORCH_INTEGERS: Final = frozenset(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


def token_ids(tokens: TokenSequence) -> NDArray[np.int64]:
    """The ids as a contiguous little-endian int64 array of shape ``[num_tokens]``.

    Accepts a list, tuple, range, `array.array`, or a one-dimensional integer NumPy array or torch tensor (on any
    device). The result may share memory with `tokens`: it is valid until the caller changes them, and is not to be
    written. Raises `InvalidRequestError` that names the first wrong position and its value: ids are integers,
    0 <= id < 2**63; bools, floats and strings are not ids, wherever they stand.
    """
    if isinstance(tokens, list | tuple):
        return _from_sequence(tokens)
    if isinstance(tokens, np.ndarray):
        return _from_numpy(tokens, source="NumPy array")
    if isinstance(tokens, range):
        return _from_range(tokens)
    if isinstance(tokens, array):
        if tokens.typecode not in "bBhHiIlLqQ":
            raise InvalidRequestError(f"tokens is an array.array of typecode {tokens.typecode!r}; {_ACCEPTED_ID}")
        return _from_numpy(np.array(tokens), source="array.array")  # a copy: a view would forbid the caller to append
    if is_torch_tensor(tokens):
        return _from_torch(tokens)
    raise InvalidRequestError(f"tokens is {shown(tokens)}; accepted: {_ACCEPTED}")


def is_torch_tensor(value: object) -> "TypeGuard[torch.Tensor]":
    """Whether `value` is a torch tensor. Never imports torch: where nobody has, there is no tensor either."""
    tensor_type = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_type is not None and isinstance(value, tensor_type)


def _from_sequence(tokens: Sequence[int]) -> NDArray[np.int64]:
    try:
        try:
            packed = array("I", tokens)  # twice as fast as "q", and vocabularies are small
        except OverflowError:
            packed = array("q", tokens)
    except (TypeError, OverflowError):
        _refuse_first_wrong(tokens)
    ids = np.array(packed, dtype="<i8")
    # True and False pass as 1 and 0 above, negative ids pass "q": only places that hold such a value can be wrong.
    suspects = np.flatnonzero(ids < 2).tolist()
    if suspects and (set(map(type, map(tokens.__getitem__, suspects))) != {int} or ids.min() < 0):
        for position in suspects:
            _check_id(position, tokens[position])
    return ids


def _from_numpy(tokens: "NDArray[np.integer]", *, source: str) -> NDArray[np.int64]:
    if tokens.dtype.kind not in "iu":
        raise InvalidRequestError(f"tokens is a {source} of dtype {tokens.dtype}; {_ACCEPTED_ID}")
    if tokens.ndim != 1:
        raise InvalidRequestError(f"tokens is a {source} of shape {tokens.shape}; accepted: one dimension")
    wrong = np.flatnonzero(tokens > MAX_TOKEN_ID if tokens.dtype.kind == "u" else tokens < 0)
    if wrong.size:
        _refuse_id(int(wrong[0]), int(tokens[wrong[0]]))
    return np.ascontiguousarray(tokens, dtype="<i8")


def _from_range(tokens: range) -> NDArray[np.int64]:
    if tokens:
        _check_id(0, tokens[0])
        # A range is monotonic: the ids within limits are a leading run, whose length follows from the step.
        room = (MAX_TOKEN_ID - tokens.start) // tokens.step if tokens.step > 0 else tokens.start // -tokens.step
        if not 0 <= tokens[-1] <= MAX_TOKEN_ID:
            _refuse_id(room + 1, tokens[room + 1])
    return np.arange(tokens.start, tokens.stop, tokens.step, dtype="<i8")


def _from_torch(tokens: "torch.Tensor") -> NDArray[np.int64]:
    if str(tokens.dtype) not in _TORCH_INTEGERS:
        raise InvalidRequestError(f"tokens is a torch tensor of dtype {tokens.dtype}; {_ACCEPTED_ID}")
    if tokens.is_meta or str(tokens.layout) != "torch.strided":
        raise InvalidRequestError(
            f"tokens is a torch tensor on device {tokens.device} with layout {tokens.layout}; "
            "accepted: a dense tensor that has values"
        )
    return _from_numpy(tokens.detach().cpu().numpy(), source="torch tensor")


def _refuse_first_wrong(tokens: Sequence[object]) -> NoReturn:
    for position, value in enumerate(tokens):
        _check_id(position, value)
    raise InvalidRequestError(f"tokens changed while they were read; {_ACCEPTED_ID}")


def _check_id(position: int, value: object) -> None:
    # `__index__` is how Python tells an integer from a number that happens to be whole; bools have it too.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if is_bool or not hasattr(value, "__index__"):
        _refuse_id(position, value)
    try:
        number = value.__index__()
    except TypeError:
        _refuse_id(position, value)
    if not 0 <= number <= MAX_TOKEN_ID:
        _refuse_id(position, value)


def _refuse_id(position: int, value: object) -> NoReturn:
    raise InvalidRequestError(f"tokens[{position}] is {shown(value)}; {_ACCEPTED_ID}")
