"""The connector for paged KV in CPU memory: rows found by `slot_mapping`."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmcache_ray.connector.planes import PlaneConnector, bytes_of, check_memory, planes_of_group, row_type
from lmcache_ray.connector.row_copy import Plane
from lmcache_ray.errors import LayoutError
from lmcache_ray.layout import RankLayout, ShardSpec
from lmcache_ray.torch_dtypes import to_torch_dtype

KVCaches = Sequence[torch.Tensor] | Mapping[str, torch.Tensor]
"""One tensor per layer that the rank holds, in ascending layer number (a mapping's order counts, not its names)."""


class PagedConnector(PlaneConnector):
    """A `KVConnector` over tensors ``[kv_size, num_blocks, block_size, heads, head_size]``, one per layer.

    With kv_size 1 (MLA) ``[num_blocks, block_size, hidden]`` is accepted too. The tensors' memory is borrowed, never
    copied, and stays allocated while the connector lives. A tensor that is given other memory later is not followed.
    Raises `LayoutError` naming the layer when one does not fit.
    """

    def __init__(self, layout: RankLayout, kvcaches: KVCaches) -> None:
        layers = _as_list(kvcaches)
        if len(layers) != layout.num_layers:
            raise LayoutError(f"kvcaches has {len(layers)} layers; this rank's layout has {layout.num_layers}")
        super().__init__(_planes(layout, layers))


class PagedConnectors:
    """The connectors of one rank; the latest is used again while it is asked for the same tensors in the same memory.

    An engine is passed its tensors with every call, and building a connector takes longer than all else that is done
    for a prompt of which nothing has to be copied. The latest keeps no tensor alive, and is forgotten with the first
    of its tensors that goes. Thread-safe.
    """

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        self._latest: _Built | None = None

    def of(self, kvcaches: KVCaches) -> PagedConnector:
        """The connector to these tensors; raises what `PagedConnector` raises."""
        layers = _as_list(kvcaches)
        latest = self._latest
        if latest is not None and latest.is_of(layers):
            return latest.connector
        connector = PagedConnector(self._layout, layers)
        self._latest = _Built(connector, [weakref.ref(tensor, self._forget) for tensor in layers], _places(layers))
        return connector

    def _forget(self, _: weakref.ref[torch.Tensor]) -> None:
        self._latest = None


@dataclass(frozen=True, slots=True)
class _Built:
    """A connector, the tensors that it was built for, and where their memory was."""

    connector: PagedConnector
    tensors: list[weakref.ref[torch.Tensor]]
    places: "_Places"

    def is_of(self, layers: Sequence[torch.Tensor]) -> bool:
        """Whether these are the very same tensors, and none was resized or given other memory since."""
        return (
            len(layers) == len(self.tensors)
            and all(known() is tensor for known, tensor in zip(self.tensors, layers, strict=True))
            and _places(layers) == self.places
        )


_Places = tuple[list[int], list[torch.Size], list[torch.dtype], list[bool]]


def _places(tensors: Sequence[torch.Tensor]) -> _Places:
    """What the tensors' rows are addressed by: all of it can be changed in place. In columns, as it is asked often."""
    return (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        [tensor.is_contiguous() for tensor in tensors],
    )


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
    name = f"kvcaches[{position}]"
    check_memory(tensor, name)
    if tensor.dtype != to_torch_dtype(group.dtype):
        raise LayoutError(f"{name} has dtype {tensor.dtype}; the layout says {group.dtype.value}")
    _check_shape(tuple(tensor.shape), group, name)
    if not tensor.is_contiguous():
        raise LayoutError(f"{name} is not contiguous; its rows cannot be addressed by slot")
    raw = bytes_of(tensor.view(-1), name)
    return raw.view(row_type(group.row_nbytes)).reshape(group.kv_size, -1)


def _check_shape(shape: tuple[int, ...], group: ShardSpec, name: str) -> None:
    five_dims = len(shape) == 5 and (shape[0], *shape[3:]) == (group.kv_size, group.num_heads, group.head_size)
    three_dims = len(shape) == 3 and group.kv_size == 1 and shape[2] == group.hidden_dim
    if not (five_dims or three_dims):
        wanted = f"[{group.kv_size}, num_blocks, block_size, {group.num_heads}, {group.head_size}]"
        if group.kv_size == 1:
            wanted += f" or [num_blocks, block_size, {group.hidden_dim}]"
        raise LayoutError(f"{name} has shape {list(shape)}; the layout needs {wanted}")
    if 0 in shape:
        raise LayoutError(f"{name} has shape {list(shape)}: no rows")
