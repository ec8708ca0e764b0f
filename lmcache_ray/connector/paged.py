"""The connector for paged KV in CPU memory: rows found by `slot_mapping`."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from lmcache_ray.connector.planes import PlaneConnector, planes_of_group, row_type
from lmcache_ray.connector.row_copy import Plane
from lmcache_ray.errors import LayoutError
from lmcache_ray.layout import RankLayout, ShardSpec
from lmcache_ray.torch_dtypes import to_torch_dtype

KVCaches = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""One tensor per layer that the rank holds, in ascending layer number (a mapping's order counts, not its names)."""


class PagedConnector(PlaneConnector):
    """A `KVConnector` over tensors ``[kv_size, num_blocks, block_size, heads, head_size]``, one per layer.

    With kv_size 1 (MLA) ``[num_blocks, block_size, hidden]`` is accepted too. The tensors are borrowed, never copied:
    the connector is valid as long as they are. Raises `LayoutError` naming the layer when one does not fit.
    """

    def __init__(self, layout: RankLayout, kvcaches: KVCaches) -> None:
        layers = _as_list(kvcaches)
        if len(layers) != layout.num_layers:
            raise LayoutError(f"kvcaches has {len(layers)} layers; this rank's layout has {layout.num_layers}")
        super().__init__(_planes(layout, layers))


def _planes(layout: RankLayout, layers: Sequence[torch.Tensor]) -> Iterator[Plane]:
    for index, (group, positions) in enumerate(zip(layout.groups, layout.layer_positions(), strict=True)):
        per_layer = [_byte_rows(layers[position], group, position) for position in positions]
        yield from planes_of_group(layout, index, [[rows[kv] for rows in per_layer] for kv in range(group.kv_size)])


def _as_list(kvcaches: KVCaches) -> list[torch.Tensor]:
    if isinstance(kvcaches, Mapping):
        return list(kvcaches.values())
    if not isinstance(kvcaches, Sequence):  # as a tensor is not, although it can be iterated over
        raise LayoutError(f"kvcaches must be a list or mapping of one tensor per layer; got {type(kvcaches).__name__}")
    return list(kvcaches)


def _byte_rows(tensor: torch.Tensor, group: ShardSpec, position: int) -> np.ndarray:
    """The layer's memory as void items ``[kv_size, num_slots]`` of one row each."""
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"kvcaches[{position}] is a {type(tensor).__name__}, not a tensor")
    if tensor.dtype != to_torch_dtype(group.dtype):
        raise LayoutError(f"kvcaches[{position}] has dtype {tensor.dtype}; the layout says {group.dtype.value}")
    if tensor.device.type != "cpu":
        raise LayoutError(f"kvcaches[{position}] is on {tensor.device}; this connector copies CPU memory only")
    shape = tuple(tensor.shape)
    five_dims = len(shape) == 5 and (shape[0], *shape[3:]) == (group.kv_size, group.num_heads, group.head_size)
    three_dims = len(shape) == 3 and group.kv_size == 1 and shape[2] == group.hidden_dim
    if not (five_dims or three_dims):
        wanted = f"[{group.kv_size}, num_blocks, block_size, {group.num_heads}, {group.head_size}]"
        if group.kv_size == 1:
            wanted += f" or [num_blocks, block_size, {group.hidden_dim}]"
        raise LayoutError(f"kvcaches[{position}] has shape {list(shape)}; the layout needs {wanted}")
    if not tensor.is_contiguous():
        raise LayoutError(f"kvcaches[{position}] is not contiguous; its rows cannot be addressed by slot")
    if tensor.numel() == 0:
        raise LayoutError(f"kvcaches[{position}] has shape {list(shape)}: no rows")
    raw = tensor.detach().view(torch.uint8).reshape(-1).numpy()
    return raw.view(row_type(group.row_nbytes)).reshape(group.kv_size, -1)
