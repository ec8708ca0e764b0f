"""From the arguments of `CacheCluster.start` to the world that all its processes agree on."""

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lmcache_ray.build import lossy_serde, num_slots_of, resolve, tiers_of_config
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.errors import ConfigError
from lmcache_ray.layout import Placement, RankLayout, ShardSpec, WorldLayout
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import LayerGroupSpec, calculate_composite_kv_cache_shape, get_composite_kv_dtype
from lmcache_ray.tiers.assembly import check_disk_limit

from .kv_source import KVSpec
from .topology import MAX_WORLD_SIZE
from .world import WorldSpec

if TYPE_CHECKING:
    from .kv_source import KVSource

_DEFAULT_NUM_BLOCKS = 256


def world_spec(
    config: LMCacheEngineConfig,
    *,
    model_name: str,
    layer_groups: Sequence[LayerGroupSpec] | None,
    kv_shape: Sequence[int] | None,
    kv_dtype: torch.dtype | None,
    rank_layouts: Sequence[Sequence[ShardSpec]] | None,
    world_size: int,
    use_mla: bool,
    name: str | None,
    namespace: str | None,
) -> WorldSpec:
    """The world, in a life of its own.

    Raises `ConfigError`, `MetadataError`, `ShapeSpecError`, `LayoutError` or `CapacityError` for arguments that cannot
    be meant.
    """
    if type(world_size) is not int or not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ConfigError(f"world_size must be a whole number from 1 to {MAX_WORLD_SIZE}; got {world_size!r}")
    if rank_layouts is not None:
        layout = _given_layout(config, rank_layouts, world_size, use_mla)
    else:
        layout = _uniform_layout(config, model_name, layer_groups, kv_shape, kv_dtype, world_size, use_mla)
    tiers = tiers_of_config(config)
    check_disk_limit(tiers, layout)
    named = config.copy()
    if name is not None:
        named.update({"cluster_name": name})
    if namespace is not None:
        named.update({"cluster_namespace": namespace})
    return WorldSpec(
        namespace=named.cluster_namespace,
        name=named.cluster_name,
        model_name=model_name,
        model_revision=config.model_revision,
        layout=layout,
        num_slots=num_slots_of(config, layout),
        save_unfull_chunk=config.save_unfull_chunk,
        min_retrieve_tokens=config.min_retrieve_tokens,
        block_size=config.block_size,
        cache_policy=config.cache_policy,
        arena_dir=config.arena_dir,
        lease_timeout_s=config.lease_timeout_s,
        lookup_timeout_s=config.lookup_timeout_ms / 1000,
        call_timeout_s=config.call_timeout_s,
        restart_window_s=config.restart_window_s,
        tiers=tiers,
        life=uuid.uuid4().hex,
        lossy_serde=lossy_serde(config),
    )


def kv_spec(
    config: LMCacheEngineConfig,
    layer_groups: Sequence[LayerGroupSpec] | None,
    kv_source: "str | KVSource | None",
    num_blocks: int | None,
) -> KVSpec:
    """The ranks' paged KV: `num_blocks` as given, else that of the first layer group, else 256.

    Raises `ConfigError` or `ShapeSpecError`.
    """
    if num_blocks is None:
        num_blocks = layer_groups[0].num_blocks if layer_groups else _DEFAULT_NUM_BLOCKS
    if type(num_blocks) is not int or num_blocks < 1:
        raise ConfigError(f"num_blocks must be a whole number, at least 1; got {num_blocks!r}")
    return KVSpec(kv_source, num_blocks, config.block_size)


def _given_layout(
    config: LMCacheEngineConfig, rank_layouts: Sequence[Sequence[ShardSpec]], world_size: int, use_mla: bool
) -> WorldLayout:
    if len(rank_layouts) != world_size:
        raise ConfigError(f"rank_layouts describes {len(rank_layouts)} ranks; world_size is {world_size}")
    placement = Placement.FIRST_RANK if use_mla else Placement.PER_RANK
    return WorldLayout(tuple(RankLayout(config.chunk_size, tuple(specs)) for specs in rank_layouts), placement)


def _uniform_layout(
    config: LMCacheEngineConfig,
    model_name: str,
    layer_groups: Sequence[LayerGroupSpec] | None,
    kv_shape: Sequence[int] | None,
    kv_dtype: torch.dtype | None,
    world_size: int,
    use_mla: bool,
) -> WorldLayout:
    if (kv_shape is None) != (kv_dtype is None):
        raise ConfigError("kv_shape and kv_dtype describe the KV together: give both or neither")
    if kv_shape is None and layer_groups is None:
        raise ConfigError("the KV is not described: give layer_groups, kv_shape with kv_dtype, or rank_layouts")
    if layer_groups is not None:
        kv_shape = calculate_composite_kv_cache_shape(layer_groups) if kv_shape is None else kv_shape
        kv_dtype = get_composite_kv_dtype(layer_groups) if kv_dtype is None else kv_dtype
    metadata = LMCacheMetadata(
        model_name=model_name,
        world_size=world_size,
        worker_id=0,
        kv_dtype=kv_dtype,
        kv_shape=kv_shape,
        use_mla=use_mla,
    )
    return resolve(config, metadata, layer_groups)[1]
