"""Layouts, slots and keys for tests of stored chunks."""

import hashlib

import numpy as np

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.layout import Placement, ShardSpec, WorldLayout, uniform_world
from lmcache_ray.storage.disk_names import StoredChunk

CHUNK_SIZE = 16


def layout_of(
    *,
    world_size: int = 2,
    dtype: KVDtype = KVDtype.BFLOAT16,
    placement: Placement = Placement.PER_RANK,
    layers: int = 2,
) -> WorldLayout:
    """Two layer groups of a small model: 4 KiB and 1 KiB a slot with two layers and 16-bit KV."""
    wide = ShardSpec(tuple(range(layers)), range(0, 2), 16, dtype)
    narrow = ShardSpec((layers,), range(0, 1), 32, KVDtype.UINT8, kv_size=2)
    return uniform_world((wide, narrow), chunk_size=CHUNK_SIZE, world_size=world_size, placement=placement)


def chunk_of(number: int, generation: int | None = None) -> StoredChunk:
    """A chunk for each number; its generation is the number unless given."""
    key = hashlib.sha256(b"chunk %d" % number).digest()
    return StoredChunk(key, number if generation is None else generation)


def slot_of(number: int, layout: WorldLayout, rank: int = 0) -> np.ndarray:
    """Bytes that tell the number."""
    return np.random.default_rng(number).integers(0, 256, layout.ranks[rank].slot_nbytes, dtype=np.uint8)


def empty_slot(layout: WorldLayout, rank: int = 0) -> np.ndarray:
    """A slot to read into."""
    return np.zeros(layout.ranks[rank].slot_nbytes, dtype=np.uint8)
