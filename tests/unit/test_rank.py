"""A rank without Ray: tasks of plans between its paged KV and the arenas of its node."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.messages import LoadTask, PackedRefs, PackedRows, StoreTask
from cluster.rank import Rank, RankSetup
from cluster.rank_metadata import rank_metadata
from cluster.topology import RankPlace
from cluster.world import WorldSpec
from cluster.world_spec import world_spec
from lmcache_ray.arena.liveness import LivenessFile
from lmcache_ray.arena.slots import WordState
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.connector.paged import PagedConnector
from lmcache_ray.errors import ConfigError, RankUnavailableError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.shape_spec import parse_kvcache_shape_spec

C = 4


class RankWithKV(Rank):
    """A rank that knows the tensors of its paged KV."""

    def __init__(self, world: WorldSpec, setup: RankSetup, kv: list[torch.Tensor]) -> None:
        super().__init__(world, setup)
        self.kv = kv


MakeRank = Callable[..., RankWithKV]


@pytest.fixture
def make_rank(tmp_path: Path) -> Iterator[MakeRank]:
    """``make_rank(worker_id, use_mla=…, remote_url=…)`` of a world of two."""
    with ExitStack() as opened:

        def make(worker_id: int = 0, *, use_mla: bool = False, remote_url: str | None = None) -> RankWithKV:
            world = world_spec(
                LMCacheEngineConfig(
                    chunk_size=C, capacity_chunks=6, block_size=C, arena_dir=str(tmp_path), remote_url=remote_url
                ),
                model_name="m",
                layer_groups=parse_kvcache_shape_spec(f"(2,{1 if use_mla else 2},8,1,8):float16:2"),
                kv_shape=None,
                kv_dtype=None,
                rank_layouts=None,
                world_size=2,
                use_mla=use_mla,
                name=None,
                namespace=None,
            )
            place = RankPlace(worker_id, worker_id, 2, "node")
            shape = (1 if use_mla else 2, 8, C, 1, 8)
            caches = [torch.randn(shape).to(torch.float16) for _ in range(2)]
            connector = PagedConnector(world.layout.ranks[worker_id], caches)
            rank = RankWithKV(world, RankSetup(place, rank_metadata(world, place, 8), connector), caches)
            opened.callback(rank.close)
            return rank

        yield make


def refs(*slots: int, generation: int = 1) -> PackedRefs:
    return PackedRefs.pack([ChunkRef(bytes([slot]) * 32, slot, generation) for slot in slots])


def rows(*first_rows: int) -> PackedRows:
    return PackedRows.pack([np.arange(first, first + C) for first in first_rows])


def kv_rows(rank: RankWithKV, first: int) -> bytes:
    """The bytes of C rows, of every layer."""
    layers = [cache.reshape(cache.shape[0], -1, 8)[:, first : first + C] for cache in rank.kv]
    return b"".join(layer.contiguous().numpy().tobytes() for layer in layers)


def test_what_a_step_stores_a_later_one_loads(make_rank: MakeRank) -> None:
    rank = make_rank()
    stored = [kv_rows(rank, first) for first in (8, 0)]
    result = rank.step([], [StoreTask(refs(3, 5), rows(8, 0))], None)
    assert (result.loaded, result.stored) == ([], [b"\x01\x01"])
    result = rank.step([LoadTask(refs(3), rows(20), 0), LoadTask(refs(5), rows(16), 0)], [], None)
    assert result.loaded == [b"\x01", b"\x01"]
    assert [kv_rows(rank, first) for first in (20, 16)] == stored


def test_chunks_that_are_not_there_are_answered_false(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.step([], [StoreTask(refs(0), rows(0))], None)
    result = rank.step([LoadTask(refs(0, generation=2), rows(4), 0), LoadTask(refs(0, 1), rows(4, 8), 0)], [], None)
    assert result.loaded == [b"\x00", b"\x01\x00"]
    assert rank.step([], [StoreTask(refs(0), rows(4))], None).stored == [b"\x00"], "a generation is used once"


def test_a_neighbours_arena_is_read_by_its_path(make_rank: MakeRank) -> None:
    first, other = make_rank(0, use_mla=True), make_rank(1, use_mla=True)
    assert other.arena_path is None and other.shard is None
    stored = kv_rows(first, 12)
    first.step([], [StoreTask(refs(2), rows(12))], None)
    task = LoadTask(refs(2), rows(4), 0, arena_path=first.arena_path)
    assert other.step([task], [], None).loaded == [b"\x01"]
    assert kv_rows(other, 4) == stored
    gone = LoadTask(refs(2), rows(8), 0, arena_path=f"{first.arena_path}.gone")
    assert other.step([gone], [], None).loaded == [b"\x00"]


def test_a_payload_serves_the_tasks_that_name_their_part_of_it(make_rank: MakeRank) -> None:
    first, other = make_rank(0, use_mla=True), make_rank(1, use_mla=True)
    first.step([], [StoreTask(refs(0, 1), rows(0, 4))], None)
    payload = first.export(refs(1, 3, 0))
    assert payload.present == b"\x01\x00\x01"
    tasks = [
        LoadTask(refs(1, 3), rows(16, 20), 0, payload_start=0),
        LoadTask(refs(0), rows(24), 0, payload_start=2),
    ]
    assert other.step(tasks, [], payload).loaded == [b"\x01\x00", b"\x01"]
    assert [kv_rows(other, 16), kv_rows(other, 24)] == [kv_rows(first, 4), kv_rows(first, 0)]


def test_chunks_given_as_bytes_are_kept_like_stored_ones(make_rank: MakeRank) -> None:
    rank = make_rank()
    data = np.random.default_rng(0).integers(0, 256, (2, rank.layout.slot_nbytes), dtype=np.uint8)
    assert rank.take_in(refs(4, 5), [C, C], data) == b"\x01\x01"
    assert np.array_equal(rank.export(refs(4, 5)).data, data)


def test_a_start_within_a_chunk_leaves_its_first_rows_alone(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.step([], [StoreTask(refs(0), rows(0))], None)
    stored, untouched = kv_rows(rank, 0), kv_rows(rank, 8)
    part = PackedRows.pack([np.arange(11, 12)])
    assert rank.step([LoadTask(refs(0), part, 3)], [], None).loaded == [b"\x01"]
    after = np.frombuffer(kv_rows(rank, 8), dtype=np.uint8).reshape(-1, C, 16)
    assert np.array_equal(after[:, 3], np.frombuffer(stored, dtype=np.uint8).reshape(-1, C, 16)[:, 3])
    assert np.array_equal(after[:, :3], np.frombuffer(untouched, dtype=np.uint8).reshape(-1, C, 16)[:, :3])


def test_freed_and_settled_chunks_are_gone(make_rank: MakeRank) -> None:
    rank = make_rank()
    rank.step([], [StoreTask(refs(0, 1), rows(0, 4))], None)
    rank.free_slots(refs(0))
    assert rank.settle(refs(1)) == b"\x01"
    assert rank.export(refs(0, 1)).present == b"\x00\x00"
    assert rank.step([], [StoreTask(refs(0, 1, generation=2), rows(0, 4))], None).stored == [b"\x01\x01"]


def test_a_rank_that_holds_nothing_says_so(make_rank: MakeRank) -> None:
    rank = make_rank(1, use_mla=True)
    for call in (rank.export, rank.free_slots, rank.settle):
        with pytest.raises(RankUnavailableError, match="rank 1 holds no chunks"):
            call(refs(0))


def test_a_client_is_dead_when_its_lock_is_gone(make_rank: MakeRank, tmp_path: Path) -> None:
    rank = make_rank()
    with LivenessFile.create(tmp_path, "n", "c", "client") as alive:
        assert not rank.is_client_dead(str(alive.path))
    assert rank.is_client_dead(str(alive.path))


def test_what_a_living_client_notes_that_it_writes_is_unfinished_until_it_has_ended(
    make_rank: MakeRank, tmp_path: Path
) -> None:
    rank = make_rank()
    assert rank.shard is not None
    slots = rank.shard.slots
    with LivenessFile.create(
        tmp_path, rank.world.namespace, rank.world.name, "client", num_slots=slots.num_slots
    ) as client:
        with client.writing([(3, 7), (4, 8)]):
            slots.begin_write(3, 7)
            slots.begin_write(4, 8)
            rank.free_slots(refs(4, generation=8))  # a clear does not keep a writer from copying on
            slots.begin_write(5, 9)  # by somebody who notes nothing: the rank's process before this one
            report = rank.fence(100, wait_s=0.0)
            assert report.unfinished == ((3, 7), (4, 8))
            assert slots.word(5) == (9, WordState.FREE), "its writer is dead"
            settled = [rank.settle(refs(slot, generation=slot + 4)) for slot in (3, 4, 5)]
            assert settled == [b"\x00", b"\x00", b"\x01"]
        assert rank.settle(refs(3, generation=7)) == b"\x01"
        assert rank.fence(101, wait_s=0.0).unfinished == ()


def test_a_rank_whose_remote_store_is_refused_leaves_nothing(make_rank: MakeRank, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no backend has the scheme 'nothing'"):
        make_rank(remote_url="nothing://host")
    assert list(tmp_path.iterdir()) == []


def test_close_removes_the_arena_and_sweep_those_of_the_dead(make_rank: MakeRank, tmp_path: Path) -> None:
    first, other = make_rank(0), make_rank(1)
    Path(f"{first.arena_path}.0a1b2c3d.tmp").write_bytes(b"left by a killed rank")
    first.close()
    first.close()
    first.sweep()
    assert [str(path) for path in tmp_path.iterdir()] == [other.arena_path], "a living rank's is never touched"
