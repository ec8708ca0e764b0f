"""How a serving engine uses the cache through a request's life, as scenarios that any `IndexClient` must carry.

A test class derives from a suite and defines one fixture::

    class TestMine(LifecycleSuite):
        @pytest.fixture
        def make_world(self) -> MakeWorld: ...   # (layout, num_slots) -> LifecycleWorld

`ShortLifecycleSuite` is for worlds that are slow to make. After every scenario the world must be idle: sound, no lease
left, no plan unfinished. No engine is imported: `ServingEngine` (serving_engine.py) is the scheduler and the workers.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeAlias

import pytest

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.index_service import IndexClient
from lmcache_ray.layout import Placement, RankLayout, ShardSpec, WorldLayout, uniform_world
from lmcache_ray.shard import EngineShard
from tests.contract.serving_engine import CHUNK, Request, ServingEngine

NUM_SLOTS = 12


class LifecycleWorld(Protocol):
    """A world's one index, and the arenas of its holder ranks as the workers of an engine write and read them."""

    @property
    def layout(self) -> WorldLayout:
        """Of all ranks."""
        ...

    @property
    def shards(self) -> Mapping[int, EngineShard]:
        """By holder rank."""
        ...

    def client(self, name: str) -> IndexClient:
        """The index as the engine of that name speaks to it."""
        ...

    def check_idle(self) -> None:
        """Raise unless index and arenas are sound, no lease is left and no plan is unfinished."""
        ...


MakeWorld: TypeAlias = Callable[[WorldLayout, int], LifecycleWorld]


def tp2_pp2() -> WorldLayout:
    """Rank = pipeline stage * 2 + tensor rank: the first stage has three layers, the second two and another group."""

    def rank(stage: int, tensor: int) -> RankLayout:
        heads = range(2 * tensor, 2 * tensor + 2)
        layers, extra = ((0, 1, 2), ()) if stage == 0 else ((3, 5), (4,))
        groups = [ShardSpec(layers, heads, 4, KVDtype.BFLOAT16)]
        groups += [ShardSpec(extra, range(tensor, tensor + 1), 3, KVDtype.FLOAT8_E4M3FN)] if extra else []
        return RankLayout(CHUNK, tuple(groups))

    ranks = tuple(rank(stage, tensor) for stage in range(2) for tensor in range(2))
    return WorldLayout(ranks, Placement.PER_RANK)


def mla() -> WorldLayout:
    """Three ranks of equal KV, of which rank 0 keeps the one copy."""
    group = ShardSpec((0, 1), range(1), 16, KVDtype.FLOAT16, kv_size=1)
    return uniform_world([group], chunk_size=CHUNK, world_size=3, placement=Placement.FIRST_RANK)


LAYOUTS = {"TP 2 x PP 2": tp2_pp2, "MLA": mla}


class ShortLifecycleSuite:
    """The life of one request, and of two engines at once."""

    @pytest.fixture(params=LAYOUTS)
    def world(self, make_world: MakeWorld, request: pytest.FixtureRequest) -> Iterator[LifecycleWorld]:
        world = make_world(LAYOUTS[request.param](), NUM_SLOTS)
        yield world
        world.check_idle()

    def test_a_prompt_is_prefilled_in_steps_preempted_and_resumed(self, world: LifecycleWorld) -> None:
        engine = ServingEngine("a", world)
        request = Request("r", list(range(23)))
        assert engine.num_hits(request) == 0 and engine.allocate(request)
        stored = []
        for end in (3, 4, 9, 14, 15, 20, 23):
            engine.compute(request, end)
            stored.append(engine.store(request))
            assert engine.num_hits(Request("onlooker", request.tokens)) == stored[-1]
            engine.forget("onlooker")
        assert stored == [0, 4, 8, 12, 12, 20, 20]
        engine.preempt(request)
        assert request.num_computed == 0
        engine.overwrite_free_rows()
        assert engine.num_hits(request) == 20 and engine.allocate(request)
        assert engine.load(request) == 20
        engine.check_kv(request)
        engine.compute(request, 23)
        assert engine.store(request) == 20, "all there was to store is there"
        engine.finish(request)

    def test_two_engines_at_once_write_each_chunk_once(self, world: LifecycleWorld) -> None:
        one, other = ServingEngine("one", world), ServingEngine("other", world)
        short, longer = Request("s", list(range(8))), Request("l", [*range(8), *range(50, 58)])
        for engine, request in ((one, short), (other, longer)):
            assert engine.num_hits(request) == 0 and engine.allocate(request)
            engine.compute(request, len(request.tokens))
        writing = one.begin_store(short)
        assert len(writing.refs) == 2
        assert other.store(longer) == 0, "its tail is there, its head is not: no hit, and nobody waits"
        assert other.num_hits(longer) == 0
        assert one.end_store(short, writing) == 8
        assert other.num_hits(longer) == 16, "each wrote what the other did not"
        for engine, request in ((one, short), (other, longer)):
            engine.finish(request)
            engine.overwrite_free_rows()
        reader = Request("reader", longer.tokens)
        assert one.num_hits(reader) == 16 and one.allocate(reader) and one.load(reader) == 16
        one.check_kv(reader)
        one.finish(reader)

    def test_an_aborted_request_leaves_nothing(self, world: LifecycleWorld) -> None:
        engine = ServingEngine("a", world)
        cached, request = Request("c", list(range(8))), Request("r", list(range(16)))
        assert engine.run(cached) == 0
        assert engine.num_hits(request) == 8
        engine.finish(request)  # aborted while it waits
        assert engine.num_hits(request) == 8 and engine.allocate(request) and engine.load(request) == 8
        engine.compute(request, 16)
        writing = engine.begin_store(request)
        world.shards[0].store(writing.refs[:1], [request.rows[8:12]], engine.connectors[0])
        engine.abort_store(writing, done={0: [True, False]})
        engine.finish(request)
        assert engine.num_hits(Request("r2", request.tokens)) == 8, "one rank alone makes no chunk"
        engine.forget("r2")
        assert engine.run(request) == 8, "it can be stored again"


class LifecycleSuite(ShortLifecycleSuite):
    """What else befalls requests."""

    def test_a_waiting_request_asks_at_every_step(self, world: LifecycleWorld) -> None:
        engine = ServingEngine("a", world)
        assert engine.run(Request("first", list(range(12)))) == 0
        request = Request("r", list(range(16)))
        assert [engine.num_hits(request) for _ in range(5)] == [12] * 5
        assert engine.allocate(request) and engine.load(request) == 12
        engine.check_kv(request)
        engine.compute(request, 16)
        assert engine.store(request) == 16
        engine.finish(request)
        engine.finish(request)

    def test_what_was_found_is_still_there_when_room_comes_at_last(self, world: LifecycleWorld) -> None:
        """The allocation fails after the lookup; others fill the cache until there is memory."""
        engine, crowd = ServingEngine("a", world, num_rows=16), ServingEngine("crowd", world)
        assert engine.run(Request("first", list(range(12)))) == 0
        running, request = Request("running", list(range(900, 908))), Request("r", list(range(14)))
        assert engine.allocate(running)
        assert engine.num_hits(request) == 12 and not engine.allocate(request)
        for number in range(4):
            assert crowd.run(Request(f"{number}", list(range(100 * number + 100, 100 * number + 124)))) == 0
            assert engine.num_hits(request) == 12 and not engine.allocate(request)
        engine.finish(running)
        assert engine.allocate(request) and engine.load(request) == 12
        engine.check_kv(request)
        engine.finish(request)

    def test_a_request_that_gives_up_waiting_frees_what_it_held(self, world: LifecycleWorld) -> None:
        engine = ServingEngine("a", world)
        full = list(range(CHUNK * NUM_SLOTS))
        assert engine.run(Request("first", full)) == 0
        assert engine.num_hits(Request("r", full)) == len(full)
        newcomer = Request("new", list(range(500, 516)))
        assert engine.run(newcomer) == 0
        assert engine.num_hits(newcomer) == 0, "all room is held by the one that waits"
        engine.forget("r")
        assert engine.run(newcomer) == 0 and engine.num_hits(newcomer) == 16
        engine.forget("new")

    def test_a_failed_load_is_computed_and_stored_anew(self, world: LifecycleWorld) -> None:
        """A worker finds a chunk gone: what follows it is not delivered, and the chunks are cleared to be stored."""
        engine = ServingEngine("a", world)
        request = Request("r", list(range(16)))
        assert engine.run(request) == 0
        engine.overwrite_free_rows()
        assert engine.num_hits(request) == 16 and engine.allocate(request)
        broken = max(world.shards)
        lost = next(chunk for chunk in world.shards[broken].slots.committed() if chunk.key == engine.keys(request)[1])
        world.shards[broken].slots.free(lost.slot, lost.generation)
        assert engine.load(request) == 4
        engine.check_kv(request)
        engine.forget("r")
        assert engine.client.clear(engine.keys(request)[1:]).num_removed == 3
        engine.compute(request, 16)
        assert engine.store(request) == 16
        engine.finish(request)
        engine.overwrite_free_rows()
        assert engine.run(request) == 16

    def test_a_request_that_ends_during_its_load(self, world: LifecycleWorld) -> None:
        engine = ServingEngine("a", world)
        tokens = list(range(16))
        assert engine.run(Request("first", tokens)) == 0
        request = Request("r", tokens)
        assert engine.num_hits(request) == 16 and engine.allocate(request)
        loading = engine.begin_load(request)
        engine.finish(request)
        assert engine.client.clear(None).num_kept == 4, "the workers still read"
        engine.client.release([loading.lease_id])
        assert engine.client.clear(None).num_removed == 4

    def test_an_engine_that_fails_to_write_does_not_keep_another_from_it(self, world: LifecycleWorld) -> None:
        one, other = ServingEngine("one", world), ServingEngine("other", world)
        first, second = Request("1", list(range(8))), Request("2", list(range(8)))
        for engine, request in ((one, first), (other, second)):
            assert engine.allocate(request)
            engine.compute(request, 8)
        writing = one.begin_store(first)
        assert other.store(second) == 0
        one.abort_store(writing, done={})
        one.finish(first)
        assert other.store(second) == 8
        other.finish(second)
        assert one.run(Request("3", first.tokens)) == 8

    def test_a_store_that_is_cleared_before_the_workers_write_leaves_nothing(self, world: LifecycleWorld) -> None:
        engine = ServingEngine("a", world)
        request = Request("r", list(range(8)))
        assert engine.allocate(request)
        engine.compute(request, 8)
        writing = engine.begin_store(request)
        assert engine.client.clear(None).num_removed == 0
        assert engine.end_store(request, writing) == 0
        assert [shard.slots.num_committed for shard in world.shards.values()] == [0] * len(world.shards)
        assert engine.store(request) == 8, "it can be stored again"
        engine.finish(request)

    def test_many_requests_in_turn_keep_every_byte_apart(self, world: LifecycleWorld) -> None:
        """Conversations that share turns, on two engines, in a cache that holds a part of them."""
        engines = [ServingEngine(name, world) for name in ("one", "other")]
        num_hits = 0
        for step in range(30):
            conversation, turn = step % 5, step // 5
            tokens = [conversation % 2] * 8 + [1000 * conversation + token for token in range(4 * turn + 3)]
            num_hits += engines[step % 2].run(Request(f"{step}", tokens))
            engines[step % 2].overwrite_free_rows()
        assert num_hits > 0
