"""Byte offsets of a shard, layouts that cannot be, and what the fingerprint covers."""

from dataclasses import replace

import pytest

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import LayoutError
from lmcache_ray.layout import ALIGNMENT, Encoding, Placement, RankLayout, ShardSpec, WorldLayout, uniform_world

WIDE = ShardSpec((0, 2, 5), range(0, 2), 4, KVDtype.FLOAT16)
NARROW = ShardSpec((1, 3), range(0, 1), 3, KVDtype.UINT8)


def world(
    *groups: ShardSpec, chunk_size: int = 4, world_size: int = 2, placement: Placement = Placement.PER_RANK
) -> WorldLayout:
    return uniform_world(groups, chunk_size=chunk_size, world_size=world_size, placement=placement)


def test_sizes_of_a_group() -> None:
    assert (WIDE.num_layers, WIDE.num_heads, WIDE.hidden_dim, WIDE.row_nbytes) == (3, 2, 8, 16)
    assert WIDE.token_nbytes == 2 * 3 * 16
    assert (NARROW.row_nbytes, replace(NARROW, kv_size=1).token_nbytes) == (3, 6)


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [(dtype, 4 if dtype == "float32" else 2 if "16" in dtype else 1) for dtype in KVDtype]
)
def test_an_element_has_the_size_of_its_dtype(dtype: KVDtype, itemsize: int) -> None:
    assert ShardSpec((0,), range(1), 1, dtype).row_nbytes == itemsize


def test_groups_follow_each_other_on_aligned_borders() -> None:
    rank = RankLayout(4, (NARROW, WIDE, replace(NARROW, layers=(7,))))
    assert rank.group_offsets == (0, 64, 64 + 384)
    assert rank.slot_nbytes == 64 + 384 + 64
    assert all(offset % ALIGNMENT == 0 for offset in (*rank.group_offsets, rank.slot_nbytes))
    assert rank.token_nbytes == 12 + 96 + 6 and rank.chunk_nbytes == 4 * 114


def test_layers_are_found_by_their_place_among_the_ranks_layers() -> None:
    assert RankLayout(4, (WIDE, NARROW)).layer_positions() == ((0, 2, 4), (1, 3))
    assert RankLayout(4, (WIDE, NARROW)).num_layers == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layers": ()}, "layers"),
        ({"layers": (1, 0)}, "layers"),
        ({"layers": (0, 0)}, "layers"),
        ({"layers": (-1, 0)}, "layers"),
        ({"heads": range(0)}, "heads"),
        ({"heads": range(0, 4, 2)}, "heads"),
        ({"heads": range(-1, 1)}, "heads"),
        ({"heads": 2}, "heads must be a range; got 2"),
        ({"head_size": 0}, "head_size"),
        ({"kv_size": 3}, "kv_size"),
        ({"replica": -1}, "replica"),
    ],
)
def test_a_group_that_cannot_be_names_the_field(change: dict[str, object], named: str) -> None:
    with pytest.raises(LayoutError, match=named):
        replace(WIDE, **change)  # type: ignore[arg-type]


def test_ranks_and_worlds_that_cannot_be() -> None:
    with pytest.raises(LayoutError, match="chunk_size"):
        RankLayout(0, (WIDE,))
    with pytest.raises(LayoutError, match="at least one layer group"):
        RankLayout(4, ())
    with pytest.raises(LayoutError, match="two groups"):
        RankLayout(4, (WIDE, replace(NARROW, layers=(2,))))
    with pytest.raises(LayoutError, match="at least one rank"):
        WorldLayout((), Placement.PER_RANK)
    with pytest.raises(LayoutError, match="disagree on chunk_size"):
        WorldLayout((RankLayout(4, (WIDE,)), RankLayout(8, (WIDE,))), Placement.PER_RANK)
    with pytest.raises(LayoutError, match="first-rank"):
        WorldLayout((RankLayout(4, (WIDE,)), RankLayout(4, (NARROW,))), Placement.FIRST_RANK)


def test_a_uniform_world_splits_heads_or_copies_all() -> None:
    per_rank = world(WIDE, NARROW, world_size=3)
    assert [[group.heads for group in rank.groups] for rank in per_rank.ranks] == [
        [range(0, 2), range(0, 1)],
        [range(2, 4), range(1, 2)],
        [range(4, 6), range(2, 3)],
    ]
    assert (per_rank.holders, per_rank.holder_of(2)) == ((0, 1, 2), 2)
    first = world(WIDE, world_size=3, placement=Placement.FIRST_RANK)
    assert [rank.groups[0].heads for rank in first.ranks] == [range(0, 2)] * 3
    assert (first.holders, first.holder_of(2)) == ((0,), 0)


CHANGES = {
    "layers": replace(WIDE, layers=(0, 2, 4)),
    "heads and head size swapped": replace(WIDE, heads=range(0, 4), head_size=2),
    "other heads": replace(WIDE, heads=range(2, 4)),
    "dtype of the same size": replace(WIDE, dtype=KVDtype.BFLOAT16),
    "replica": replace(WIDE, replica=1),
    "kv_size": replace(WIDE, kv_size=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_covers_what_gives_a_byte_its_meaning(change: str) -> None:
    assert world(CHANGES[change]).fingerprint != world(WIDE).fingerprint


def test_the_fingerprint_of_a_world() -> None:
    prints = [
        world(WIDE),
        world(WIDE, NARROW),
        world(NARROW, WIDE),
        world(WIDE, chunk_size=8),
        world(WIDE, world_size=3),
        world(WIDE, placement=Placement.FIRST_RANK),
    ]
    assert len({layout.fingerprint for layout in prints}) == len(prints)
    assert all(len(layout.fingerprint) == 32 for layout in prints)
    assert world(WIDE).fingerprint == world(replace(WIDE, encoding=Encoding("tokens"))).fingerprint
    assert world(WIDE).fingerprint.hex() == world(WIDE).fingerprint.hex()


def test_first_rank_worlds_of_any_size_share_their_bytes() -> None:
    sizes = [world(WIDE, world_size=size, placement=Placement.FIRST_RANK).fingerprint for size in (1, 2, 8)]
    assert len(set(sizes)) == 1
