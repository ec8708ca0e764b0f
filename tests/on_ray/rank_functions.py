"""What tests do inside the ranks' processes, by `CacheCluster.run_on_ranks`: look at paged KV, and SPMD calls."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import ray
import torch

from lmcache_ray.connector.base import KVConnector
from lmcache_ray.errors import LMCacheRayError, StorageError
from lmcache_ray.layout import Placement
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import LayerGroupSpec
from tests.on_ray import kv_bytes
from tests.on_ray.kv_bytes import GroupBytes, fill_odd_bytes

if TYPE_CHECKING:
    from cluster.rank_start import RankContext

POISON = 0x5A
Place = tuple[int, int, int, int]
SpmdResult = tuple[list[bool] | str, float]


def ship_by_value() -> None:
    """Send these functions to the ranks as they are, so that the ranks need not find the tests on their path."""
    for module in (kv_bytes, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)


def place(context: RankContext) -> Place:
    """(world rank, local rank, local world size, world size) as the engine's metadata has them."""
    metadata = context.engine.metadata
    return metadata.worker_id, metadata.local_worker_id, metadata.local_world_size, metadata.world_size


def fill(context: RankContext, seed: int) -> None:
    """Odd bytes in every row: others on each rank, the same on all with MLA."""
    is_shared = context.rank.world.layout.placement is Placement.FIRST_RANK
    rank = 0 if is_shared else context.worker_id
    for layer, tensor in enumerate(context.kv_caches):
        fill_odd_bytes(_raw(tensor).reshape(-1), tensor.itemsize, seed=(seed, rank, layer))


def poison(context: RankContext) -> None:
    """One value in every byte of the paged KV."""
    for tensor in context.kv_caches:
        _raw(tensor)[:] = POISON


def read_rows(context: RankContext, rows: np.ndarray) -> GroupBytes:
    """The bytes of these KV rows, arranged as a shard is."""
    layout = context.rank.layout
    return [
        np.stack([_rows(context.kv_caches[position], group.kv_size)[:, rows] for position in positions], axis=1)
        for group, positions in zip(layout.groups, layout.layer_positions(), strict=True)
    ]


def write_rows(context: RankContext, rows: np.ndarray, shards: Sequence[GroupBytes]) -> None:
    """The other way round: the rows get the bytes of this rank's shard."""
    layout, shard = context.rank.layout, shards[context.rank.world.layout.holder_of(context.worker_id)]
    for group, positions, content in zip(layout.groups, layout.layer_positions(), shard, strict=True):
        for index, position in enumerate(positions):
            _rows(context.kv_caches[position], group.kv_size)[:, rows] = content[:, index]


def touched_rows(context: RankContext) -> list[int]:
    """The rows in which some byte is not the poison."""
    touched = np.zeros(context.rank.connector.num_slots, dtype=bool)
    for tensor in context.kv_caches:
        touched |= (_rows(tensor, tensor.shape[0]) != POISON).any(axis=(0, 2))
    return np.flatnonzero(touched).tolist()


def store(context: RankContext, tokens: Sequence[int], rows: np.ndarray) -> int:
    """SPMD: each rank stores by its own engine."""
    return context.engine.store(tokens, slot_mapping=rows)


def retrieve(context: RankContext, tokens: Sequence[int], rows: np.ndarray) -> list[bool]:
    """SPMD: each rank retrieves by its own engine."""
    return context.engine.retrieve(tokens, slot_mapping=rows).tolist()


def retrieve_or_name(
    context: RankContext, tokens: Sequence[int], rows: Sequence[np.ndarray], delays: Sequence[float] = ()
) -> SpmdResult:
    """As `retrieve` with `rows[rank]`, after a delay; the mask or the name of the error, and the seconds it took."""
    time.sleep(delays[context.worker_id] if delays else 0.0)
    begun = time.monotonic()
    result: list[bool] | str
    try:
        result = context.engine.retrieve(tokens, slot_mapping=rows[context.worker_id]).tolist()
    except LMCacheRayError as error:
        result = type(error).__name__
    return result, time.monotonic() - begun


def lookup(context: RankContext, tokens: Sequence[int]) -> int:
    """The rank's own lookup."""
    return context.engine.lookup(tokens)


def retrieve_own(context: RankContext, prompts: Sequence[Sequence[int]], rows: np.ndarray) -> list[bool]:
    """SPMD gone wrong: rank r asks for ``prompts[r]``."""
    return context.engine.retrieve(prompts[context.worker_id], slot_mapping=rows).tolist()


def ask_remote_store(context: RankContext, times: int) -> int:
    """Ask it something from the rank's process, again and again; how often it answered."""
    tiers = context.rank._tiers
    assert tiers is not None and tiers._remote is not None
    num_answered = 0
    for _ in range(times):
        with suppress(StorageError):
            tiers._remote.backend.exist(["anything"])
            num_answered += 1
    return num_answered


def leave(context: RankContext, status: int) -> None:
    """What a script would do to end its process."""
    sys.exit(status)


class _BrokenConnector:
    """Fails as a device might, not with an error of ours."""

    num_slots = 1 << 20

    def __init__(self, mended: KVConnector) -> None:
        self.mended = mended

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        raise RuntimeError("the device is on fire")

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        raise RuntimeError("the device is on fire")


def break_connector(context: RankContext) -> None:
    """From now on the rank's KV can be neither read nor written."""
    context.rank.connector = _BrokenConnector(context.rank.connector)


def mend_connector(context: RankContext) -> None:
    """Undo `break_connector`."""
    broken = context.rank.connector
    assert isinstance(broken, _BrokenConnector)
    context.rank.connector = broken.mended


def numbered_kv(
    metadata: LMCacheMetadata, layer_groups: Sequence[LayerGroupSpec], num_blocks: int
) -> list[torch.Tensor]:
    """A `kv_source` whose bytes all are 16 times the rank plus the layer; blocks of 8 rows."""
    layers = [(group, index) for group in layer_groups for index in range(group.layer_count)]
    caches = []
    for layer, (group, _) in enumerate(layers):
        _, kv_size, blocks, heads, head_size = group.shape
        assert blocks == num_blocks
        tensor = torch.empty((kv_size, num_blocks, 8, heads, head_size), dtype=group.dtype)
        caches.append(tensor)
        _raw(tensor)[:] = 16 * metadata.worker_id + layer
    return caches


class Idler:
    """An actor that does nothing but keep what it has reserved."""

    def answer(self) -> bool:
        """A sign of life."""
        return True


def _raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def _rows(tensor: torch.Tensor, kv_size: int) -> np.ndarray:
    """uint8 ``[kv_size, num_rows, row_nbytes]``."""
    return _raw(tensor).reshape(kv_size, tensor.shape[1] * tensor.shape[2], -1)
