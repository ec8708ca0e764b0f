"""The standalone world: what it builds, how it is used as one, and how it begins and ends."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_ray.arena.private import PrivateArena
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.errors import CapacityError, ClosedError, ConfigError, ProtocolError, ShapeSpecError
from lmcache_ray.kv_pattern import pattern_rows
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from lmcache_ray.standalone.starter import LMCacheStandaloneStarter

CHUNK = 8
TWO_GROUPS = "(2,2,8,2,4):float16:2;(3,2,12,1,3):uint8:3"
MLA = "(2,1,8,1,12):bfloat16:2;(1,8,5):float32:1"


@pytest.fixture
def arena_dir(tmp_path: Path) -> Path:
    return tmp_path


def config_for(arena_dir: Path, **values: object) -> LMCacheEngineConfig:
    given = {"chunk_size": CHUNK, "block_size": 4, "capacity_chunks": 8, "arena_dir": str(arena_dir)}
    return LMCacheEngineConfig(**(given | values))


def starter_for(
    config: LMCacheEngineConfig,
    spec: str = TWO_GROUPS,
    *,
    world_size: int = 1,
    worker_id: int = 0,
    use_mla: bool = False,
) -> LMCacheStandaloneStarter:
    metadata = LMCacheMetadata(
        "model",
        world_size=world_size,
        worker_id=worker_id,
        kv_dtype=torch.float16,
        kv_shape=(5, 1 if use_mla else 2, 8, 2, 4),
        use_mla=use_mla,
    )
    return LMCacheStandaloneStarter(config, metadata, parse_kvcache_shape_spec(spec))


@pytest.fixture
def starter(arena_dir: Path) -> Iterator[LMCacheStandaloneStarter]:
    starter = starter_for(config_for(arena_dir), world_size=2)
    yield starter
    starter.stop()


def rows_of(cache: torch.Tensor) -> np.ndarray:
    """``[kv_size, num_slots, row_nbytes]``"""
    flat = cache.reshape(cache.shape[0], cache.shape[1] * cache.shape[2], -1)
    return flat.contiguous().view(torch.uint8).numpy()


def poison(starter: LMCacheStandaloneStarter, rows: torch.Tensor) -> None:
    for caches in starter.kv_caches:
        for cache in caches:
            rows_of(cache)[:, rows.numpy()] = 0x5A


@pytest.mark.parametrize(("spec", "use_mla"), [(TWO_GROUPS, False), (MLA, True)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_engine_acts_for_all_ranks(arena_dir: Path, spec: str, use_mla: bool, world_size: int) -> None:
    """What is stored from some rows of every rank comes back into other rows of every rank, byte for byte."""
    starter = starter_for(
        config_for(arena_dir), spec, world_size=world_size, worker_id=world_size - 1, use_mla=use_mla
    )
    engine = starter.start()
    assert engine is starter.lmcache_engine
    assert engine.metadata.worker_id == world_size - 1
    tokens = list(range(2 * CHUNK))
    source, target = torch.arange(2 * CHUNK), torch.arange(2 * CHUNK).flip(0) + CHUNK
    before = [[rows_of(cache)[:, source].copy() for cache in caches] for caches in starter.kv_caches]

    assert engine.store(tokens, slot_mapping=source) == 2 * CHUNK
    assert engine.lookup(tokens) == 2 * CHUNK
    poison(starter, target)
    assert engine.retrieve(tokens, slot_mapping=target).tolist() == [True] * (2 * CHUNK)
    assert all(rank.lookup(tokens) == 2 * CHUNK for rank in starter.engines)

    for caches, expected in zip(starter.kv_caches, before, strict=True):
        for cache, rows in zip(caches, expected, strict=True):
            assert np.array_equal(rows_of(cache)[:, target], rows)
    starter.stop()


def test_ranks_keep_their_own_bytes_apart(starter: LMCacheStandaloneStarter) -> None:
    engine = starter.start()
    rows = torch.arange(CHUNK)
    rows_of(starter.kv_caches[1][0])[:, :CHUNK] = 7
    first = rows_of(starter.kv_caches[0][0])[:, :CHUNK].copy()
    engine.store(list(range(CHUNK)), slot_mapping=rows)
    poison(starter, rows)
    engine.retrieve(list(range(CHUNK)), slot_mapping=rows)
    assert np.array_equal(rows_of(starter.kv_caches[0][0])[:, :CHUNK], first)
    assert (rows_of(starter.kv_caches[1][0])[:, :CHUNK] == 7).all()


def test_callers_may_bring_their_own_kv_for_every_rank(starter: LMCacheStandaloneStarter) -> None:
    engine = starter.start()
    own = [[torch.zeros_like(cache) for cache in caches] for caches in starter.kv_caches]
    engine.store(list(range(CHUNK)), slot_mapping=torch.arange(CHUNK))
    engine.retrieve(list(range(CHUNK)), kvcaches=own, slot_mapping=torch.arange(CHUNK))
    for caches, copies in zip(starter.kv_caches, own, strict=True):
        for cache, copy in zip(caches, copies, strict=True):
            assert np.array_equal(rows_of(copy)[:, :CHUNK], rows_of(cache)[:, :CHUNK])
            assert not rows_of(copy)[:, CHUNK:].any()


def test_paged_kv_has_the_blocks_of_the_spec_and_the_pattern(starter: LMCacheStandaloneStarter) -> None:
    starter.start()
    for caches in starter.kv_caches:
        assert [tuple(cache.shape) for cache in caches] == [(2, 8, 4, 2, 4)] * 2 + [(2, 12, 4, 1, 3)] * 3
        for group, positions in zip(starter.layout.ranks[0].groups, ((0, 1), (2, 3, 4)), strict=True):
            for layer in positions:
                for kv in range(2):
                    rows = np.arange(caches[layer].shape[1] * 4)
                    expected = pattern_rows(layer, kv, rows, row_nbytes=group.row_nbytes, dtype=group.dtype)
                    assert np.array_equal(rows_of(caches[layer])[kv], expected)


def test_layer_groups_and_chunk_size_reach_the_metadata(starter: LMCacheStandaloneStarter) -> None:
    assert starter.metadata.get_num_groups() == 2
    assert starter.metadata.get_shapes() == [torch.Size((2, 2, CHUNK, 8)), torch.Size((2, 3, CHUNK, 3))]
    assert starter.metadata.get_dtypes() == [torch.float16, torch.uint8]
    assert starter.metadata.chunk_size == CHUNK


def test_it_works_on_copies(arena_dir: Path) -> None:
    config = config_for(arena_dir)
    starter = starter_for(config)
    config.chunk_size = 16
    starter.config.chunk_size = 32
    assert starter.config.chunk_size == CHUNK
    assert starter.start().chunk_size == CHUNK  # type: ignore[attr-defined]
    starter.stop()


def test_one_warning_when_groups_and_kv_shape_disagree(arena_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    starter = starter_for(config_for(arena_dir), "(1,2,8,2,4):float16:1")
    starter.start()
    starter.stop()
    assert len(caplog.records) == 1
    assert "disagrees" in caplog.text


def test_arenas_have_no_name(starter: LMCacheStandaloneStarter, arena_dir: Path) -> None:
    starter.start()
    assert os.listdir(arena_dir) == []


def test_nothing_appears_in_the_arena_directory(arena_dir: Path) -> None:
    starter = starter_for(config_for(arena_dir), world_size=2)
    starter.start()
    assert not list(arena_dir.iterdir())
    starter.stop()


# -- beginning and ending -----------------------------------------------------------------------------------------


def test_nothing_can_be_used_before_start(starter: LMCacheStandaloneStarter) -> None:
    for name in ("lmcache_engine", "engines", "kv_caches"):
        with pytest.raises(ProtocolError, match="not started"):
            getattr(starter, name)
    with pytest.raises(ProtocolError, match="not started"):
        asyncio.run(starter.run_forever())
    assert starter.api_server is None
    assert not starter.is_running


def test_it_starts_once(starter: LMCacheStandaloneStarter) -> None:
    engine = starter.start()
    with pytest.raises(ProtocolError, match="started already"):
        starter.start()
    assert starter.lmcache_engine is engine, "the refused start changed nothing"
    starter.stop()
    with pytest.raises(ClosedError, match="stopped"):
        starter.start()


def test_stop_closes_every_rank_and_may_be_repeated(starter: LMCacheStandaloneStarter) -> None:
    engine = starter.start()
    ranks = starter.engines
    starter.stop()
    starter.stop()
    for closed in (engine, *ranks):
        with pytest.raises(ClosedError):
            closed.lookup([1])
    for name in ("lmcache_engine", "engines", "kv_caches"):
        with pytest.raises(ClosedError):
            getattr(starter, name)


def test_stop_before_start_ends_it(starter: LMCacheStandaloneStarter) -> None:
    starter.stop()
    with pytest.raises(ClosedError):
        starter.start()


def test_many_threads_may_stop_it(starter: LMCacheStandaloneStarter) -> None:
    starter.start()
    failures: list[BaseException] = []

    def stop() -> None:
        try:
            starter.stop()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=stop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not failures
    assert not starter.is_running


def test_a_failed_start_is_an_error_and_leaves_nothing(arena_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starter = starter_for(config_for(arena_dir), world_size=2)
    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr("lmcache_ray.standalone.sizes.free_memory_nbytes", lambda: 1000)
        with pytest.raises(CapacityError, match="1000 bytes of memory"):
            starter.start()
    assert not starter.is_running
    with pytest.raises(ProtocolError, match="not started"):
        _ = starter.lmcache_engine
    assert starter.start().is_healthy(), "it can be tried again"
    starter.stop()


def test_paged_kv_larger_than_memory_is_refused_and_gives_the_arenas_back(
    arena_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = starter_for(config_for(arena_dir), "(2,2,1000000000,2,4):float16:2", world_size=2)
    closed = []
    monkeypatch.setattr(PrivateArena, "close", lambda arena: closed.append(arena))
    with pytest.raises(CapacityError, match=r"512000000000 bytes \(256000000000 for each of 2 ranks\).* are left"):
        starter.start()
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("meta", "torch can allocate there, but KV is copied from and to CPU memory only"),
        ("no such thing", "is not a device"),
        pytest.param(
            "cuda:0",
            "torch cannot allocate there",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="torch can allocate there"),
        ),
    ],
)
def test_devices_are_refused_with_the_reason(arena_dir: Path, device: str, why: str) -> None:
    metadata = LMCacheMetadata("m", world_size=1, worker_id=0, kv_dtype=torch.float16, kv_shape=(2, 2, 8, 2, 4))
    with pytest.raises(ConfigError, match=why) as caught:
        LMCacheStandaloneStarter(config_for(arena_dir), metadata, parse_kvcache_shape_spec(TWO_GROUPS), device)
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("(3,2,8,2,4):float16:2", "3 layers"),
        ("(2,1,8,2,4):float16:2", "kv_dim 1 without MLA"),
        ("(2,8):uint8:2", "2 dimensions"),
    ],
)
def test_groups_that_cannot_be_meant_are_refused_at_once(arena_dir: Path, spec: str, why: str) -> None:
    with pytest.raises(ShapeSpecError, match=why):
        starter_for(config_for(arena_dir), spec)


def test_a_chunk_larger_than_the_arena_is_refused_with_both_sizes(arena_dir: Path) -> None:
    config = config_for(arena_dir, capacity_chunks=None, max_local_cpu_size=1e-7)
    with pytest.raises(CapacityError, match=r"chunk of \d+ bytes .* arena of 107 bytes"):
        starter_for(config)


# -- run_forever --------------------------------------------------------------------------------------------------


def test_run_forever_ends_when_another_thread_stops(starter: LMCacheStandaloneStarter) -> None:
    starter.start()
    timer = threading.Timer(0.1, starter.stop)
    timer.start()
    asyncio.run(asyncio.wait_for(starter.run_forever(), 5))
    assert not starter.is_running


def test_run_forever_after_stop_returns_at_once(starter: LMCacheStandaloneStarter) -> None:
    starter.start()
    starter.stop()
    asyncio.run(asyncio.wait_for(starter.run_forever(), 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_forever_ends_by_a_signal_and_puts_the_handlers_back(
    starter: LMCacheStandaloneStarter, number: signal.Signals
) -> None:
    engine = starter.start()
    previous = signal.getsignal(number)

    async def run() -> None:
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), number)
        await asyncio.wait_for(starter.run_forever(), 5)

    asyncio.run(run())
    assert not starter.is_running
    assert not engine.is_healthy()
    assert signal.getsignal(number) == previous


def test_run_forever_outside_the_main_thread_still_ends_by_stop(starter: LMCacheStandaloneStarter) -> None:
    starter.start()
    thread = threading.Thread(target=lambda: asyncio.run(starter.run_forever()))
    thread.start()
    starter.stop()
    thread.join(5)
    assert not thread.is_alive()


def test_a_cancelled_run_stops_the_world(starter: LMCacheStandaloneStarter) -> None:
    starter.start()

    async def run() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(starter.run_forever(), 0.1)

    asyncio.run(run())
    assert not starter.is_running
