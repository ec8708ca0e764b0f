"""The one chunking rule: which tokens of a prompt form which chunk, and where a masked call begins. Pure.

Lookup, store and retrieve all cut a prompt here, so that they can never disagree on a border. With chunk size C::

    | 0 .. C-1 | C .. 2C-1 | ... | partial tail |
    ^ chunk 0    ^ chunk 1         ^ a chunk only with `keep_partial`
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from lmcache_ray.arrays import is_torch_tensor, tensor_values
from lmcache_ray.errors import ConfigError, InvalidRequestError, shown

if TYPE_CHECKING:
    import torch

Mask: TypeAlias = Union[Sequence[bool], NDArray[np.bool_], "torch.Tensor"]
Span: TypeAlias = tuple[int, int]
"""The tokens ``[start, end)`` of a prompt."""


def chunk_spans(num_tokens: int, chunk_size: int, *, keep_partial: bool) -> list[Span]:
    """The span of every chunk of a prompt of `num_tokens` tokens, in order.

    Full chunks, and the partial tail (fewer than `chunk_size` tokens) only with `keep_partial`. Tokens past the last
    span belong to no chunk: they are never cached.
    """
    if chunk_size < 1:
        raise ConfigError(f"chunk_size is {chunk_size}; accepted: at least 1")
    if num_tokens < 0:
        raise InvalidRequestError(f"num_tokens is {num_tokens}; accepted: at least 0")
    end = num_tokens if keep_partial else num_tokens - num_tokens % chunk_size
    return [(start, min(start + chunk_size, end)) for start in range(0, end, chunk_size)]


def masked_start(mask: Mask | None, num_tokens: int, chunk_size: int, *, aligned: bool) -> int:
    """The first token that a call is about: the number of leading False in `mask`, 0 without a mask.

    `mask` holds one bool a token, all False before all True (``FF..FTT..T``). With `aligned` (store) the number of
    False must be a multiple of `chunk_size`. Raises `InvalidRequestError` for another length or dtype, and for a
    False after a True.
    """
    if mask is None:
        return 0
    flags = _flags(mask)
    if flags.shape != (num_tokens,):
        raise InvalidRequestError(f"mask has shape {flags.shape}; accepted: one bool for each of {num_tokens} tokens")
    start = num_tokens - int(np.count_nonzero(flags))
    if flags[:start].any():
        first_true = int(flags.argmax())
        hole = first_true + int(flags[first_true:].argmin())
        raise InvalidRequestError(
            f"mask[{hole}] is False after mask[{first_true}] is True; accepted: all False before all True"
        )
    if aligned and start % chunk_size:
        raise InvalidRequestError(f"mask begins with {start} False; accepted: a multiple of chunk_size={chunk_size}")
    return start


def _flags(mask: Mask) -> NDArray[np.bool_]:
    if isinstance(mask, list | tuple):
        kinds = set(map(type, mask))
        odd = kinds - {bool, np.bool_}
        if odd:
            position, value = next((i, value) for i, value in enumerate(mask) if type(value) in odd)
            raise InvalidRequestError(f"mask[{position}] is {shown(value)}; accepted: bools")
        return np.frombuffer(bytes(mask), np.bool_) if kinds == {bool} else np.array(mask, np.bool_)  # bytes: faster
    if isinstance(mask, np.ndarray):
        if mask.dtype != np.bool_:
            raise InvalidRequestError(f"mask is a NumPy array of dtype {mask.dtype}; accepted: dtype bool")
        return mask
    if is_torch_tensor(mask):
        if str(mask.dtype) != "torch.bool":
            raise InvalidRequestError(f"mask is a torch tensor of dtype {mask.dtype}; accepted: torch.bool")
        return tensor_values(mask, "mask")
    raise InvalidRequestError(f"mask is {shown(mask)}; accepted: a list, NumPy array or torch tensor of bools, or None")
