"""Token ids from whatever an engine hands over, as one checked array.

Apart from `keys.py` because every call that takes tokens needs it, also those that then compute no key.
"""

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from lmcache_ray.arrays import AnyArray, integer_of, is_torch_tensor, packed_integers, tensor_values
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


def _from_sequence(tokens: Sequence[int]) -> NDArray[np.int64]:
    try:
        return packed_integers(tokens).astype("<i8", copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        for position, value in enumerate(tokens):
            token = integer_of(value)
            if token is None or not 0 <= token <= MAX_TOKEN_ID:
                _refuse_id(position, value)
        raise InvalidRequestError(f"tokens changed while they were read; {_ACCEPTED_ID}") from error


def _from_numpy(tokens: AnyArray, *, source: str) -> NDArray[np.int64]:
    if tokens.dtype.kind not in "iu":
        raise InvalidRequestError(f"tokens is a {source} of dtype {tokens.dtype}; {_ACCEPTED_ID}")
    if tokens.ndim != 1:
        raise InvalidRequestError(f"tokens is a {source} of shape {tokens.shape}; accepted: one dimension")
    signed = tokens.dtype.kind == "i"
    if tokens.size and (tokens.min() < 0 if signed else tokens.max() > MAX_TOKEN_ID):
        first = int((tokens < 0 if signed else tokens > MAX_TOKEN_ID).argmax())
        _refuse_id(first, int(tokens[first]))
    return np.ascontiguousarray(tokens, dtype="<i8")


def _from_range(tokens: range) -> NDArray[np.int64]:
    if tokens:
        if not 0 <= tokens[0] <= MAX_TOKEN_ID:
            _refuse_id(0, tokens[0])
        # A range is monotonic: the ids within limits are a leading run, whose length follows from the step.
        room = (MAX_TOKEN_ID - tokens.start) // tokens.step if tokens.step > 0 else tokens.start // -tokens.step
        if not 0 <= tokens[-1] <= MAX_TOKEN_ID:
            _refuse_id(room + 1, tokens[room + 1])
    return np.arange(tokens.start, tokens.stop, tokens.step, dtype="<i8")


def _from_torch(tokens: "torch.Tensor") -> NDArray[np.int64]:
    if str(tokens.dtype) not in _TORCH_INTEGERS:
        raise InvalidRequestError(f"tokens is a torch tensor of dtype {tokens.dtype}; {_ACCEPTED_ID}")
    return _from_numpy(tensor_values(tokens, "tokens"), source="torch tensor")


def _refuse_id(position: int, value: object) -> NoReturn:
    raise InvalidRequestError(f"tokens[{position}] is {shown(value)}; {_ACCEPTED_ID}")
