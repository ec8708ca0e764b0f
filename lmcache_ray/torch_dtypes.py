"""`KVDtype` <-> `torch.dtype`, apart from `dtypes.py` because importing torch takes seconds."""

import torch

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import LayoutError

_TO_TORCH: dict[KVDtype, torch.dtype] = {dtype: getattr(torch, dtype.value) for dtype in KVDtype}
_FROM_TORCH: dict[torch.dtype, KVDtype] = {torch_dtype: dtype for dtype, torch_dtype in _TO_TORCH.items()}


def to_torch_dtype(dtype: KVDtype) -> torch.dtype:
    """The torch dtype of the same name."""
    return _TO_TORCH[dtype]


def from_torch_dtype(dtype: torch.dtype) -> KVDtype:
    """The `KVDtype` of the same name. Raises `LayoutError` for a dtype that KV cannot have."""
    try:
        return _FROM_TORCH[dtype]
    except (KeyError, TypeError):
        accepted = ", ".join(known.value for known in KVDtype)
        raise LayoutError(f"KV dtype {dtype!r} is not supported; accepted: {accepted}") from None
