"""This project's engine of one rank as the benchmarks need it, and the two connectors that stand beside its own."""

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.workload import BLOCK_SIZE, CHUNK_SIZE, MODEL_NAME, KVShape
from lmcache_ray import LMCacheEngineConfig, LMCacheMetadata
from lmcache_ray.build import build_engine, resolve
from lmcache_ray.connector.base import KVConnector
from lmcache_ray.connector.planes import PlaneConnector, planes_of_group, row_type
from lmcache_ray.connector.row_copy import NumPyRowCopy
from lmcache_ray.engine import LMCacheEngine


class NoCopyConnector:
    """A `KVConnector` that moves nothing: what a call takes with it is all but the copying."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    @property
    def num_slots(self) -> int:
        """Rows that a slot mapping may name."""
        return self._num_slots

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        """Leave the shard as it is."""

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        """Leave the KV memory as it is."""


def numpy_connector(shape: KVShape, kvcaches: Sequence[torch.Tensor]) -> PlaneConnector:
    """The connector of an installation that has no compiled copies."""
    _, layout = resolve(_config(capacity_tokens=CHUNK_SIZE), _metadata(shape), None)
    (rank,) = layout.ranks
    row = row_type(rank.groups[0].row_nbytes)
    raw = [cache.view(torch.uint8).numpy().reshape(2, -1).view(row) for cache in kvcaches]
    planes = planes_of_group(rank, 0, [[layer[kv] for layer in raw] for kv in range(2)])
    return PlaneConnector(planes, copies=NumPyRowCopy)


def engine_of(shape: KVShape, *, capacity_tokens: int, connector: KVConnector | None = None) -> LMCacheEngine:
    """An engine with room for so many tokens. Calls that name no `kvcaches` use `connector`."""
    return build_engine(_config(capacity_tokens), _metadata(shape), connector=connector)


def _config(capacity_tokens: int) -> LMCacheEngineConfig:
    return LMCacheEngineConfig(
        chunk_size=CHUNK_SIZE, block_size=BLOCK_SIZE, capacity_chunks=-(-capacity_tokens // CHUNK_SIZE)
    )


def _metadata(shape: KVShape) -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name=MODEL_NAME,
        world_size=1,
        worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(shape.num_layers, 2, CHUNK_SIZE, shape.num_heads, shape.head_size),
    )
