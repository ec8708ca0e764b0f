"""Four threads do random things to an arena of ten chunks: every byte that is delivered is the right one.

``RANDOM_OPERATIONS=10000`` makes it longer than the 1,000 operations per placement of an ordinary run.
"""

import os
import random
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch

from lmcache_ray.keys import ChunkHasher
from lmcache_ray.world_engine import WorldEngine
from tests.unit.engine_builders import KV, World, make_kv, make_world, poison, random_rows

NUM_OPERATIONS = int(os.environ.get("RANDOM_OPERATIONS", "1000"))
NUM_THREADS, CAPACITY, CHUNK = 4, 10, 4
Store: TypeAlias = Callable[[list[int], np.ndarray, list[KV], np.ndarray], int]
Retrieve: TypeAlias = Callable[[list[int], np.ndarray, list[KV], np.ndarray], np.ndarray]
HASHER = ChunkHasher("m", chunk_size=CHUNK, keep_partial=True)


@cache
def bytes_of_chunk(key: bytes, rank: int, layer: int, shape: tuple[int, int, int]) -> np.ndarray:
    """What the rows of a chunk must hold on one layer of a rank: ``[kv_size, chunk_size, row_nbytes]``."""
    return np.random.default_rng([*key[:8], rank, layer]).integers(0, 256, shape, dtype=np.uint8)


def prompt(rng: random.Random) -> list[int]:
    """One of a few dozen prompts of up to 14 chunks that share prefixes, as conversations do."""
    tokens = [rng.randrange(2)] * 9
    for _ in range(rng.randrange(3)):
        tokens += [10 + rng.randrange(2)] * rng.choice([8, 16])
    return tokens[: len(tokens) - rng.choice([0, 0, 1, 5])]


def each_rank(world: World) -> tuple[Store, Retrieve]:
    """Call the engines of the ranks one after the other, from the caller's thread."""

    def store(tokens: list[int], mask: np.ndarray, kvs: list[KV], rows: np.ndarray) -> int:
        ranks = zip(world.engines, kvs, strict=True)
        return max(engine.store(tokens, mask=mask, kvcaches=kv, slot_mapping=rows) for engine, kv in ranks)

    def retrieve(tokens: list[int], mask: np.ndarray, kvs: list[KV], rows: np.ndarray) -> np.ndarray:
        ranks = zip(world.engines, kvs, strict=True)
        masks = [engine.retrieve(tokens, mask, kvcaches=kv, slot_mapping=rows) for engine, kv in ranks]
        return torch.stack(masks).all(dim=0).numpy()

    return store, retrieve


def whole_world(engine: WorldEngine) -> tuple[Store, Retrieve]:
    """Call all ranks at once, each in its own thread."""

    def store(tokens: list[int], mask: np.ndarray, kvs: list[KV], rows: np.ndarray) -> int:
        return engine.store(tokens, mask=mask, kvcaches=kvs, slot_mapping=rows)

    def retrieve(tokens: list[int], mask: np.ndarray, kvs: list[KV], rows: np.ndarray) -> np.ndarray:
        return engine.retrieve(tokens, mask, kvcaches=kvs, slot_mapping=rows).numpy()

    return store, retrieve


class Driver:
    """One thread's user of the world, with paged KV of its own for every rank."""

    def __init__(self, world: World, store: Store, retrieve: Retrieve, seed: int, *, leases_last: bool) -> None:
        self._world, self._engine = world, world.engines[seed % len(world.engines)]
        self._call_store, self._call_retrieve = store, retrieve
        self._rng = random.Random(seed)
        self._name = f"driver {seed}"
        self._leases_last = leases_last
        self._kvs: list[KV] = [make_kv(layout, 64, seed=seed) for layout in world.layout.ranks]
        self.num_delivered = 0

    def step(self) -> None:
        """One random operation, then a look at the whole."""
        operation = self._rng.choices([self._store, self._retrieve, self._lookup, self._clear], [6, 8, 3, 1])[0]
        operation(prompt(self._rng))
        with self._world.index_at_rest() as index:
            index.check_integrity()
            counts = index.counts()
        assert counts.ready + counts.writing + counts.quarantined <= counts.capacity == CAPACITY

    def _store(self, tokens: list[int]) -> None:
        rows = random_rows(len(tokens), seed=self._rng.randrange(1000))
        for rank, kv in enumerate(self._kvs):
            for layer, raw in enumerate(_raw(kv)):
                raw[:, rows] = self._expected(tokens, rank, layer, raw.shape)
        start = self._rng.choice([0, 0, CHUNK * self._rng.randrange(len(tokens) // CHUNK + 1)])
        stored = self._call_store(tokens, np.arange(len(tokens)) >= start, self._kvs, rows)
        assert 0 <= stored <= min(len(tokens), CAPACITY * CHUNK)

    def _retrieve(self, tokens: list[int]) -> None:
        rows = random_rows(len(tokens), seed=self._rng.randrange(1000))
        start = self._rng.choice([0, 0, self._rng.randrange(len(tokens) + 1)])
        for kv in self._kvs:
            poison(kv)
        blank = [[raw.copy() for raw in _raw(kv)] for kv in self._kvs]
        delivered = self._call_retrieve(tokens, np.arange(len(tokens)) >= start, self._kvs, rows)
        end = start + int(delivered.sum())
        assert np.array_equal(np.flatnonzero(delivered), np.arange(start, end))
        untouchable = np.setdiff1d(np.arange(64), rows[start:])
        for rank, kv in enumerate(self._kvs):
            for layer, raw in enumerate(_raw(kv)):
                expected = self._expected(tokens, rank, layer, raw.shape)
                assert np.array_equal(raw[:, rows[start:end]], expected[:, start:end]), "bytes of another chunk"
                assert np.array_equal(raw[:, untouchable], blank[rank][layer][:, untouchable])
        self.num_delivered += end - start

    def _lookup(self, tokens: list[int]) -> None:
        found = self._engine.lookup(tokens, lookup_id=self._name, pin=True)
        assert found <= len(tokens)
        if self._leases_last:
            assert self._engine.lookup(tokens) >= found, "pinned chunks stay"
        self._engine.lookup_unpin(self._name)

    def _clear(self, tokens: list[int]) -> None:
        self._engine.clear(tokens if self._rng.random() < 0.8 else None)

    def _expected(self, tokens: list[int], rank: int, layer: int, shape: tuple[int, ...]) -> np.ndarray:
        """What the tokens' rows must hold, ``[kv_size, num_tokens, row_nbytes]``."""
        rows = np.empty((shape[0], len(tokens), shape[2]), dtype=np.uint8)
        rank = 0 if self._engine.metadata.use_mla else rank
        for key, (start, end) in zip(HASHER.keys(tokens), HASHER.spans(len(tokens)), strict=True):
            rows[:, start:end] = bytes_of_chunk(key, rank, layer, (shape[0], CHUNK, shape[2]))[:, : end - start]
        return rows


def _raw(kv: KV) -> list[np.ndarray]:
    """Each layer's bytes ``[kv_size, num_rows, row_nbytes]``, not copied."""
    return [tensor.view(torch.uint8).numpy().reshape(tensor.shape[0], 64, -1) for tensor in kv]


def run(drivers: list[Driver]) -> None:
    """Let all drivers work at once; raises the first failure."""
    failures: list[BaseException] = []

    def drive(driver: Driver) -> None:
        try:
            for _ in range(NUM_OPERATIONS // 2 // NUM_THREADS):
                driver.step()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=drive, args=(driver,)) for driver in drivers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("lease_timeout_s", [60, 1e-6], ids=["leases last", "leases end under the reader"])
@pytest.mark.parametrize("use_mla", [False, True])
def test_random_operations_of_four_threads(tmp_path: Path, use_mla: bool, lease_timeout_s: float) -> None:
    """With leases that end at once, slots are reused under readers all the time: then a reader must notice."""
    with make_world(
        tmp_path,
        2,
        use_mla=use_mla,
        capacity_chunks=CAPACITY,
        save_unfull_chunk=True,
        lease_timeout_s=lease_timeout_s,
        call_timeout_s=10 if use_mla else 0.3,
        cache_policy="LFU" if use_mla else "LRU",
    ) as world:
        engine = WorldEngine([engine._parts for engine in world.engines], 0, world.kvs)
        calls = whole_world(engine) if use_mla else each_rank(world)
        drivers = [Driver(world, *calls, seed, leases_last=lease_timeout_s > 1) for seed in range(NUM_THREADS)]
        run(drivers)
        assert sum(driver.num_delivered for driver in drivers) > NUM_OPERATIONS // 2, "hardly anything was ever cached"
        if not use_mla:
            world.let_pass(1)  # one rank found room where the other had found none: such chunks end by the clock
        world.check_idle()
        engine.close()
