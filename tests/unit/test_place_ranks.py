"""Which node each rank goes to."""

import pytest

from cluster.topology import place_ranks
from lmcache_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("world_size", "alive", "ranks_per_node", "placed"),
    [
        (4, "ab", None, "aabb"),
        (5, "ab", None, "aaabb"),
        (2, "abc", None, "ab"),
        (3, "a", None, "aaa"),
        (4, "ab", (3, 1), "aaab"),
        (4, "abc", (1, 3), "abbb"),
        (2, "abc", (2,), "aa"),
    ],
)
def test_ranks_are_spread_over_the_alive_nodes(
    world_size: int, alive: str, ranks_per_node: tuple[int, ...] | None, placed: str
) -> None:
    assert place_ranks(world_size, list(alive), ranks_per_node=ranks_per_node) == list(placed)


def test_nodes_named_by_hand_are_taken_in_rank_order() -> None:
    assert place_ranks(3, ["a", "b"], nodes=["b", "a", "b"]) == ["b", "a", "b"]


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "named"),
    [
        (["a", "b"], (1, 1), "give one of them"),
        (["a"], None, "one node for each of 2 ranks; got 1"),
        (["a", "c"], None, "'c' is not alive; alive nodes: a, b"),
        (None, (1, 1, 1), "names 3 nodes; 2 are alive"),
        (None, (2, 1), "'2,1' makes 3 ranks; world_size is 2"),
        (None, (2, 0), "every node needs at least 1 rank"),
    ],
)
def test_places_that_do_not_agree_are_refused(
    nodes: list[str] | None, ranks_per_node: tuple[int, ...] | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        place_ranks(2, ["a", "b"], nodes=nodes, ranks_per_node=ranks_per_node)
