"""The connector for shards as tensors: what `put` takes and `get` returns.

A shard tensor of a layer group is ``[kv_size, num_layers, num_tokens, hidden_dim]``; row r is the r-th token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from lmcache_ray.connector.planes import PlaneConnector, planes_of_group, row_type
from lmcache_ray.errors import LayoutError
from lmcache_ray.layout import RankLayout
from lmcache_ray.torch_dtypes import to_torch_dtype


class DenseConnector(PlaneConnector):
    """A `KVConnector` over one tensor per layer group. Raises `LayoutError` naming the group that does not fit.

    `num_tokens` is the number of rows that every tensor must have; `name` is what a message calls the tensors.
    """

    def __init__(self, layout: RankLayout, tensors: Sequence[torch.Tensor], num_tokens: int, *, name: str) -> None:
        if isinstance(tensors, torch.Tensor) or len(tensors) != len(layout.groups):
            raise LayoutError(f"{name} must be one tensor for each of {len(layout.groups)} layer groups")
        super().__init__(
            plane
            for index, tensor in enumerate(tensors)
            for plane in planes_of_group(layout, index, _rows(layout, index, tensor, num_tokens, f"{name}[{index}]"))
        )


def empty_shard(layout: RankLayout, num_tokens: int) -> list[torch.Tensor]:
    """Uninitialised tensors for one rank's shard of `num_tokens` tokens, one per layer group."""
    return [
        torch.empty((group.kv_size, group.num_layers, num_tokens, group.hidden_dim), dtype=to_torch_dtype(group.dtype))
        for group in layout.groups
    ]


def _rows(layout: RankLayout, index: int, tensor: torch.Tensor, num_tokens: int, name: str) -> np.ndarray:
    group = layout.groups[index]
    shape = (group.kv_size, group.num_layers, num_tokens, group.hidden_dim)
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tuple(tensor.shape) != shape or tensor.dtype != to_torch_dtype(group.dtype):
        raise LayoutError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; the layout needs {group.dtype.value} {list(shape)}"
        )
    if tensor.device.type != "cpu":
        raise LayoutError(f"{name} is on {tensor.device}; shards are copied from and to CPU memory")
    raw = tensor.detach().contiguous().view(torch.uint8).numpy()
    return raw.reshape(group.kv_size, group.num_layers, -1).view(row_type(group.row_nbytes))
