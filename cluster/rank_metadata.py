"""The metadata of one rank, built from the world's layout and the place that the rank really got."""

import torch

from lmcache_ray.kv_layer_groups import KVLayerGroupInfo, KVLayerGroupsManager
from lmcache_ray.layout import Placement
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import calculate_composite_kv_cache_shape, get_composite_kv_dtype
from lmcache_ray.torch_dtypes import to_torch_dtype

from .kv_source import layer_groups_of
from .topology import RankPlace
from .world import WorldSpec


def rank_metadata(world: WorldSpec, place: RankPlace, num_blocks: int) -> LMCacheMetadata:
    """Ids from `place`, layer groups from the rank's own layout (its layers keep the model's numbers)."""
    layout = world.layout.ranks[place.worker_id]
    groups = [
        KVLayerGroupInfo(
            [f"model.layers.{layer}" for layer in group.layers],
            list(group.layers),
            torch.Size((group.kv_size, num_blocks, world.block_size, group.num_heads, group.head_size)),
            to_torch_dtype(group.dtype),
        )
        for group in layout.groups
    ]
    specs = layer_groups_of(layout, num_blocks)
    return LMCacheMetadata(
        model_name=world.model_name,
        world_size=world.layout.world_size,
        local_world_size=place.local_world_size,
        worker_id=place.worker_id,
        local_worker_id=place.local_worker_id,
        kv_dtype=get_composite_kv_dtype(specs),
        kv_shape=calculate_composite_kv_cache_shape(specs),
        use_mla=world.layout.placement is Placement.FIRST_RANK,
        role="worker",
        chunk_size=layout.chunk_size,
        kv_layer_groups_manager=KVLayerGroupsManager(groups),
    )
