"""How rank 0's load reaches the other ranks: read in place, or sent through a user's two functions."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_ray.arena.arena import Arena
from lmcache_ray.arena.spec import ArenaGeometry, ArenaSpec
from lmcache_ray.broadcast.callables import CallableBroadcaster
from lmcache_ray.broadcast.inprocess import InProcessGroup
from lmcache_ray.build import build_engine
from lmcache_ray.engine import LMCacheEngine
from lmcache_ray.errors import BroadcastAborted, BroadcastError, DeadlineError, InvalidRequestError
from lmcache_ray.first_rank import ArenaChannel, FirstRankChannel, SharedLoad, TensorChannel, matches
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.shard import EngineShard
from tests.unit.engine_builders import KV, make_config, make_kv, make_metadata, poison, random_rows, rows_of

WORLD_SIZE = 3
SLOT_NBYTES = 64
REFS = tuple(ChunkRef(bytes([slot]) * 32, slot, slot + 1) for slot in range(3))
LOAD = SharedLoad(0, REFS, ("zero", "one", "two"))


class Bus:
    """A user's own collectives over threads: one queue per receiving rank, first in, first out."""

    def __init__(self, world_size: int) -> None:
        self._queues: list[queue.Queue[object]] = [queue.Queue() for _ in range(world_size)]

    def functions(self, rank: int) -> tuple[Callable[[torch.Tensor, int], None], Callable[[object, int], object]]:
        def broadcast_fn(tensor: torch.Tensor, src: int) -> None:
            received = broadcast_object_fn(tensor.clone() if rank == src else None, src)
            if rank != src:
                assert isinstance(received, torch.Tensor)
                tensor.copy_(received)

        def broadcast_object_fn(obj: object, src: int) -> object:
            if rank != src:
                return self._queues[rank].get(timeout=10)
            for receiver, waiting in enumerate(self._queues):
                if receiver != src:
                    waiting.put(obj)
            return obj

        return broadcast_fn, broadcast_object_fn

    def is_empty(self) -> bool:
        """True if every rank has taken part in every call."""
        return all(waiting.empty() for waiting in self._queues)


@pytest.fixture
def shard(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Rank 0's shard with chunk i, of bytes i + 1, in slot i."""
    spec = ArenaSpec("test", "first", 0, WORLD_SIZE, b"f" * 32, ArenaGeometry(3, SLOT_NBYTES))
    with Arena.create(spec, tmp_path, node_id="n", now=0.0) as arena:
        shard = EngineShard(arena.slots)
        payload = np.arange(1, 4, dtype=np.uint8)[:, None].repeat(SLOT_NBYTES, axis=1)
        assert shard.take_in(REFS, payload, [4] * 3) == [True] * 3
        yield shard


def arena_channels(shard: EngineShard, released: list[str]) -> Sequence[FirstRankChannel]:
    group = InProcessGroup(WORLD_SIZE, 0.2)
    return [ArenaChannel(group.broadcaster(rank), shard.slots) for rank in range(WORLD_SIZE)]


def tensor_channels(shard: EngineShard, released: list[str]) -> Sequence[FirstRankChannel]:
    bus = Bus(WORLD_SIZE)
    return [
        TensorChannel(
            CallableBroadcaster(rank, WORLD_SIZE, *bus.functions(rank)),
            shard.slots if rank == 0 else None,
            SLOT_NBYTES,
            release=released.extend,
        )
        for rank in range(WORLD_SIZE)
    ]


CHANNELS = [arena_channels, tensor_channels]
MakeChannels = Callable[[EngineShard, list[str]], Sequence[FirstRankChannel]]


@pytest.mark.parametrize("make", CHANNELS)
def test_every_rank_gets_the_plan_and_the_bytes(make: MakeChannels, shard: EngineShard) -> None:
    first, *others = make(shard, [])
    for load in (LOAD, SharedLoad(2, (), ()), LOAD):
        first.send(load)
        for channel in others:
            received = channel.receive()
            assert received.load == load
            for position, ref in enumerate(load.refs):
                data = received.source.open(position, ref)
                assert data is not None and set(data.tolist()) == {position + 1}
                assert received.source.is_intact(ref)


@pytest.mark.parametrize("make", CHANNELS)
def test_a_failure_takes_the_place_of_a_plan(make: MakeChannels, shard: EngineShard) -> None:
    first, *others = make(shard, [])
    first.fail("out of order")
    first.send(LOAD)
    for channel in others:
        with pytest.raises(BroadcastAborted, match="out of order"):
            channel.receive()
        assert channel.receive().load == LOAD


@pytest.mark.parametrize("make", CHANNELS)
def test_a_chunk_that_has_gone_is_not_there_for_the_others(make: MakeChannels, shard: EngineShard) -> None:
    first, *others = make(shard, [])
    shard.free([REFS[1]])
    first.send(LOAD)
    for channel in others:
        source = channel.receive().source
        assert [source.open(position, ref) is not None for position, ref in enumerate(REFS)] == [True, False, True]


def test_a_copy_is_good_after_the_slots_were_reused(shard: EngineShard) -> None:
    """So the leases of the other ranks end when it is made; the one that rank 0 reads under does not."""
    released: list[str] = []
    first, *others = tensor_channels(shard, released)
    first.send(LOAD)
    assert released == ["one", "two"]
    shard.free(REFS)
    for channel in others:
        source = channel.receive().source
        data = source.open(2, REFS[2])
        assert data is not None and set(data.tolist()) == {3} and source.is_intact(REFS[2])


def test_reading_in_place_notices_that_a_slot_was_reused(shard: EngineShard) -> None:
    first, other, _ = arena_channels(shard, [])
    first.send(LOAD)
    source = other.receive().source
    assert source.open(0, REFS[0]) is not None
    shard.take_in([ChunkRef(b"n" * 32, 0, 99)], np.zeros((1, SLOT_NBYTES), dtype=np.uint8), [4])
    assert not source.is_intact(REFS[0])


def test_a_silent_source_is_a_missed_deadline(shard: EngineShard) -> None:
    _, other, _ = arena_channels(shard, [])
    with pytest.raises(DeadlineError, match="rank 1 waited"):
        other.receive()


def test_only_rank_0_can_send(shard: EngineShard) -> None:
    with pytest.raises(BroadcastError, match="only the first rank"):
        tensor_channels(shard, [])[1].send(LOAD)


def test_what_is_no_plan_is_refused(shard: EngineShard) -> None:
    for send in (lambda b: b.broadcast_object("hello", src=0), lambda b: b.broadcast_object(("hello", ()), src=0)):
        bus = Bus(2)
        send(CallableBroadcaster(0, 2, *bus.functions(0)))
        channel = TensorChannel(
            CallableBroadcaster(1, 2, *bus.functions(1)), None, SLOT_NBYTES, release=lambda ids: None
        )
        with pytest.raises(BroadcastAborted, match=r"rank 0 sent .* where a load plan was due"):
            channel.receive()


def test_a_load_matches_the_prompt_and_start_it_was_made_for() -> None:
    keys = [ref.key for ref in REFS]
    load = SharedLoad(1, REFS[1:], ())
    assert matches(load, keys, 1) and matches(load, [*keys, b"more"], 1)
    assert not matches(load, keys, 0) and not matches(load, keys[::-1], 1) and not matches(load, keys[:2], 1)
    nothing = SharedLoad(5, (), ())
    assert matches(nothing, keys, 5) and not matches(nothing, keys, 4)


# -- whole engines, each built alone and joined by the user's functions only ------------------------------------------

TOKENS = list(range(12))
ROWS = random_rows(12)


def build_ranks(arena_dir: Path, bus: Bus) -> tuple[list[LMCacheEngine], list[KV]]:
    engines = []
    for rank in range(WORLD_SIZE):
        broadcast_fn, broadcast_object_fn = bus.functions(rank)
        engines.append(
            build_engine(
                make_config(arena_dir, capacity_chunks=3),
                make_metadata(WORLD_SIZE, rank, use_mla=True),
                broadcast_fn=broadcast_fn,
                broadcast_object_fn=broadcast_object_fn,
            )
        )
    layout = engines[0]._parts.layout
    return engines, [make_kv(layout.ranks[rank], 64, seed=rank) for rank in range(WORLD_SIZE)]


def retrieve(engines: list[LMCacheEngine], kvs: list[KV], rows_of_rank: Callable[[int], object]) -> list[object]:
    """Per rank the number of tokens delivered, or the error's type."""
    with ThreadPoolExecutor(WORLD_SIZE) as threads:
        futures = [
            threads.submit(engine.retrieve, TOKENS, kvcaches=kv, slot_mapping=rows_of_rank(rank))
            for rank, (engine, kv) in enumerate(zip(engines, kvs, strict=True))
        ]
        return [type(error) if (error := f.exception()) else int(f.result().sum()) for f in futures]


def test_engines_joined_by_a_users_functions(tmp_path: Path) -> None:
    bus = Bus(WORLD_SIZE)
    engines, kvs = build_ranks(tmp_path, bus)
    stored = [engine.store(TOKENS, kvcaches=kv, slot_mapping=ROWS) for engine, kv in zip(engines, kvs, strict=True)]
    assert stored == [12, 0, 0]
    expected = rows_of(kvs[0], ROWS)
    for _ in range(3):
        for kv in kvs:
            poison(kv)
        assert retrieve(engines, kvs, lambda rank: ROWS) == [12, 12, 12]
        assert [rows_of(kv, ROWS) for kv in kvs] == [expected] * 3
    assert retrieve(engines, kvs, lambda rank: ROWS if rank else [-1] * 12) == [InvalidRequestError, 0, 0]
    assert retrieve(engines, kvs, lambda rank: [-1] * 12 if rank == 2 else ROWS) == [12, 12, InvalidRequestError]
    assert retrieve(engines, kvs, lambda rank: ROWS) == [12, 12, 12]
    assert bus.is_empty()
    other = list(range(50, 62))
    assert engines[0].store(other, kvcaches=kvs[0], slot_mapping=ROWS) == 12, (
        "no lease of a past retrieve is in the way"
    )
    assert retrieve(engines, kvs, lambda rank: ROWS) == [0, 0, 0]
    for engine in engines:
        engine.close()
