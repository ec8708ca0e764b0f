"""What an in-process world costs in memory, known before any of it is taken, and whether this machine has it."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_ray.arena.capacity import arena_nbytes
from lmcache_ray.arena.memory_limit import free_memory_nbytes
from lmcache_ray.build import num_slots_of
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.errors import CapacityError
from lmcache_ray.layout import WorldLayout
from lmcache_ray.shape_spec import LayerGroupSpec


@dataclass(frozen=True, slots=True)
class WorldSizes:
    """Sizes of a world whose ranks are all alike. An arena is one holder's; only paged KV is every rank's."""

    world_size: int
    num_arenas: int
    num_slots: int
    group_chunk_nbytes: tuple[int, ...]
    """Bytes of one chunk on one rank, per layer group."""
    arena_nbytes: int
    num_blocks: tuple[int, ...]
    """Blocks of each layer's paged KV, per layer group."""
    kv_nbytes: int
    """Bytes of one rank's paged KV."""

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk on one rank."""
        return sum(self.group_chunk_nbytes)

    @property
    def total_arena_nbytes(self) -> int:
        """Bytes of all arenas."""
        return self.num_arenas * self.arena_nbytes

    @property
    def total_kv_nbytes(self) -> int:
        """Bytes of all ranks' paged KV."""
        return self.world_size * self.kv_nbytes


def world_sizes(
    config: LMCacheEngineConfig, layout: WorldLayout, layer_groups: Sequence[LayerGroupSpec]
) -> WorldSizes:
    """The sizes of the world that `layer_groups`, which `layout` was made from, describe.

    Raises `CapacityError` if one chunk is larger than an arena.
    """
    rank = layout.ranks[0]
    num_slots = num_slots_of(config, layout)
    return WorldSizes(
        world_size=layout.world_size,
        num_arenas=len(layout.holders),
        num_slots=num_slots,
        group_chunk_nbytes=tuple(group.token_nbytes * layout.chunk_size for group in rank.groups),
        arena_nbytes=arena_nbytes(num_slots, rank.slot_nbytes),
        num_blocks=tuple(group.num_blocks for group in layer_groups),
        kv_nbytes=sum(group.num_blocks * config.block_size * group.token_nbytes for group in layer_groups),
    )


def check_kv_fits(sizes: WorldSizes) -> None:
    """Refuse paged KV that, beside full arenas, is larger than the memory left now: else the system kills for it.

    Raises `CapacityError` with all sizes.
    """
    available = free_memory_nbytes()
    if available is not None and sizes.total_kv_nbytes + sizes.total_arena_nbytes > available:
        raise CapacityError(
            f"the paged KV does not fit: it needs {sizes.total_kv_nbytes} bytes ({sizes.kv_nbytes} for each of "
            f"{sizes.world_size} ranks) beside {sizes.total_arena_nbytes} bytes of arenas, {available} bytes of memory "
            "are left; lower num_blocks, the third dimension of a layer group's shape, or the arenas' size"
        )
