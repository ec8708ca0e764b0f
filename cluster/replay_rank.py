"""The rank's half of a replay: computes each window's KV, loads, stores and verifies. Runs inside the rank's process.

"Computing" a chunk means writing its expected bytes into the rank's paged KV rows. With `verify` the rows to be
loaded are poisoned first, so that a copy that never happened shows as well as a wrong one.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.layout import Placement
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import LayerGroupSpec
from lmcache_ray.shard import NO_SOURCE, ChunkSource, PayloadSource, read_chunks

from .expected_bytes import count_mismatches, expected_chunks
from .messages import PackedRefs, Payload, pack_flags, unpack_flags
from .rank import Rank
from .rank_start import RankContext

POISON: Final = 0xA5
_ChunkRows = list[np.ndarray]
_KV_ROWS: Final = threading.Lock()
"""Held for a window: the windows of all drivers that replay on this process's one rank use the same KV rows."""


@dataclass(frozen=True, slots=True)
class ReplayWindow:
    """What one rank does for the requests of a window: first all loads, then all stores.

    `load_counts[i]` and `store_counts[i]` chunks belong to request i; the `*_rows` (packed numbers) are the first KV
    row of each chunk. `arena_path` is where the chunks to load lie, None for the rank's own arena.
    """

    loads: PackedRefs
    load_rows: bytes
    load_counts: tuple[int, ...]
    stores: PackedRefs
    store_rows: bytes
    store_counts: tuple[int, ...]
    verify: bool
    arena_path: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Flag bytes per chunk; what was compared; seconds spent in the copies of each request."""

    loaded: bytes
    stored: bytes
    verified_bytes: int
    byte_mismatches: int
    load_s: tuple[float, ...]
    store_s: tuple[float, ...]


def run_window(context: RankContext, window: ReplayWindow, payload: Payload | None = None) -> ReplayResult:
    """Carry a window out. `payload` has the chunks to load where their arena is on another node."""
    rank = context.rank
    replay = _RankReplay(rank, window.verify)
    loads, load_rows = window.loads.unpack(), replay.rows_of(window.load_rows)
    stores, store_rows = window.stores.unpack(), replay.rows_of(window.store_rows)
    with _KV_ROWS:
        for part in _parts(window.load_counts):
            replay.load(_source(rank, window, payload, part), loads[part], load_rows[part])
        for part in _parts(window.store_counts):
            replay.store(stores[part], store_rows[part])
    return replay.result()


def zeroed_kv(
    metadata: LMCacheMetadata, layer_groups: Sequence[LayerGroupSpec], num_blocks: int
) -> list[torch.Tensor]:
    """A `kv_source` without content: a replay computes every row before it stores it."""
    groups = metadata.kv_layer_groups_manager.kv_layer_groups
    layers = sorted(((layer, group) for group in groups for layer in group.layer_indices), key=lambda pair: pair[0])
    return [torch.zeros(group.shape, dtype=group.dtype) for _, group in layers]


@dataclass(slots=True)
class _RankReplay:
    """One window on one rank, and what it adds up to."""

    rank: Rank
    verify: bool
    loaded: list[bool] = field(default_factory=list)
    stored: list[bool] = field(default_factory=list)
    verified_bytes: int = 0
    byte_mismatches: int = 0
    load_s: list[float] = field(default_factory=list)
    store_s: list[float] = field(default_factory=list)

    def rows_of(self, first_rows: bytes) -> _ChunkRows:
        """The KV rows of each chunk."""
        begins = np.frombuffer(first_rows, dtype=np.int64)
        return list(begins[:, None] + np.arange(self.rank.layout.chunk_size))

    def load(self, source: ChunkSource, refs: Sequence[ChunkRef], rows: _ChunkRows) -> None:
        """Load one request's chunks; verify the rows of those that are reported good."""
        if self.verify:
            poison = np.full(self.rank.layout.slot_nbytes, POISON, dtype=np.uint8)
            for chunk_rows in rows:
                self.rank.connector.scatter(poison, chunk_rows, 0)
        begin = time.perf_counter()
        flags = read_chunks(source, refs, rows, self.rank.connector)
        self.load_s.append(time.perf_counter() - begin)
        self.loaded += flags
        if self.verify:
            good = [position for position, flag in enumerate(flags) if flag]
            self._compare([refs[position] for position in good], [rows[position] for position in good])

    def store(self, refs: Sequence[ChunkRef], rows: _ChunkRows) -> None:
        """Compute one request's chunks into their rows, then store them; a rank that holds none has nothing to do."""
        if self.rank.shard is None:
            return
        for chunk, chunk_rows in zip(self._expected(refs), rows, strict=True):
            self.rank.connector.scatter(chunk, chunk_rows, 0)
        begin = time.perf_counter()
        self.stored += self.rank.shard.store(refs, rows, self.rank.connector)
        self.store_s.append(time.perf_counter() - begin)

    def result(self) -> ReplayResult:
        """The sum."""
        return ReplayResult(
            pack_flags(self.loaded),
            pack_flags(self.stored),
            self.verified_bytes,
            self.byte_mismatches,
            tuple(self.load_s),
            tuple(self.store_s),
        )

    def _compare(self, refs: Sequence[ChunkRef], rows: _ChunkRows) -> None:
        actual = np.zeros(self.rank.layout.slot_nbytes, dtype=np.uint8)
        for expected, chunk_rows in zip(self._expected(refs), rows, strict=True):
            self.rank.connector.gather(actual, chunk_rows)
            self.byte_mismatches += count_mismatches(actual, expected)
        self.verified_bytes += len(refs) * self.rank.layout.chunk_nbytes

    def _expected(self, refs: Sequence[ChunkRef]) -> np.ndarray:
        shared = self.rank.world.layout.placement is Placement.FIRST_RANK
        number = None if shared else self.rank.place.worker_id
        return expected_chunks([ref.key for ref in refs], self.rank.layout, number)


def _source(rank: Rank, window: ReplayWindow, payload: Payload | None, part: slice) -> ChunkSource:
    if part.stop == part.start:
        return NO_SOURCE
    if payload is None:
        return rank.source_at(window.arena_path)
    return PayloadSource(payload.data[part], unpack_flags(payload.present[part]))


def _parts(counts: Sequence[int]) -> list[slice]:
    """Consecutive slices of the given lengths."""
    ends = np.cumsum(counts).tolist()
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
