"""Where a rank's paged KV comes from: the project's own fixed pattern, or a function that the user names."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from lmcache_ray.connector.paged import PagedConnector
from lmcache_ray.errors import ConfigError
from lmcache_ray.kv_pattern import allocate_kv_caches, fill_fixed_pattern
from lmcache_ray.layout import RankLayout
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import LayerGroupSpec
from lmcache_ray.torch_dtypes import to_torch_dtype

KVSource = Callable[[LMCacheMetadata, Sequence[LayerGroupSpec], int], Sequence[torch.Tensor]]
"""``kv_source(metadata, layer_groups, num_blocks)`` -> one tensor per layer, in ascending layer number."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """How a rank gets its paged KV: `source` is a function or names one ("module:function"), None the fixed pattern."""

    source: str | KVSource | None
    num_blocks: int
    block_size: int


def layer_groups_of(layout: RankLayout, num_blocks: int) -> list[LayerGroupSpec]:
    """A rank's groups as shape-spec values: ``(num_layers, kv_size, num_blocks, heads, head_size)``."""
    return [
        LayerGroupSpec(
            group.num_layers,
            (group.num_layers, group.kv_size, num_blocks, group.num_heads, group.head_size),
            to_torch_dtype(group.dtype),
        )
        for group in layout.groups
    ]


def make_kv_caches(spec: KVSpec, metadata: LMCacheMetadata, layout: RankLayout) -> list[torch.Tensor]:
    """The rank's paged KV. Raises `ConfigError` if there is no such function, `LayoutError` if its KV does not fit."""
    if spec.source is None:
        caches = allocate_kv_caches(
            layout, num_blocks=[spec.num_blocks] * len(layout.groups), block_size=spec.block_size
        )
        fill_fixed_pattern(layout, caches)
        return caches
    source = spec.source
    if isinstance(source, str):
        source = cast(KVSource, resolve_function(source, what="kv_source"))
    caches = list(source(metadata, layer_groups_of(layout, spec.num_blocks), spec.num_blocks))
    PagedConnector(layout, caches)  # refuses what does not fit the layout
    return caches


def resolve_function(path: str, *, what: str) -> Callable[..., object]:
    """The function named "module:function". Raises `ConfigError` that says which half is wrong."""
    module_name, separator, function_name = path.partition(":")
    if not separator or not module_name or not function_name:
        raise ConfigError(f'{what} {path!r} must name a function as "module:function"')
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{what} {path!r}: module {module_name!r} cannot be imported: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{what} {path!r}: module {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]  # checked to be callable
