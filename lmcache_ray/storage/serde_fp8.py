"""16-bit KV kept as 8-bit floats: half the bytes, for some precision. Apart because it needs torch.

Layer groups of float16 or bfloat16 are rounded: a plane (one layer's keys or values) gets a scale, float32, and its
elements are divided by it and written as float8_e4m3fn. Groups of other dtypes are written as they are. ::

    [scales of every plane of every rounded group] [group 0] [group 1] ...      elements in the shard's order

The scale makes the largest finite magnitude of the plane the largest of the format, 448. So an element x comes back
with an error of at most ``|x| / 16``, or ``scale / 1024`` where that is more, plus the rounding to its own dtype. Zeros
and signs are kept. A NaN comes back as a NaN, an infinity as the largest magnitude that the scale can tell, with its
sign.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from typing_extensions import Buffer

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import DamagedChunkError
from lmcache_ray.layout import RankLayout, ShardSpec
from lmcache_ray.storage.shard_bytes import group_bytes, meant_bytes
from lmcache_ray.torch_dtypes import to_torch_dtype

_FP8: Final = torch.float8_e4m3fn
_LARGEST: Final = torch.finfo(_FP8).max
_SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny  # never 0, and no division loses precision by it
_ROUNDED: Final = frozenset((KVDtype.FLOAT16, KVDtype.BFLOAT16))


def encode(data: np.ndarray, layout: RankLayout, num_tokens: int) -> Buffer:
    """As `Serde.encode`."""
    encoded = np.zeros(_encoded_nbytes(layout), np.uint8)
    shard = meant_bytes(data, layout, num_tokens)
    for group, plain, scales, elements in _parts(shard, encoded, layout):
        if group.dtype in _ROUNDED:
            _round(_planes(plain, group), scales, _planes(elements, group, _FP8))
        else:
            elements[:] = plain
    return encoded.data


def decode(encoded: Buffer, data: np.ndarray, layout: RankLayout) -> None:
    """As `Serde.decode`."""
    view, expected = memoryview(encoded), _encoded_nbytes(layout)
    if view.nbytes != expected:
        raise DamagedChunkError(f"{view.nbytes} bytes, where a shard of this layout has {expected} as fp8")
    stored = np.frombuffer(view, np.uint8).copy()  # torch wants aligned memory that may be written
    data[:] = 0
    for group, plain, scales, elements in _parts(data, stored, layout):
        if group.dtype in _ROUNDED:
            _restore(_planes(elements, group, _FP8), scales, _planes(plain, group))
        else:
            plain[:] = elements


def _round(planes: torch.Tensor, scales: torch.Tensor, rounded: torch.Tensor) -> None:
    """``[planes, elements]`` of 16 bits to ``[planes]`` scales and ``[planes, elements]`` of 8 bits."""
    values = planes.float()
    magnitudes = torch.where(values.isfinite(), values.abs(), 0.0)
    scales.copy_((magnitudes.amax(dim=1) / _LARGEST).clamp_(min=_SMALLEST_SCALE))
    rounded.copy_(values.div_(scales[:, None]).clamp_(-_LARGEST, _LARGEST))


def _restore(rounded: torch.Tensor, scales: torch.Tensor, planes: torch.Tensor) -> None:
    """The reverse of `_round`."""
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise DamagedChunkError("a scale is not a positive number")
    planes.copy_(rounded.float().mul_(scales[:, None]))


def _parts(
    shard: np.ndarray, encoded: np.ndarray, layout: RankLayout
) -> Iterator[tuple[ShardSpec, np.ndarray, torch.Tensor, np.ndarray]]:
    """Per group: its bytes in the shard, its scales (none if it is not rounded), its elements as they are written."""
    num_scales = _num_scales(layout)
    all_scales = torch.from_numpy(encoded[: 4 * num_scales]).view(torch.float32)
    first_scale, offset = 0, 4 * num_scales
    for group, plain in zip(layout.groups, group_bytes(shard, layout), strict=True):
        is_rounded = group.dtype in _ROUNDED
        num_planes = group.kv_size * group.num_layers if is_rounded else 0
        nbytes = len(plain) // 2 if is_rounded else len(plain)
        yield group, plain, all_scales[first_scale : first_scale + num_planes], encoded[offset : offset + nbytes]
        first_scale, offset = first_scale + num_planes, offset + nbytes


def _planes(plain: np.ndarray, group: ShardSpec, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``[planes, elements]`` over these bytes, of the group's dtype if no other is given."""
    elements = torch.from_numpy(plain).view(dtype or to_torch_dtype(group.dtype))
    return elements.view(group.kv_size * group.num_layers, -1)


def _num_scales(layout: RankLayout) -> int:
    return sum(group.kv_size * group.num_layers for group in layout.groups if group.dtype in _ROUNDED)


def _encoded_nbytes(layout: RankLayout) -> int:
    token_nbytes = sum(
        group.token_nbytes // 2 if group.dtype in _ROUNDED else group.token_nbytes for group in layout.groups
    )
    return 4 * _num_scales(layout) + layout.chunk_size * token_nbytes
