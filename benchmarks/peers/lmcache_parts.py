"""LMCache set up to run on the CPU: an engine of one rank, and a connector for paged KV in CPU memory.

LMCache's own connectors for the CPU are one that moves nothing, which serves where bookkeeping alone is timed, and a
torch routine that its accelerators fall back to. `TorchConnector` makes the copies of that routine without its detours,
at twice its speed. Made for LMCache 0.5.6 in an environment of its own, see benchmarks/README.md.
"""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # both are read when LMCache is imported
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"  # else every call formats and prints a line

import torch
from lmcache.v1.cache_engine import (  # type: ignore[import-not-found]
    LMCacheEngine,
    LMCacheEngineBuilder,
)
from lmcache.v1.config import LMCacheEngineConfig  # type: ignore[import-not-found]
from lmcache.v1.gpu_connector.gpu_connectors import (  # type: ignore[import-not-found]
    GPUConnectorInterface,
)
from lmcache.v1.gpu_connector.mock_gpu_connector import (  # type: ignore[import-not-found]
    MockGPUConnector,
)
from lmcache.v1.lookup_client.factory import (  # type: ignore[import-not-found]
    LookupClientFactory,
)
from lmcache.v1.memory_management import MemoryObj  # type: ignore[import-not-found]
from lmcache.v1.metadata import LMCacheMetadata  # type: ignore[import-not-found]

from benchmarks.workload import CHUNK_SIZE, MODEL_NAME, KVShape

_GIB = 2**30

CopyRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | slice], None]
"""``copy(plane, part, rows)`` between one layer's keys or values ``[num_rows, length]`` and their part of a chunk."""


class Closable(Protocol):
    """What has threads or sockets of LMCache's."""

    def close(self) -> None: ...


class TorchConnector(GPUConnectorInterface):  # type: ignore[misc]  # its base has no types
    """Copies by torch, for each chunk, layer, and keys or values: slices if the rows are consecutive, else by index."""

    def __init__(self, shape: KVShape) -> None:
        self._row_length = shape.num_heads * shape.head_size

    def batched_from_gpu(
        self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **call: object
    ) -> None:
        self._copy_all(_gather, memory_objs, starts, ends, call)

    def batched_to_gpu(
        self, memory_objs: Sequence[MemoryObj], starts: Sequence[int], ends: Sequence[int], **call: object
    ) -> None:
        self._copy_all(_scatter, memory_objs, starts, ends, call)

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, **call: object) -> None:
        self.batched_from_gpu([memory_obj], [start], [end], **call)

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, **call: object) -> None:
        self.batched_to_gpu([memory_obj], [start], [end], **call)

    def get_shape(self, num_tokens: int) -> torch.Size:
        raise ValueError("get_shape: only LMCache's layerwise mode asks for it, which is not used here")

    def _copy_all(
        self,
        copy: CopyRows,
        memory_objs: Sequence[MemoryObj],
        starts: Sequence[int],
        ends: Sequence[int],
        call: dict[str, object],
    ) -> None:
        kvcaches, slot_mapping = call["kvcaches"], call["slot_mapping"]
        assert isinstance(kvcaches, list) and isinstance(slot_mapping, torch.Tensor)
        planes = [plane for cache in kvcaches for plane in cache.view(2, -1, self._row_length).unbind()]
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            rows = _as_run(slot_mapping[start:end])
            chunk = memory_obj.tensor  # once: it is a property that takes time
            parts = [part for layer in chunk.unbind(1) for part in layer.unbind()]
            for plane, part in zip(planes, parts, strict=True):
                copy(plane, part, rows)


def _as_run(rows: torch.Tensor) -> torch.Tensor | slice:
    """The slice that equals `rows` if they are consecutive."""
    first = int(rows[0])
    return slice(first, first + len(rows)) if bool((rows.diff() == 1).all()) else rows


def _gather(plane: torch.Tensor, part: torch.Tensor, rows: torch.Tensor | slice) -> None:
    if isinstance(rows, slice):
        part.copy_(plane[rows])
    else:
        torch.index_select(plane, 0, rows, out=part)


def _scatter(plane: torch.Tensor, part: torch.Tensor, rows: torch.Tensor | slice) -> None:
    if isinstance(rows, slice):
        plane[rows].copy_(part)
    else:
        plane.index_copy_(0, rows, part)


def build_engine(
    name: str,
    shape: KVShape,
    *,
    pool_nbytes: int,
    moves_bytes: bool = True,
    world_size: int = 1,
    worker_id: int = 0,
) -> LMCacheEngine:
    """LMCache's engine of one rank, with a pool in CPU memory; `name` tells the engines of a process apart."""
    metadata = metadata_of(name, shape, world_size=world_size, worker_id=worker_id)
    connector = TorchConnector(shape) if moves_bytes else MockGPUConnector(metadata.kv_shape)
    engine = LMCacheEngineBuilder.get_or_create(
        name, config_of(name, pool_nbytes), metadata, connector, _refuse_broadcast, _refuse_broadcast
    )
    engine.post_init()
    return engine


def close_engine(name: str) -> None:
    """Without it LMCache's threads keep the process alive."""
    LMCacheEngineBuilder.destroy(name)


def config_of(name: str, pool_nbytes: int) -> LMCacheEngineConfig:
    """LMCache's defaults but for the pool's size."""
    return LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_SIZE, max_local_cpu_size=pool_nbytes / _GIB, lmcache_instance_id=name
    )


def metadata_of(name: str, shape: KVShape, *, world_size: int, worker_id: int) -> LMCacheMetadata:
    """What LMCache knows of one rank; `name` is also the engine id by which lookup clients find their servers."""
    return LMCacheMetadata(
        model_name=MODEL_NAME,
        world_size=world_size,
        local_world_size=world_size,
        worker_id=worker_id,
        local_worker_id=worker_id,
        kv_dtype=torch.bfloat16,
        kv_shape=(shape.num_layers, 2, CHUNK_SIZE, shape.num_heads, shape.head_size),
        chunk_size=CHUNK_SIZE,
        engine_id=name,
    )


class LookupService:
    """LMCache's lookup client for the ranks of one world, whose servers are found by the world's name."""

    def __init__(self, name: str, shape: KVShape, *, world_size: int) -> None:
        metadata = metadata_of(name, shape, world_size=world_size, worker_id=0)
        self._client = LookupClientFactory.create_lookup_client(config_of(name, _GIB), metadata)

    @staticmethod
    def serve(engine: LMCacheEngine, name: str, shape: KVShape, *, world_size: int, worker_id: int) -> Closable:
        """Start to answer for one rank, in a thread of this process, until it is closed."""
        metadata = metadata_of(name, shape, world_size=world_size, worker_id=worker_id)
        server: Closable = LookupClientFactory.create_lookup_server(engine, metadata)
        return server

    def lookup(self, tokens: list[int] | torch.Tensor) -> int:
        """Tokens cached on every rank."""
        found: int = self._client.lookup(tokens, lookup_id="prompt")
        return found

    def close(self) -> None:
        self._client.close()


def _refuse_broadcast(*arguments: object) -> object:
    raise ValueError("ranks with keys and values of their own broadcast nothing")
