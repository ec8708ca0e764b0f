"""Views of chunks: shapes, bytes, whom a write harms, and when the lease ends."""

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster.views import CachedViews, ViewedChunks, ViewLease, split_chunks, view_chunks
from lmcache_ray.arena.arena import Arena
from lmcache_ray.arena.copy_on_write import CopyOnWriteMaps
from lmcache_ray.arena.mapped import ArenaMap
from lmcache_ray.arena.spec import ArenaGeometry, ArenaSpec
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.layout import RankLayout, ShardSpec

CHUNK = 4
LAYOUT = RankLayout(
    CHUNK,
    (ShardSpec((0, 2), range(1), 8, KVDtype.FLOAT16), ShardSpec((1,), range(1), 6, KVDtype.BFLOAT16, kv_size=1)),
)
FINGERPRINT = b"f" * 32
REFS = tuple(ChunkRef(bytes([65 + number]) * 32, slot, 100 + number) for number, slot in enumerate((2, 0, 3)))
WHOLE = tuple(range(CHUNK) for _ in REFS)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """Each chunk's bytes are all different from the others'."""
    geometry = ArenaGeometry(num_slots=4, slot_nbytes=LAYOUT.slot_nbytes)
    spec = ArenaSpec("n", "c", 0, 1, FINGERPRINT, geometry)
    with Arena.create(spec, tmp_path, node_id="node", now=0.0) as arena:
        for number, ref in enumerate(REFS):
            arena.slots.begin_write(ref.slot, ref.generation)
            arena.slots.data(ref.slot)[:] = np.random.default_rng(number).integers(0, 256, LAYOUT.slot_nbytes)
            arena.slots.commit(ref.slot, ref.generation, ref.key, CHUNK)
        yield arena


class Looked:
    """An arena as a client has it that looks at it."""

    def __init__(self, arena: Arena) -> None:
        self.mapped = ArenaMap.open(arena.path, expected_fingerprint=FINGERPRINT)
        self.maps = CopyOnWriteMaps(self.mapped.copy_on_write)


@pytest.fixture
def looked(arena: Arena) -> Looked:
    return Looked(arena)


class Ends:
    """How leases ended."""

    def __init__(self) -> None:
        self.released: list[str] = []
        self.abandoned: list[str] = []

    def lease(self, name: str = "a") -> ViewLease:
        return ViewLease(name, release=self.released.append, abandon=self.abandoned.append)


def views_of(looked: Looked, lease: ViewLease, rows: tuple[range, ...] = WHOLE) -> CachedViews:
    slots = [ref.slot for ref in REFS]
    shard = view_chunks(looked.maps, looked.mapped.spec.geometry, slots, LAYOUT, rows, lease)
    return CachedViews(sum(map(len, rows)), [shard], viewed=[ViewedChunks(looked.mapped.slots, REFS)], lease=lease)


def slot_bytes(arena: Arena, number: int, group: int) -> np.ndarray:
    spec = LAYOUT.groups[group]
    start = LAYOUT.group_offsets[group]
    raw = arena.slots.data(REFS[number].slot)[start : start + spec.token_nbytes * CHUNK]
    return raw.reshape(spec.kv_size, spec.num_layers, CHUNK, spec.row_nbytes)


def test_each_chunk_of_each_group_is_a_tensor_over_its_slot(arena: Arena, looked: Looked) -> None:
    with views_of(looked, Ends().lease()) as (num_tokens, shards):
        assert (num_tokens, len(shards), [len(group) for group in shards[0]]) == (3 * CHUNK, 1, [3, 3])
        for group, spec in enumerate(LAYOUT.groups):
            for number, tensor in enumerate(shards[0][group]):
                assert tensor.shape == (spec.kv_size, spec.num_layers, CHUNK, spec.hidden_dim)
                assert np.array_equal(tensor.view(torch.uint8).numpy(), slot_bytes(arena, number, group))
                assert tensor.untyped_storage().nbytes() == spec.token_nbytes * CHUNK, "not the whole arena's"


def test_first_and_last_chunk_are_cut_to_the_wanted_rows(arena: Arena, looked: Looked) -> None:
    rows = (range(1, CHUNK), range(CHUNK), range(2))
    with views_of(looked, Ends().lease(), rows) as (_, shards):
        joined = torch.cat(shards[0][0], dim=2).view(torch.uint8).numpy()
        whole = np.concatenate([slot_bytes(arena, number, 0) for number in range(3)], axis=2)
        assert np.array_equal(joined, whole[:, :, 1 : 2 * CHUNK + 2])


def test_a_write_is_seen_in_these_views_alone(arena: Arena, looked: Looked) -> None:
    before = slot_bytes(arena, 0, 0).copy()
    with views_of(looked, Ends().lease()) as mine, views_of(looked, Ends().lease()) as other:
        mine.shards[0][0][0].fill_(1.5)
        assert bool((mine.shards[0][0][0] == 1.5).all())
        assert np.array_equal(other.shards[0][0][0].view(torch.uint8).numpy(), before)
        with views_of(looked, Ends().lease()) as later:
            assert np.array_equal(later.shards[0][0][0].view(torch.uint8).numpy(), before)
    assert np.array_equal(slot_bytes(arena, 0, 0), before)
    del mine, other, later
    for _ in range(3):  # whichever mapping they are given
        with views_of(looked, Ends().lease()) as found:
            assert np.array_equal(found.shards[0][0][0].view(torch.uint8).numpy(), before)


def test_a_mapping_is_in_one_reader_s_hands_and_goes_to_the_next_while_nobody_wrote(looked: Looked) -> None:
    def place(found: CachedViews) -> int:
        return found.shards[0][0][0].data_ptr()

    with views_of(looked, Ends().lease()) as mine, views_of(looked, Ends().lease()) as other:
        first, second = place(mine), place(other)
        assert first != second
        mine.shards[0][0][0].sum()
        unwritten = other.shards[0][1][2].clone()
        other.shards[0][1][2].fill_(1.0)
    del mine
    with views_of(looked, Ends().lease()) as found:
        assert place(found) == first
        del other
        with views_of(looked, Ends().lease()) as third:  # not the one that was written
            assert torch.equal(third.shards[0][1][2].view(torch.uint8), unwritten.view(torch.uint8))


def test_close_ends_the_lease_once_and_tensors_stay_readable(arena: Arena, looked: Looked) -> None:
    ends = Ends()
    found = views_of(looked, ends.lease())
    tensor = found.shards[0][0][0]
    found.close()
    found.close()
    assert ends.released == ["a"] and found.is_intact()
    looked.mapped.close()
    arena.close()
    assert torch.equal(tensor.clone().view(torch.uint8), tensor.view(torch.uint8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del found, tensor
        gc.collect()
    assert ends.abandoned == []


def test_intact_is_what_the_cache_did_not_touch(arena: Arena, looked: Looked) -> None:
    found = views_of(looked, Ends().lease())
    found.close()
    assert found.is_intact()
    arena.slots.begin_write(REFS[1].slot, 200)
    assert not found.is_intact()


def test_the_lease_lasts_as_long_as_any_tensor_and_a_forgotten_one_is_warned_of(looked: Looked) -> None:
    ends = Ends()
    num_tokens, shards = views_of(looked, ends.lease())
    gc.collect()
    assert num_tokens == 3 * CHUNK and ends.abandoned == [], "taken apart, but not let go"
    kept = shards[0][1][2][0].view(torch.uint8).numpy()
    del shards
    gc.collect()
    assert ends.abandoned == []
    with pytest.warns(ResourceWarning, match=r"dropped without close"):
        del kept
        gc.collect()
    assert (ends.released, ends.abandoned) == ([], ["a"])


def test_copies_come_in_the_shape_of_views() -> None:
    dense = [torch.arange(2 * 2 * 9 * 8).view(2, 2, 9, 8), torch.arange(9 * 6).view(1, 1, 9, 6)]
    rows = (range(1, CHUNK), range(CHUNK), range(2))
    for group, chunks in enumerate(split_chunks(dense, rows)):
        assert [chunk.shape[2] for chunk in chunks] == [3, 4, 2]
        assert torch.equal(torch.cat(chunks, dim=2), dense[group])
    assert [[chunk.shape[2] for chunk in chunks] for chunks in split_chunks(dense, rows[:2])] == [[3, 4], [3, 4]]
    assert split_chunks(dense, ()) == [[], []]


def test_it_says_what_is_a_copy() -> None:
    found = CachedViews(0, [[[]], [[]]], copied_ranks=[1])
    assert found.is_copied and found.copied_ranks == (1,) and found.is_intact()
    assert repr(found) == "<CachedViews of 0 tokens of 2 ranks, copies of ranks [1]>"
    found.close()
