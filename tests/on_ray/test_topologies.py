"""Four ranks on two nodes, even and uneven, each rank its own bytes or one copy for all (MLA): the same bytes by every
way in and out.

The ways: `store` and `retrieve` led by the driver, by each rank's own engine (SPMD), and the driver's `put` and `get`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cluster.client import CacheCluster, ClusterStatus
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.on_ray import rank_functions
from tests.on_ray.conftest import StartCluster
from tests.on_ray.kv_bytes import GroupBytes, assert_same, odd_shards, repeated, shard_bytes

CHUNK = 4
NUM_TOKENS = 4 * CHUNK + 3
FULL = 4 * CHUNK
KEPT = slice(0, FULL)
EVEN = ((0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2))
UNEVEN = ((0, 0, 3), (1, 1, 3), (2, 2, 3), (3, 0, 1))


@dataclass(frozen=True)
class Setup:
    """`places` are (world rank, local rank, local world size) as they must come out."""

    ranks_per_node: tuple[int, int] | None
    use_mla: bool
    spec: str
    places: tuple[tuple[int, int, int], ...]


SETUPS = {
    "even": Setup(None, False, "(2,2,16,2,4):float16:2;(1,2,16,1,8):bfloat16:1", EVEN),
    "uneven": Setup((3, 1), False, "(1,2,16,1,3):float32:1;(2,2,16,2,5):float8_e4m3fn:2;(1,2,16,3,1):int8:1", UNEVEN),
    "even, MLA": Setup(None, True, "(2,1,16,1,24):uint8:2;(1,1,16,1,8):float8_e5m2:1", EVEN),
    "uneven, MLA": Setup((3, 1), True, "(1,16,12):bfloat16:1;(1,1,16,1,6):float16:1;(2,1,16,1,5):int8:2", UNEVEN),
}


@dataclass
class World:
    """A cluster with `setup`, and a supply of prompts that are not alike."""

    setup: Setup
    cluster: CacheCluster
    num_prompts: int = 0

    def new_prompt(self) -> list[int]:
        self.num_prompts += 1
        return [1000 * self.num_prompts + position for position in range(NUM_TOKENS)]

    def fill(self) -> None:
        self.cluster.run_on_ranks(rank_functions.fill, self.num_prompts)

    def poison(self) -> None:
        self.cluster.run_on_ranks(rank_functions.poison)

    def read(self, rows: np.ndarray) -> list[GroupBytes]:
        return self.cluster.run_on_ranks(rank_functions.read_rows, rows)

    def rows(self) -> np.ndarray:
        return np.random.default_rng(self.num_prompts).permutation(64)[:NUM_TOKENS]

    def check_loaded(self, rows: np.ndarray, expected: list[GroupBytes]) -> None:
        """Every rank has the expected bytes in the rows of full chunks, and nothing was written elsewhere."""
        assert_same(self.read(rows[KEPT]), expected, KEPT)
        for touched in self.cluster.run_on_ranks(rank_functions.touched_rows):
            assert set(touched) <= set(rows[KEPT].tolist())


@pytest.fixture(scope="module", params=SETUPS.values(), ids=SETUPS)
def world(request: pytest.FixtureRequest, start_cluster: StartCluster) -> Iterator[World]:
    setup: Setup = request.param
    with start_cluster(
        {"chunk_size": CHUNK},
        layer_groups=parse_kvcache_shape_spec(setup.spec),
        world_size=4,
        use_mla=setup.use_mla,
        ranks_per_node=setup.ranks_per_node,
    ) as cluster:
        yield World(setup, cluster)
        cluster.check_integrity()
        assert cluster.status().leases == 0


def test_ranks_know_their_places(world: World, ray_nodes: list[str]) -> None:
    ranks = world.cluster.status().ranks
    assert tuple((rank.worker_id, rank.local_worker_id, rank.local_world_size) for rank in ranks) == world.setup.places
    counts = [sum(rank.node_id == node for rank in ranks) for node in ray_nodes]
    assert counts == list(world.setup.ranks_per_node or (2, 2))
    assert world.cluster.run_on_ranks(rank_functions.place) == [(*place, 4) for place in world.setup.places]


def test_rows_come_back_on_every_rank(world: World) -> None:
    tokens, rows = world.new_prompt(), world.rows()
    world.fill()
    stored = world.read(rows)
    assert world.cluster.lookup(tokens) == 0
    assert world.cluster.store(tokens, rows) == FULL
    world.poison()
    other_rows = rows[::-1].copy()
    mask = world.cluster.retrieve(tokens, other_rows)
    assert mask.tolist() == [True] * FULL + [False] * (NUM_TOKENS - FULL)
    world.check_loaded(other_rows, stored)


def test_get_gives_what_was_stored(world: World) -> None:
    tokens, rows = world.new_prompt(), world.rows()
    world.fill()
    stored = world.read(rows)
    world.cluster.store(tokens, rows)
    num_tokens, shards = world.cluster.get(tokens, 6)
    assert num_tokens == FULL
    holders = world.cluster.link.world.layout.holders
    assert_same(shard_bytes(shards), [stored[rank] for rank in holders], slice(6, FULL))


def test_retrieve_gives_what_was_put(world: World) -> None:
    tokens, rows = world.new_prompt(), world.rows()
    shards = odd_shards(world.cluster.link.world.layout, NUM_TOKENS, seed=world.num_prompts)
    assert world.cluster.put(tokens, shards) == FULL
    world.poison()
    assert int(world.cluster.retrieve(tokens, rows).sum()) == FULL
    world.check_loaded(rows, repeated(shard_bytes(shards), 4))
    num_tokens, copies = world.cluster.get(tokens)
    assert num_tokens == FULL
    assert_same(shard_bytes(copies), shard_bytes(shards), KEPT)


def test_spmd_calls_and_driver_calls_see_the_same_bytes(world: World) -> None:
    tokens, rows = world.new_prompt(), world.rows()
    world.fill()
    stored = world.read(rows)
    counts = world.cluster.run_on_ranks(rank_functions.store, tokens, rows)
    assert max(counts) == FULL
    assert world.cluster.lookup(tokens) == FULL
    assert world.cluster.run_on_ranks(rank_functions.lookup, tokens) == [FULL] * 4
    world.poison()
    assert int(world.cluster.retrieve(tokens, rows).sum()) == FULL
    world.check_loaded(rows, stored)
    world.poison()
    masks = world.cluster.run_on_ranks(rank_functions.retrieve, tokens, rows)
    assert masks == [[True] * FULL + [False] * (NUM_TOKENS - FULL)] * 4
    world.check_loaded(rows, stored)


def test_spmd_retrieves_what_the_driver_put_and_misses_what_nobody_stored(world: World) -> None:
    unknown = world.new_prompt()
    tokens, rows = world.new_prompt(), world.rows()
    shards = odd_shards(world.cluster.link.world.layout, NUM_TOKENS, seed=world.num_prompts)
    world.cluster.put(tokens, shards)
    world.poison()
    assert world.cluster.run_on_ranks(rank_functions.retrieve, unknown, rows) == [[False] * NUM_TOKENS] * 4
    assert sum(world.cluster.run_on_ranks(rank_functions.retrieve, tokens, rows)[3]) == FULL
    world.check_loaded(rows, repeated(shard_bytes(shards), 4))


def test_a_chunk_is_held_once_with_mla_and_by_every_rank_without(world: World, arena_dir: Path) -> None:
    status = world.cluster.status()
    ready = status.tiers["cpu"].ready
    assert ready > 0
    holders = [0] if world.setup.use_mla else [0, 1, 2, 3]
    assert [rank.slots_used for rank in status.ranks] == [ready if rank in holders else 0 for rank in range(4)]
    assert [rank.worker_id for rank in status.ranks if rank.slots_total] == holders
    assert [rank.worker_id for rank in status.ranks if rank.arena_path is not None] == holders
    arenas = [name for name in os.listdir(arena_dir) if name.endswith(".arena")]
    assert len(arenas) == len(holders)


def test_a_clear_frees_the_slots_of_every_holder(world: World) -> None:
    used = world.cluster.status().tiers["cpu"].ready
    cleared = world.cluster.clear()
    assert (cleared.num_removed, cleared.num_kept, cleared.pending) == (used, 0, ())
    per_rank = [used, 0, 0, 0] if world.setup.use_mla else [used] * 4
    assert cleared.removed == {"cpu": per_rank}
    assert {rank.slots_used for rank in world.cluster.status().ranks} == {0}


def test_the_coordinator_moves_no_bytes_and_loads_no_torch(world: World) -> None:
    status: ClusterStatus = world.cluster.status()
    assert "libtorch" not in Path(f"/proc/{status.coordinator_pid}/maps").read_text()
    assert all("libtorch" in Path(f"/proc/{rank.pid}/maps").read_text() for rank in status.ranks)
