"""The text that describes paged KV shapes, ``(d0,...):dtype:layer_count[;...]``, and what it means for a rank's layout.

Grammar: groups are separated by ``;`` (none may be empty, so a ``;`` at the end is an error); a group is the shape in
parentheses, a dtype (any case) and the number of layers, separated by ``:``. Blanks around any part are ignored.
Numbers are ASCII digits.

Two shapes have a meaning; others can be parsed and formatted, but nothing is built from them:

- five dimensions: ``(num_layers, kv_dim, num_blocks, num_heads, head_size)``; kv_dim is 2, or 1 with MLA;
- three dimensions, MLA only: ``(num_layers, num_blocks, head_size)``, the same as kv_dim 1 and one head.

num_blocks sizes the paged KV that the standalone starter allocates, never a chunk.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import LayoutError, MetadataError, ShapeSpecError
from lmcache_ray.kv_layer_groups import KVLayerGroupInfo, KVLayerGroupsManager
from lmcache_ray.layout import ShardSpec
from lmcache_ray.metadata import MAX_DIM, MAX_LAYERS, LMCacheMetadata
from lmcache_ray.torch_dtypes import from_torch_dtype, to_torch_dtype

KVShape = tuple[int, int, int, int, int]
"""(num_layers, kv_dim, num_blocks, num_heads, head_size)"""

_GROUP: Final = re.compile(r"\(([^()]*)\)\s*:\s*([^:]*?)\s*:\s*([^:]*?)")
_DIGITS: Final = re.compile(r"0*[0-9]{1,19}")
_FORM: Final = "(d0,d1,...):dtype:layer_count"


@dataclass(frozen=True, slots=True)
class LayerGroupSpec:
    """`layer_count` layers of one paged KV shape and dtype. Raises `ShapeSpecError` for what cannot be."""

    layer_count: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        _check_number("LayerGroupSpec.layer_count", self.layer_count, MAX_LAYERS)
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape:
            raise ShapeSpecError("LayerGroupSpec.shape has no dimension")
        for index, dim in enumerate(self.shape):
            _check_number(f"LayerGroupSpec.shape[{index}]", dim, MAX_DIM)
        try:
            from_torch_dtype(self.dtype)
        except LayoutError as error:
            raise ShapeSpecError(f"LayerGroupSpec.dtype: {error}") from None

    @property
    def num_blocks(self) -> int:
        """Blocks of each layer's paged KV. Raises `ShapeSpecError` for a shape without a meaning."""
        return _five_dims("layer group", self)[2]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all layers of the group. Raises `ShapeSpecError` for a shape without a meaning."""
        num_layers, kv_dim, _, num_heads, head_size = _five_dims("layer group", self)
        return num_layers * kv_dim * num_heads * head_size * self.dtype.itemsize


def parse_kvcache_shape_spec(spec_str: str) -> list[LayerGroupSpec]:
    """The groups of ``(d0,...):dtype:layer_count[;...]``, of any number of dimensions.

    Raises `ShapeSpecError` with the number (from 1) and text of the first group that is not well-formed.
    """
    if not isinstance(spec_str, str):
        raise ShapeSpecError(f"a KV shape spec is text like {_FORM}; got {type(spec_str).__name__}")
    return [_parse_group(number, text.strip()) for number, text in enumerate(spec_str.split(";"), 1)]


def format_kvcache_shape_spec(layer_groups: Sequence[LayerGroupSpec]) -> str:
    """The text that `parse_kvcache_shape_spec` reads as `layer_groups`. Raises `ShapeSpecError` when there are none."""
    _require_groups(layer_groups)
    return ";".join(_format_group(group) for group in layer_groups)


def parse_kv_shape(shape_str: str) -> KVShape:
    """The five dimensions of a text like ``32,2,256,32,128``. Raises `ShapeSpecError`."""
    parts = str(shape_str).split(",")
    if len(parts) != 5:
        raise ShapeSpecError(
            f"KV shape {_short(shape_str)} must be five numbers: num_layers,kv_dim,chunk_size,num_heads,head_size"
        )
    where = f"KV shape {_short(shape_str)}"
    num_layers = _parse_number(where, "num_layers", parts[0], MAX_LAYERS)
    kv_dim, rows, heads, head_size = (_parse_number(where, "a dimension", part, MAX_DIM) for part in parts[1:])
    return num_layers, kv_dim, rows, heads, head_size


def calculate_composite_kv_cache_shape(layer_groups: Sequence[LayerGroupSpec]) -> KVShape:
    """One shape for all groups, as LMCache reports it: sum of the layer counts, kv_dim and num_blocks of the first
    group, the largest number of heads and the largest head size. It describes no real tensor: use it for display.

    Raises `ShapeSpecError` without groups, or for one with neither five nor three dimensions.
    """
    _require_groups(layer_groups)
    shapes = [_five_dims(_where(number), group) for number, group in enumerate(layer_groups, 1)]
    num_layers = sum(group.layer_count for group in layer_groups)
    _, kv_dim, num_blocks, _, _ = shapes[0]
    return num_layers, kv_dim, num_blocks, max(shape[3] for shape in shapes), max(shape[4] for shape in shapes)


def get_composite_kv_dtype(layer_groups: Sequence[LayerGroupSpec]) -> torch.dtype:
    """The first group's dtype, as LMCache reports it. Raises `ShapeSpecError` without groups."""
    _require_groups(layer_groups)
    return layer_groups[0].dtype


def shard_specs(layer_groups: Sequence[LayerGroupSpec], *, use_mla: bool) -> tuple[ShardSpec, ...]:
    """What rank 0 holds of each group: layers numbered on from group to group, heads from 0.

    Raises `ShapeSpecError`, with the group's number and text, for what cannot be meant: num_layers that is not the
    layer count, another number of dimensions, kv_dim 1 without MLA, 2 with it, or any other.
    """
    _require_groups(layer_groups)
    specs: list[ShardSpec] = []
    first_layer = 0
    for number, group in enumerate(layer_groups, 1):
        heads, head_size = _rows_of(number, group, use_mla)
        layers = tuple(range(first_layer, first_layer + group.layer_count))
        specs.append(_shard_spec(layers, heads, head_size, group.dtype, use_mla))
        first_layer += group.layer_count
    return tuple(specs)


def shard_specs_of(metadata: LMCacheMetadata) -> tuple[ShardSpec, ...]:
    """What rank 0 holds by the metadata: the manager's groups, or `kv_shape` and `kv_dtype` while it is empty.

    A manager's layers keep their numbers, adjacent or not. Raises `MetadataError` for shapes that cannot be meant.
    """
    groups = metadata.kv_layer_groups_manager.kv_layer_groups
    if groups:
        return tuple(_shard_spec_of(number, group, metadata.use_mla) for number, group in enumerate(groups, 1))
    num_layers, kv_dim, _, num_heads, head_size = metadata.kv_shape
    wrong = _wrong_kv_dim(kv_dim, metadata.use_mla)
    if wrong:
        raise MetadataError(f"LMCacheMetadata.kv_shape = {metadata.kv_shape}: {wrong}")
    layers = tuple(range(num_layers))
    return (_shard_spec(layers, num_heads, head_size, metadata.kv_dtype, metadata.use_mla),)


def layer_groups_manager(
    layer_groups: Sequence[LayerGroupSpec], *, use_mla: bool, block_size: int
) -> KVLayerGroupsManager:
    """The groups as metadata has them: layer i is named ``model.layers.i``, shapes are one layer's paged KV tensor.

    Groups of equal shape and dtype stay apart, unlike in `KVLayerGroupsManager.build_kv_layer_groups`, so that the
    metadata reports as many groups as `shard_specs`. Raises as `shard_specs` does.
    """
    infos: list[KVLayerGroupInfo] = []
    for spec, group in zip(shard_specs(layer_groups, use_mla=use_mla), layer_groups, strict=True):
        if len(group.shape) == 3:
            shape = torch.Size((group.num_blocks, block_size, spec.head_size))
        else:
            shape = torch.Size((spec.kv_size, group.num_blocks, block_size, spec.num_heads, spec.head_size))
        names = [f"model.layers.{layer}" for layer in spec.layers]
        infos.append(KVLayerGroupInfo(names, list(spec.layers), shape, group.dtype))
    return KVLayerGroupsManager(infos)


def _parse_group(number: int, text: str) -> LayerGroupSpec:
    where = f"{_where(number)} {_short(text)}"
    if not text:
        raise ShapeSpecError(f"{where} is empty; accepted: {_FORM}")
    match = _GROUP.fullmatch(text)
    if match is None:
        raise ShapeSpecError(f"{where} is not of the form {_FORM}")
    dims, dtype, layer_count = match.groups()
    shape = tuple(_parse_number(where, "a dimension", dim, MAX_DIM) for dim in dims.split(","))
    return LayerGroupSpec(
        _parse_number(where, "layer_count", layer_count, MAX_LAYERS), shape, _parse_dtype(where, dtype)
    )


def _parse_number(where: str, what: str, text: str, maximum: int) -> int:
    digits = text.strip()
    if not _DIGITS.fullmatch(digits) or not 1 <= int(digits) <= maximum:
        raise ShapeSpecError(f"{where}: {what} {_short(digits)} must be a whole number from 1 to {maximum}")
    return int(digits)


def _parse_dtype(where: str, text: str) -> torch.dtype:
    try:
        return to_torch_dtype(KVDtype(text.lower()))
    except ValueError:
        accepted = ", ".join(dtype.value for dtype in KVDtype)
        raise ShapeSpecError(f"{where}: dtype {_short(text)} is not known; accepted: {accepted}") from None


def _format_group(group: LayerGroupSpec) -> str:
    dims = ",".join(str(dim) for dim in group.shape)
    return f"({dims}):{from_torch_dtype(group.dtype).value}:{group.layer_count}"


def _five_dims(where: str, group: LayerGroupSpec) -> KVShape:
    """The shape with kv_dim and heads spelled out; `where` names the group in the message of a `ShapeSpecError`."""
    if len(group.shape) == 3:
        num_layers, num_blocks, head_size = group.shape
        return num_layers, 1, num_blocks, 1, head_size
    if len(group.shape) != 5:
        raise ShapeSpecError(
            f"{where} {_short(_format_group(group))} has {len(group.shape)} dimensions; accepted: five (num_layers, "
            "kv_dim, num_blocks, num_heads, head_size), or three (num_layers, num_blocks, head_size) with MLA"
        )
    num_layers, kv_dim, num_blocks, num_heads, head_size = group.shape
    return num_layers, kv_dim, num_blocks, num_heads, head_size


def _rows_of(number: int, group: LayerGroupSpec, use_mla: bool) -> tuple[int, int]:
    """Heads and head size of a group that an engine can be built from."""
    num_layers, kv_dim, _, num_heads, head_size = _five_dims(_where(number), group)
    wrong = _wrong_kv_dim(kv_dim, use_mla)
    if num_layers != group.layer_count:
        wrong = f"its first dimension says {num_layers} layers, its layer_count says {group.layer_count}"
    if wrong:
        raise ShapeSpecError(f"{_where(number)} {_short(_format_group(group))}: {wrong}")
    return num_heads, head_size


def _wrong_kv_dim(kv_dim: int, use_mla: bool) -> str | None:
    expected = 1 if use_mla else 2
    if kv_dim == expected:
        return None
    return f"kv_dim {kv_dim} {'with' if use_mla else 'without'} MLA cannot be meant; accepted: {expected}"


def _shard_spec_of(number: int, group: KVLayerGroupInfo, use_mla: bool) -> ShardSpec:
    where = f"layer group {number} {tuple(group.shape)}"
    if len(group.shape) == 5:
        kv_dim, _, _, num_heads, head_size = group.shape
    elif len(group.shape) == 3:
        kv_dim, num_heads, head_size = 1, 1, group.shape[2]
    else:
        raise MetadataError(f"{where} has {len(group.shape)} dimensions; accepted: five, or three with MLA")
    wrong = _wrong_kv_dim(kv_dim, use_mla)
    if wrong:
        raise MetadataError(f"{where}: {wrong}")
    return _shard_spec(tuple(sorted(group.layer_indices)), num_heads, head_size, group.dtype, use_mla)


def _shard_spec(
    layers: tuple[int, ...], num_heads: int, head_size: int, dtype: torch.dtype, use_mla: bool
) -> ShardSpec:
    return ShardSpec(layers, range(num_heads), head_size, from_torch_dtype(dtype), kv_size=1 if use_mla else 2)


def _require_groups(layer_groups: Sequence[LayerGroupSpec]) -> None:
    if not layer_groups:
        raise ShapeSpecError(f"there is no layer group; at least one of the form {_FORM} is needed")


def _check_number(where: str, value: object, maximum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise ShapeSpecError(f"{where} = {value!r} must be a whole number from 1 to {maximum}")


def _where(number: int) -> str:
    return f"KV shape spec, group {number}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
