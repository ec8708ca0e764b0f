"""The composition root: turns configuration and metadata into engines. The only reader of the whole configuration.

`build_engine` makes one rank with an index of its own, `build_world` all ranks of a world in this process around one
shared index. Ranks that live in Ray actors are put together in the cluster package from the same parts.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from lmcache_ray.arena.capacity import num_slots_for
from lmcache_ray.arena.spec import ArenaGeometry, ArenaSpec
from lmcache_ray.broadcast.callables import BroadcastFn, BroadcastObjectFn, CallableBroadcaster
from lmcache_ray.broadcast.inprocess import InProcessGroup
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.connector.base import KVConnector
from lmcache_ray.engine import EngineParts, LMCacheEngine
from lmcache_ray.errors import ConfigError
from lmcache_ray.first_rank import FIRST_RANK, ArenaChannel, FirstRankChannel, TensorChannel
from lmcache_ray.in_process_world import InProcessWorld, WorldSettings
from lmcache_ray.keys import ChunkHasher
from lmcache_ray.layout import Placement, WorldLayout, uniform_world
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import (
    LayerGroupSpec,
    calculate_composite_kv_cache_shape,
    get_composite_kv_dtype,
    layer_groups_manager,
    shard_specs,
    shard_specs_of,
)
from lmcache_ray.tiers.spec import TierSpec, tier_spec

logger = logging.getLogger(__name__)

_GIB = 2**30


def build_engine(
    config: LMCacheEngineConfig,
    metadata: LMCacheMetadata,
    *,
    layer_groups: Sequence[LayerGroupSpec] | None = None,
    connector: KVConnector | None = None,
    broadcast_fn: BroadcastFn | None = None,
    broadcast_object_fn: BroadcastObjectFn | None = None,
) -> LMCacheEngine:
    """The engine of rank ``metadata.worker_id``, with an index and an arena that are its own.

    `config.chunk_size` wins over the metadata's, and `layer_groups` (of one rank) over its `kv_shape`. In an MLA world
    of several ranks the other ranks get their KV from rank 0 by the two broadcast functions (LMCache's), which every
    rank then needs. Only rank 0's index knows what is cached there: on the others `lookup` and `loadable` answer 0
    although `retrieve` delivers, so ask rank 0. Raises `ConfigError`, `ShapeSpecError`, `MetadataError` or
    `CapacityError`.
    """
    metadata, layout = resolve(config, metadata, layer_groups)
    rank = metadata.worker_id
    own = (rank,) if layout.placement is Placement.PER_RANK or rank == FIRST_RANK else ()
    broadcaster = _callable_broadcaster(metadata, layout, broadcast_fn, broadcast_object_fn)
    tiers = tiers_of_config(config)
    if tiers.disk is not None and layout.world_size > 1:  # whoever builds ranks one by one has one index for each
        tiers = replace(tiers, disk=replace(tiers.disk, root=f"{tiers.disk.root}/engine-{rank}"))
    world = InProcessWorld(_settings(config, layout, metadata.model_name, tiers), layout, holders=own)
    channel: FirstRankChannel | None = None
    if broadcaster is not None:
        slots = world.shards[rank].slots if rank == FIRST_RANK else None
        release = world.index_client(rank).release
        channel = TensorChannel(broadcaster, slots, layout.ranks[rank].slot_nbytes, release=release)
    return LMCacheEngine(world.parts(metadata, channel, connector))


def build_world(
    config: LMCacheEngineConfig,
    metadata: LMCacheMetadata,
    *,
    layer_groups: Sequence[LayerGroupSpec] | None = None,
) -> list[LMCacheEngine]:
    """One engine for each of ``metadata.world_size`` ranks, around one index and one in-process broadcaster.

    Every rank's engine is meant to be called from a thread of its own: in an MLA world `retrieve` meets the others.
    Raises as `build_engine` does.
    """
    return [LMCacheEngine(parts) for parts in world_parts(config, metadata, layer_groups=layer_groups)]


def world_parts(
    config: LMCacheEngineConfig,
    metadata: LMCacheMetadata,
    *,
    layer_groups: Sequence[LayerGroupSpec] | None = None,
) -> list[EngineParts]:
    """What the engines of `build_world` are made of, in rank order."""
    metadata, layout = resolve(config, metadata, layer_groups)
    settings = _settings(config, layout, metadata.model_name, tiers_of_config(config))
    world = InProcessWorld(settings, layout, holders=layout.holders)
    group = InProcessGroup(layout.world_size, config.call_timeout_s)
    parts = []
    for rank in range(layout.world_size):
        channel: FirstRankChannel | None = None
        if layout.has_receivers:
            channel = ArenaChannel(group.broadcaster(rank), world.shards[FIRST_RANK].slots)
        own = replace(metadata, worker_id=rank, local_worker_id=rank, local_world_size=layout.world_size)
        parts.append(world.parts(own, channel, leave=partial(group.rank_lost, rank)))
    return parts


def resolve(
    config: LMCacheEngineConfig, metadata: LMCacheMetadata, layer_groups: Sequence[LayerGroupSpec] | None
) -> tuple[LMCacheMetadata, WorldLayout]:
    """The metadata with the effective chunk size and layer groups, and the layout of all ranks that follows."""
    metadata = replace(metadata, chunk_size=config.chunk_size)
    if layer_groups is not None:
        _warn_if_overridden(metadata, layer_groups)
        groups = shard_specs(layer_groups, use_mla=metadata.use_mla)
        manager = layer_groups_manager(layer_groups, use_mla=metadata.use_mla, block_size=config.block_size)
        metadata = replace(metadata, kv_layer_groups_manager=manager)
    else:
        groups = shard_specs_of(metadata)
    layout = uniform_world(
        groups, chunk_size=config.chunk_size, world_size=metadata.world_size, placement=metadata.placement
    )
    return metadata, layout


def num_slots_of(config: LMCacheEngineConfig, layout: WorldLayout) -> int:
    """Slots of every arena: the smallest number over the ranks that hold chunks.

    Raises `CapacityError` if one chunk is larger than a whole arena.
    """
    if config.capacity_chunks is not None:
        return config.capacity_chunks
    budget = int(config.max_local_cpu_size * _GIB)
    return min(num_slots_for(budget, layout.ranks[rank].slot_nbytes) for rank in layout.holders)


def arena_spec(layout: WorldLayout, rank: int, *, num_slots: int, namespace: str, name: str) -> ArenaSpec:
    """What the arena of `rank` is."""
    geometry = ArenaGeometry(num_slots, layout.ranks[rank].slot_nbytes)
    return ArenaSpec(namespace, name, rank, layout.world_size, layout.fingerprint, geometry)


def _settings(config: LMCacheEngineConfig, layout: WorldLayout, model_name: str, tiers: TierSpec) -> WorldSettings:
    return WorldSettings(
        num_slots=num_slots_of(config, layout),
        cache_policy=config.cache_policy,
        tiers=tiers,
        hasher=hasher_of(config, model_name),
        min_retrieve_tokens=config.min_retrieve_tokens,
        instance_id=config.lmcache_instance_id,
        call_timeout_s=config.call_timeout_s,
        lease_timeout_s=config.lease_timeout_s,
    )


def tiers_of_config(config: LMCacheEngineConfig) -> TierSpec:
    """The tiers of a world. Raises `ConfigError` for keys that contradict each other."""
    return tier_spec(
        local_cpu=config.local_cpu,
        local_disk=config.local_disk,
        max_local_disk_size=config.max_local_disk_size,
        remote_url=config.remote_url,
        remote_prefix=config.remote_prefix,
        remote_serde=config.remote_serde,
        blocking_timeout_secs=config.blocking_timeout_secs,
        max_remote_size=config.max_remote_size,
    )


def lossy_serde(config: LMCacheEngineConfig) -> str | None:
    """What rounds the KV of this world: its chunks are others than exact ones, wherever they lie."""
    return config.remote_serde if config.remote_url is not None and config.remote_serde == "fp8" else None


def hasher_of(config: LMCacheEngineConfig, model_name: str) -> ChunkHasher:
    """The keys of one model under this configuration."""
    return ChunkHasher(
        model_name,
        model_revision=config.model_revision,
        chunk_size=config.chunk_size,
        keep_partial=config.save_unfull_chunk,
        lossy=lossy_serde(config),
    )


def _callable_broadcaster(
    metadata: LMCacheMetadata,
    layout: WorldLayout,
    broadcast_fn: BroadcastFn | None,
    broadcast_object_fn: BroadcastObjectFn | None,
) -> CallableBroadcaster | None:
    """The user's two functions as a broadcaster; None where ranks have nothing to tell each other."""
    if (broadcast_fn is None) != (broadcast_object_fn is None):
        raise ConfigError("broadcast_fn and broadcast_object_fn go together: give both or neither")
    if not layout.has_receivers:
        return None
    if broadcast_fn is None or broadcast_object_fn is None:
        raise ConfigError(
            f"rank {metadata.worker_id} of an MLA world of {layout.world_size} ranks, built alone, needs broadcast_fn "
            "and broadcast_object_fn: rank 0's KV reaches the others by them (or build the whole world: build_world)"
        )
    return CallableBroadcaster(metadata.worker_id, layout.world_size, broadcast_fn, broadcast_object_fn)


def _warn_if_overridden(metadata: LMCacheMetadata, layer_groups: Sequence[LayerGroupSpec]) -> None:
    """Layer groups win over `kv_shape` and `kv_dtype`; say so when the two disagree."""
    shape, dtype = calculate_composite_kv_cache_shape(layer_groups), get_composite_kv_dtype(layer_groups)
    legacy = metadata.kv_shape
    # The third value of either shape sizes nothing (blocks in one, a chunk in the other): it cannot disagree.
    if (legacy[0:2], legacy[3:5], metadata.kv_dtype) != (shape[0:2], shape[3:5], dtype):
        logger.warning(
            "layer groups %s of %s are used; the metadata's kv_shape %s of %s disagrees and is ignored",
            shape,
            dtype,
            tuple(legacy),
            metadata.kv_dtype,
        )
