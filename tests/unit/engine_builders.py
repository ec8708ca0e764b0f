"""In-process worlds of engines, whose paged KV holds every kind of bit pattern, and ways to compare bytes."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from lmcache_ray.build import build_world
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.engine import LMCacheEngine
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.kv_pattern import allocate_kv_caches
from lmcache_ray.layout import RankLayout, WorldLayout
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import parse_kvcache_shape_spec

Result = TypeVar("Result")
KV = list[torch.Tensor]

BLOCK_SIZE = 4
POISON = 0x5A


@dataclass(frozen=True)
class World:
    """The engines of an in-process world and one paged KV per rank."""

    engines: list[LMCacheEngine]
    layout: WorldLayout
    kvs: list[KV]

    def on_ranks(self, call: Callable[[LMCacheEngine, KV], Result]) -> list[Result]:
        """`call` on every rank at once, each in its own thread; a failure is raised when all have ended."""
        with ThreadPoolExecutor(len(self.engines)) as threads:
            return list(threads.map(call, self.engines, self.kvs))

    def store(self, tokens: Sequence[int], rows: np.ndarray, **named: object) -> int:
        """Store on every rank: what the last rank says."""
        counts = self.on_ranks(lambda engine, kv: engine.store(tokens, kvcaches=kv, slot_mapping=rows, **named))  # type: ignore[arg-type]
        return max(counts)

    def retrieve(self, tokens: Sequence[int], rows: np.ndarray, **named: object) -> list[int]:
        """Retrieve on every rank: the positions of the tokens that all delivered."""
        masks = self.on_ranks(lambda engine, kv: engine.retrieve(tokens, kvcaches=kv, slot_mapping=rows, **named))  # type: ignore[arg-type]
        assert all(torch.equal(mask, masks[0]) for mask in masks), "ranks disagree"
        assert masks[0].dtype == torch.bool and len(masks[0]) == len(tokens)
        return masks[0].nonzero().flatten().tolist()

    def let_pass(self, seconds: float) -> None:
        """Set the clock of the index forward."""
        service = self.engines[0]._parts.index._service  # type: ignore[attr-defined]
        clock = service._clock
        service._clock = lambda: clock() + seconds

    @contextmanager
    def index_at_rest(self) -> Iterator[CacheIndex]:
        """The one index of memory, which nobody changes meanwhile; overdue leases and plans are ended."""
        with self.engines[0]._parts.index._service.at_now() as (index, _):  # type: ignore[attr-defined]
            yield index.memory

    def index(self) -> CacheIndex:
        """The one index of memory, for when no other thread is at work."""
        with self.index_at_rest() as index:
            return index

    def check_idle(self) -> None:
        """Index and arenas are sound; no lease is left and no plan unfinished."""
        index = self.index()
        index.check_integrity()
        counts = index.counts()
        assert (counts.leases, counts.plans, counts.writing, counts.quarantined) == (0, 0, 0, 0)
        for engine in self.engines:
            if engine._parts.shard is not None:
                engine._parts.shard.slots.check_integrity()

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def make_config(arena_dir: Path, **values: object) -> LMCacheEngineConfig:
    defaults: dict[str, object] = {"chunk_size": 4, "capacity_chunks": 16, "call_timeout_s": 10}
    return LMCacheEngineConfig(**{"arena_dir": str(arena_dir), **defaults, **values})


def make_metadata(
    world_size: int = 1, worker_id: int = 0, *, use_mla: bool = False, model: str = "m"
) -> LMCacheMetadata:
    """A rank's metadata: two layers of 2 heads of 4 float16, or with MLA of one latent row of 16 bfloat16."""
    return LMCacheMetadata(
        model_name=model,
        world_size=world_size,
        worker_id=worker_id,
        kv_dtype=torch.bfloat16 if use_mla else torch.float16,
        kv_shape=(2, 1, 4, 1, 16) if use_mla else (2, 2, 4, 2, 4),
        use_mla=use_mla,
    )


@contextmanager
def make_world(
    arena_dir: Path,
    world_size: int = 1,
    *,
    use_mla: bool = False,
    spec: str | None = None,
    num_rows: int = 64,
    model: str = "m",
    **config: object,
) -> Iterator[World]:
    """A world whose ranks have `num_rows` KV rows of odd bytes; with MLA all ranks have the same."""
    engines = build_world(
        make_config(arena_dir, **config),
        make_metadata(world_size, use_mla=use_mla, model=model),
        layer_groups=parse_kvcache_shape_spec(spec) if spec else None,
    )
    layout = engines[0]._parts.layout
    kvs = [make_kv(layout.ranks[rank], num_rows, seed=0 if use_mla else rank) for rank in range(world_size)]
    world = World(engines, layout, kvs)
    try:
        yield world
    finally:
        world.close()


def make_kv(layout: RankLayout, num_rows: int, *, seed: int) -> KV:
    """Paged KV full of random bytes, with -0.0 and NaNs that carry a payload among the elements."""
    kv = allocate_kv_caches(layout, num_blocks=[-(-num_rows // BLOCK_SIZE)] * len(layout.groups), block_size=BLOCK_SIZE)
    rng = np.random.default_rng(seed)
    for tensor in kv:
        raw = tensor.view(torch.uint8).numpy().reshape(-1)
        raw[:] = rng.integers(0, 256, raw.size, dtype=np.uint8)
        elements = raw.reshape(-1, tensor.itemsize)
        elements[::5] = [0] * (tensor.itemsize - 1) + [0x80]
        elements[1::5] = [0x01] * (tensor.itemsize - 1) + [0xFF]
        elements[1::5, -2:] |= np.array([0xC1, 0x7F][-tensor.itemsize :], dtype=np.uint8)
    return kv


def poison(kv: KV) -> None:
    """Overwrite every byte."""
    for tensor in kv:
        tensor.view(torch.uint8).fill_(POISON)


def rows_of(kv: KV, rows: Sequence[int] | np.ndarray) -> bytes:
    """All bytes of these rows, of every layer, keys and values."""
    flat = [tensor.view(torch.uint8).numpy().reshape(tensor.shape[0], -1, row_nbytes(tensor)) for tensor in kv]
    return b"".join(raw[:, list(rows)].tobytes() for raw in flat)


def row_nbytes(tensor: torch.Tensor) -> int:
    """Bytes of one row of a layer ``[kv_size, num_blocks, block_size, heads, head_size]``."""
    return tensor.shape[3] * tensor.shape[4] * tensor.itemsize


def random_rows(num_tokens: int, num_rows: int = 64, *, seed: int = 0) -> np.ndarray:
    """A slot mapping without order."""
    return np.random.default_rng(seed).permutation(num_rows)[:num_tokens]
