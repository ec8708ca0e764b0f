"""`get` where something is out of reach: what is answered, and which leases end."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from cluster.deadline import Deadline
from cluster.get_path import GetPath
from cluster.link import ClusterLink
from cluster.local_arenas import LocalArenas
from cluster.messages import LoadItem, PackedRefs, PlannedLoad
from cluster.requests import Request
from cluster.views import CachedViews
from lmcache_ray.arena.arena import Arena
from lmcache_ray.arena.liveness import LivenessFile, living_clients
from lmcache_ray.arena.spec import ArenaGeometry, ArenaSpec
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import DeadlineError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.slot_table import COUNTER_BITS
from lmcache_ray.index_service import LeaseNames
from lmcache_ray.keys import ChunkHasher
from lmcache_ray.layout import Placement, ShardSpec, uniform_world

CHUNK = 4
LAYOUT = uniform_world(
    [ShardSpec((0, 1), range(1), 8, KVDtype.FLOAT16)], chunk_size=CHUNK, world_size=1, placement=Placement.PER_RANK
)
TOKENS = list(range(3 * CHUNK))


class OneRank:
    """A link and a coordinator of a world of one rank, whose arena has the chunks of `TOKENS`. `kept` is the answer."""

    def __init__(self, arena: Arena) -> None:
        self.world = SimpleNamespace(layout=LAYOUT, name="c")
        self.liveness = LivenessFile.create(arena.path.parent, "n", "c", "client", num_slots=4)
        self.hasher = ChunkHasher("m", chunk_size=CHUNK)
        self.lease_names = LeaseNames("client", "client")
        self.hellos = [SimpleNamespace(arena_path=str(arena.path))]
        self.coordinator = self
        self.arena = arena
        self.kept = True
        self.is_silent = False
        self.ended: list[str] = []
        self.abandoned: list[str] = []
        self.floor = 0
        self.refs = [ChunkRef(key, number, 10 + number) for number, key in enumerate(self.hasher.keys(TOKENS))]
        for ref in self.refs:
            arena.slots.begin_write(ref.slot, ref.generation)
            arena.slots.data(ref.slot)[:] = np.random.default_rng(ref.slot).integers(0, 256, len(arena.slots.data(0)))
            arena.slots.commit(ref.slot, ref.generation, ref.key, CHUNK)

    def shown(self) -> tuple[tuple[int, int], ...]:
        """What a coordinator that has lost its memory would find."""
        self.liveness.tidy()
        (client,) = living_clients(self.arena.path.parent, "n", "c")
        return client.held

    def is_here(self, rank: int) -> bool:
        return True

    def deadline(self) -> Deadline:
        return Deadline(5.0)

    def prepare_loads(self, items: Sequence[LoadItem], *, timeout_s: float) -> list[PlannedLoad]:
        if self.is_silent:
            raise DeadlineError("the coordinator (prepare_loads) did not answer")
        self.arena.slots.raise_floor(self.floor)
        return [
            PlannedLoad(item.start, PackedRefs.pack(self.refs[item.start :]), item.keep and self.kept) for item in items
        ]

    def release(self, lease_ids: Sequence[str]) -> None:
        self.ended += lease_ids

    def abandon(self, lease_id: str) -> None:
        self.abandoned.append(lease_id)

    def suspect(self) -> None:
        raise AssertionError("the arena stays the same")


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[OneRank]:
    geometry = ArenaGeometry(num_slots=4, slot_nbytes=LAYOUT.ranks[0].slot_nbytes)
    spec = ArenaSpec("n", "c", 0, 1, LAYOUT.fingerprint, geometry)
    with Arena.create(spec, tmp_path, node_id="node", now=time.time()) as arena:
        rank = OneRank(arena)
        yield rank
        rank.liveness.close()


def path_of(rank: OneRank) -> GetPath:
    link = cast(ClusterLink, rank)
    return GetPath(link, LocalArenas(link))


def view(rank: OneRank, start: int = 0) -> CachedViews:
    (found,) = path_of(rank).view([Request(TOKENS, start=start)])
    assert isinstance(found, CachedViews)
    return found


def copy(rank: OneRank, start: int = 0) -> torch.Tensor:
    (answer,) = path_of(rank).get([Request(TOKENS, start=start)])
    assert not isinstance(answer, Exception)
    return answer[1][0][0]


def joined(found: CachedViews) -> torch.Tensor:
    return torch.cat(found.shards[0][0], dim=2)


@pytest.mark.parametrize("start", [0, 1, CHUNK, 3 * CHUNK - 1])
def test_views_equal_copies_from_any_start(rank: OneRank, start: int) -> None:
    with view(rank, start) as found:
        assert (found.num_tokens, found.copied_ranks, rank.ended) == (3 * CHUNK, (), [])
        assert torch.equal(joined(found).view(torch.uint8), copy(rank, start).view(torch.uint8))
    assert len(rank.ended) == 2, "that of the copy, and that of the views"


def test_what_may_not_be_viewed_is_copied_and_its_lease_ends_with_the_call(rank: OneRank) -> None:
    rank.kept = False
    found = view(rank, 2)
    assert (found.copied_ranks, len(rank.ended)) == ((0,), 1)
    assert torch.equal(joined(found).view(torch.uint8), copy(rank, 2).view(torch.uint8))


def test_a_chunk_that_is_gone_ends_what_is_found(rank: OneRank) -> None:
    rank.arena.slots.begin_write(rank.refs[1].slot, 99)
    with view(rank) as found:
        assert (found.num_tokens, len(found.shards[0][0]), found.is_intact()) == (CHUNK, 1, True)
    rank.arena.slots.begin_write(rank.refs[0].slot, 100)
    nothing = view(rank)
    assert tuple(nothing) == (0, [[[]]]) and len(rank.ended) == 2, "and a lease of nothing ends at once"


def test_an_arena_out_of_reach_is_a_miss(rank: OneRank) -> None:
    rank.hellos[0].arena_path += "-gone"
    found = view(rank)
    assert (found.num_tokens, found.copied_ranks, len(rank.ended)) == (0, (0,), 1)


def test_a_lease_that_may_have_been_granted_is_given_up(rank: OneRank) -> None:
    rank.is_silent = True
    path = path_of(rank)
    answers = path.view([Request(TOKENS), Request(TOKENS)])
    assert all(isinstance(answer, DeadlineError) for answer in answers)
    assert len(set(rank.abandoned)) == 2
    path.get([Request(TOKENS)])
    assert len(rank.abandoned) == 2, "those of copies end by time"


# -- views and the next coordinator -----------------------------------------------------------------------------------


def test_what_views_show_stands_where_the_next_coordinator_finds_it_until_the_last_has_ended(rank: OneRank) -> None:
    held = tuple((ref.slot, ref.generation) for ref in rank.refs)
    first, second = view(rank), view(rank, start=CHUNK)
    assert rank.shown() == held
    second.close()
    assert rank.shown() == held
    first.close()
    assert rank.shown() == ()


def test_a_coordinator_that_came_between_plan_and_note_makes_copies(rank: OneRank) -> None:
    """It has read the notes before this one was written: nobody would keep the slots from being used again."""
    rank.floor = 2 << COUNTER_BITS
    with view(rank) as found:
        assert found.num_tokens == len(TOKENS) and found.copied_ranks == (0,)
        assert rank.shown() == () and len(rank.ended) == 1


def test_a_ranks_return_within_one_epoch_leaves_views_what_they_are(rank: OneRank) -> None:
    rank.floor = 5
    with view(rank) as found:
        assert found.copied_ranks == ()
