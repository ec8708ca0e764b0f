import pytest

from cluster.topology import RankPlace, Topology, parse_ranks_per_node, place_again, spread
from lmcache_ray.errors import ClusterError, ConfigError


def test_one_node_has_local_ranks_equal_to_world_ranks() -> None:
    topology = Topology.from_node_ids(["a"] * 3)
    assert topology.places == (RankPlace(0, 0, 3, "a"), RankPlace(1, 1, 3, "a"), RankPlace(2, 2, 3, "a"))
    assert (topology.world_size, topology.num_nodes) == (3, 1)


@pytest.mark.parametrize(
    ("node_ids", "local_ids", "local_sizes"),
    [
        ("aabb", [0, 1, 0, 1], [2, 2, 2, 2]),
        ("aaab", [0, 1, 2, 0], [3, 3, 3, 1]),
        ("abba", [0, 0, 1, 1], [2, 2, 2, 2]),
        ("bacab", [0, 0, 0, 1, 1], [2, 2, 1, 2, 2]),
    ],
)
def test_local_ids_count_the_ranks_of_a_node_in_world_order(
    node_ids: str, local_ids: list[int], local_sizes: list[int]
) -> None:
    places = Topology.from_node_ids(list(node_ids)).places
    assert [place.worker_id for place in places] == list(range(len(node_ids)))
    assert [place.local_worker_id for place in places] == local_ids
    assert [place.local_world_size for place in places] == local_sizes
    assert "".join(place.node_id for place in places) == node_ids


def test_nodes_come_in_the_order_of_their_first_rank() -> None:
    by_node = Topology.from_node_ids(["z", "a", "z", "m"]).ranks_by_node()
    assert list(by_node.items()) == [("z", (0, 2)), ("a", (1,)), ("m", (3,))]


def test_holders_by_node_leaves_out_nodes_that_hold_nothing() -> None:
    topology = Topology.from_node_ids(["a", "b", "a", "b"])
    assert topology.holders_by_node(range(4)) == {"a": (0, 2), "b": (1, 3)}
    assert topology.holders_by_node([0]) == {"a": (0,)}
    assert topology.holders_by_node([3, 2]) == {"a": (2,), "b": (3,)}


def test_a_topology_needs_ranks_that_know_their_node() -> None:
    with pytest.raises(ClusterError, match="at least one rank"):
        Topology.from_node_ids([])
    with pytest.raises(ClusterError, match=r"ranks \[1, 2\] reported an empty node id"):
        Topology.from_node_ids(["a", "", ""])


@pytest.mark.parametrize(
    ("world_size", "num_nodes", "counts"),
    [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1])],
)
def test_spread_is_even_with_the_remainder_on_the_first_nodes(
    world_size: int, num_nodes: int, counts: list[int]
) -> None:
    assert spread(world_size, num_nodes) == counts


def test_spread_takes_explicit_counts_as_they_are() -> None:
    assert spread(4, 2, (3, 1)) == [3, 1]
    assert spread(4, 2, (1, 3)) == [1, 3]


@pytest.mark.parametrize(
    ("world_size", "num_nodes", "ranks_per_node", "message"),
    [
        (4, 2, (3, 2), r"'3,2' makes 5 ranks; world_size is 4"),
        (4, 3, (3, 1), r"'3,1' names 2 nodes; there are 3"),
        (4, 2, (4, 0), r"'4,0': every node needs at least 1 rank"),
        (4, 2, (5, -1), r"'5,-1': every node needs at least 1 rank"),
        (4, 2, (), r"names 0 nodes; there are 2"),
        (2, 3, None, r"3 nodes for 2 ranks"),
        (0, 1, None, r"world_size must be at least 1; got 0"),
        (1, 0, None, r"number of nodes must be at least 1; got 0"),
    ],
)
def test_spread_refuses_counts_that_do_not_agree(
    world_size: int, num_nodes: int, ranks_per_node: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        spread(world_size, num_nodes, ranks_per_node)


def test_parse_ranks_per_node() -> None:
    assert parse_ranks_per_node("3,1") == (3, 1)
    assert parse_ranks_per_node(" 2 , 2,1 ") == (2, 2, 1)


@pytest.mark.parametrize("text", ["", "3,", "3;1", "3,-1", "3,one", "3,1.0", "²,1"])
def test_parse_ranks_per_node_refuses_anything_else(text: str) -> None:
    with pytest.raises(ConfigError, match="accepted: numbers"):
        parse_ranks_per_node(text)


def test_a_moved_rank_gets_the_lowest_free_number_of_its_new_node() -> None:
    places = dict(enumerate(Topology.from_node_ids(["a", "a", "b", "b"]).places))
    assert place_again(2, "a", places) == RankPlace(2, 2, 3, "a")
    assert place_again(0, "c", places) == RankPlace(0, 0, 1, "c")
    assert place_again(0, "b", {**places, 2: RankPlace(2, 0, 1, "c")}) == RankPlace(0, 0, 2, "b")
    assert place_again(1, "a", places) == places[1]
