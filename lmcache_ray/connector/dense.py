"""The connector for shards as tensors: what `put` takes and `get` returns.

A shard tensor of a layer group is ``[kv_size, num_layers, num_tokens, hidden_dim]``; row r is the r-th token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from lmcache_ray.connector.planes import PlaneConnector, bytes_of, check_memory, planes_of_group, row_type
from lmcache_ray.errors import LayoutError
from lmcache_ray.layout import RankLayout, ShardSpec
from lmcache_ray.torch_dtypes import to_torch_dtype


class DenseConnector(PlaneConnector):
    """A `KVConnector` over one tensor per layer group. Raises `LayoutError` naming the group that does not fit.

    `num_tokens` is the number of rows that every tensor must have; `name` is what a message calls the tensors. They
    are borrowed, but one whose rows are scattered in memory is copied: from it rows can be gathered, not scattered
    into it.
    """

    def __init__(self, layout: RankLayout, tensors: Sequence[torch.Tensor], num_tokens: int, *, name: str) -> None:
        num_groups = len(layout.groups)
        if not isinstance(tensors, list | tuple) or len(tensors) != num_groups:  # a tensor is no list of tensors
            raise LayoutError(f"{name} must be one tensor for each of {num_groups} layer groups")
        names = [f"{name}[{index}]" for index in range(num_groups)]
        for group, tensor, tensor_name in zip(layout.groups, tensors, names, strict=True):
            _check(group, tensor, num_tokens, tensor_name)
        self._copied = [named for named, tensor in zip(names, tensors, strict=True) if tensor.stride(-1) != 1]
        super().__init__(
            plane
            for index, tensor in enumerate(tensors)
            for plane in planes_of_group(layout, index, _rows(layout.groups[index], tensor, names[index]))
        )

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        """Copy the shard's rows from `first_row` on into rows `rows` of the tensors."""
        if self._copied:
            raise LayoutError(f"{self._copied[0]} cannot be written: the elements of a row must lie side by side")
        super().scatter(shard, rows, first_row)


def empty_shard(layout: RankLayout, num_tokens: int) -> list[torch.Tensor]:
    """Uninitialised tensors for one rank's shard of `num_tokens` tokens, one per layer group."""
    return [
        torch.empty((group.kv_size, group.num_layers, num_tokens, group.hidden_dim), dtype=to_torch_dtype(group.dtype))
        for group in layout.groups
    ]


def _check(group: ShardSpec, tensor: torch.Tensor, num_tokens: int, name: str) -> None:
    shape = (group.kv_size, group.num_layers, num_tokens, group.hidden_dim)
    check_memory(tensor, name)
    if tuple(tensor.shape) != shape or tensor.dtype != to_torch_dtype(group.dtype):
        raise LayoutError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; the layout needs {group.dtype.value} {list(shape)}"
        )


def _rows(group: ShardSpec, tensor: torch.Tensor, name: str) -> list[list[np.ndarray]]:
    """Void ``[num_tokens]`` of each plane, keys or values first, then the layer."""
    dense = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    rows = bytes_of(dense, name).view(row_type(group.row_nbytes))[..., 0]
    return [list(layers) for layers in rows]
