"""Layers of equal KV shape and dtype as groups: what an engine's paged KV tensors tell about a model.

LMCache's words and surface, apart from `metadata.py` because the manager is filled later than the metadata is made:
when the engine has allocated its KV.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lmcache_ray.errors import LayoutError


@dataclass(frozen=True, slots=True)
class KVLayerGroupInfo:
    """Layers whose paged KV tensors agree in shape and dtype.

    `layer_names[i]` is the name of layer `layer_indices[i]`. `shape` is one layer's whole tensor:
    ``[kv_dim, num_blocks, block_size, num_heads, head_size]``, or ``[num_blocks, block_size, hidden]`` with MLA.
    """

    layer_names: list[str]
    layer_indices: list[int]
    shape: torch.Size
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_names", list(self.layer_names))
        object.__setattr__(self, "layer_indices", list(self.layer_indices))
        object.__setattr__(self, "shape", torch.Size(self.shape))
        if len(self.layer_names) != len(self.layer_indices):
            raise LayoutError(
                f"a layer group needs one name per layer; got {len(self.layer_names)} names "
                f"for {len(self.layer_indices)} layers"
            )

    @property
    def num_layers(self) -> int:
        """Layers in the group."""
        return len(self.layer_indices)

    @property
    def hidden_dim_size(self) -> int:
        """Elements of one token in one layer, keys or values. Raises `LayoutError` unless 5- or 3-dimensional."""
        if len(self.shape) == 5:
            return self.shape[3] * self.shape[4]
        if len(self.shape) == 3:
            return self.shape[2]
        raise LayoutError(
            f"paged KV of layers {self.layer_names} has shape {list(self.shape)}; accepted: "
            "[kv_dim, num_blocks, block_size, num_heads, head_size], or [num_blocks, block_size, hidden] with MLA"
        )

    def contains_layer(self, layer_idx: int) -> bool:
        """Whether the group has the layer of this number."""
        return layer_idx in self.layer_indices

    def contains_layer_name(self, layer_name: str) -> bool:
        """Whether the group has the layer of this name."""
        return layer_name in self.layer_names


@dataclass
class KVLayerGroupsManager:
    """The layer groups of one rank. Empty until filled; then fixed. Equal when the groups are."""

    kv_layer_groups: list[KVLayerGroupInfo] = field(default_factory=list)

    @property
    def num_groups(self) -> int:
        """Groups known; 0 while empty."""
        return len(self.kv_layer_groups)

    def build_kv_layer_groups(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Groups the layers of `kv_caches` (name -> paged KV tensor) by exact shape and dtype.

        Layers are numbered in the order of the mapping, groups in the order of their first layer. Does nothing when
        groups are known already or `kv_caches` is empty. Raises `LayoutError` for a value that is not a tensor.
        """
        if self.kv_layer_groups:
            return
        members: dict[tuple[torch.Size, torch.dtype], list[tuple[int, str]]] = {}
        for layer_idx, (name, tensor) in enumerate(kv_caches.items()):
            members.setdefault(_shape_and_dtype(name, tensor), []).append((layer_idx, name))
        self.kv_layer_groups = [
            KVLayerGroupInfo([name for _, name in layers], [layer_idx for layer_idx, _ in layers], shape, dtype)
            for (shape, dtype), layers in members.items()
        ]

    def get_group_by_layer_idx(self, layer_idx: int) -> KVLayerGroupInfo | None:
        """The group of the layer of this number, None when there is none."""
        return next((group for group in self.kv_layer_groups if group.contains_layer(layer_idx)), None)

    def get_group_by_layer_name(self, layer_name: str) -> KVLayerGroupInfo | None:
        """The group of the layer of this name, None when there is none."""
        return next((group for group in self.kv_layer_groups if group.contains_layer_name(layer_name)), None)

    def get_layer_shape(self, layer_idx: int) -> torch.Size | None:
        """The paged KV shape of a layer, None when it is not known."""
        group = self.get_group_by_layer_idx(layer_idx)
        return group.shape if group else None

    def get_layer_dtype(self, layer_idx: int) -> torch.dtype | None:
        """The KV dtype of a layer, None when it is not known."""
        group = self.get_group_by_layer_idx(layer_idx)
        return group.dtype if group else None


def _shape_and_dtype(name: str, tensor: object) -> tuple[torch.Size, torch.dtype]:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"paged KV of layer {name} must be a tensor; got {type(tensor).__name__}")
    return tensor.shape, tensor.dtype
