"""The text that tells a user what is about to run."""

from collections.abc import Iterator

from lmcache_ray.build import tiers_of_config
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.layout import Placement, ShardSpec, WorldLayout
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.standalone.sizes import WorldSizes
from lmcache_ray.storage.disk_space import disk_capacity

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def describe_world(
    config: LMCacheEngineConfig, metadata: LMCacheMetadata, layout: WorldLayout, sizes: WorldSizes
) -> str:
    """Model, ranks, what a chunk, the arenas and the paged KV take, and every configuration key that was set."""
    world = _world_lines(config, metadata, layout)
    return "\n".join([*world, *_size_lines(config, layout, sizes), *_config_lines(config)])


def readable_nbytes(nbytes: int) -> str:
    """``134217728 bytes (128 MiB)``: exact, and readable where it is long."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{nbytes} bytes ({size:.4g} {_UNITS[unit]})" if unit else f"{nbytes} bytes"


def _world_lines(config: LMCacheEngineConfig, metadata: LMCacheMetadata, layout: WorldLayout) -> Iterator[str]:
    named = f", instance {config.lmcache_instance_id}" if config.lmcache_instance_id else ""
    yield f"model {metadata.model_name}{named}"
    ranks = f"{layout.world_size} ranks, all in this process" if layout.world_size > 1 else "1 rank, in this process"
    holders = "; MLA: rank 0 holds the one copy" if layout.placement is Placement.FIRST_RANK else ""
    yield f"world of {ranks}; the engine is rank {metadata.worker_id}{holders}"


def _size_lines(config: LMCacheEngineConfig, layout: WorldLayout, sizes: WorldSizes) -> Iterator[str]:
    yield f"chunk of {layout.chunk_size} tokens: {readable_nbytes(sizes.chunk_nbytes)} per rank"
    groups = zip(layout.ranks[0].groups, sizes.group_chunk_nbytes, sizes.num_blocks, strict=True)
    for number, (group, nbytes, blocks) in enumerate(groups, 1):
        yield f"  group {number}: {_shape(group)}, {blocks} blocks: {readable_nbytes(nbytes)} per chunk and rank"
    holder = "rank" if layout.placement is Placement.PER_RANK else "world"
    yield (
        f"arena in own memory: {sizes.num_slots} chunks, {readable_nbytes(sizes.arena_nbytes)} per {holder}, "
        f"{readable_nbytes(sizes.total_arena_nbytes)} in total"
    )
    disk = tiers_of_config(config).disk
    if disk is not None:
        num_chunks = min(disk_capacity(disk.max_nbytes, layout, rank) for rank in layout.holders)
        yield (
            f"disk below {disk.root}: {num_chunks} chunks, {readable_nbytes(disk.max_nbytes)} per {holder}, "
            f"{readable_nbytes(disk.max_nbytes * len(layout.holders))} in total"
        )
    yield (
        f"paged KV in blocks of {config.block_size} tokens: {readable_nbytes(sizes.kv_nbytes)} per rank, "
        f"{readable_nbytes(sizes.total_kv_nbytes)} in total"
    )


def _shape(group: ShardSpec) -> str:
    planes = "keys and values" if group.kv_size == 2 else "one plane"
    return f"{group.num_layers} layers of {planes}, {group.num_heads} heads of {group.head_size}, {group.dtype.value}"


def _config_lines(config: LMCacheEngineConfig) -> Iterator[str]:
    chosen = [entry for entry in config.entries() if entry.origin != "default"]
    yield "configuration, other keys at their defaults:" if chosen else "configuration: every key at its default"
    for entry in chosen:
        yield f"  {entry.key} = {entry.value} ({entry.origin})"
