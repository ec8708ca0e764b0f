"""Which rank sits on which node, and what number it has there. Pure.

Ranks are placed first and asked second: every actor reports the id of the node it really runs on, and local ranks
follow from those reports alone. Host names and addresses say nothing, since several nodes may share one machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lmcache_ray.errors import ClusterError, ConfigError

MAX_WORLD_SIZE: Final = 4096
"""More ranks than this in one world are taken for a slip of the pen."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs."""

    worker_id: int
    """The rank in the world."""
    local_worker_id: int
    """Its number among the ranks of its node, in the order of their world ranks."""
    local_world_size: int
    """Ranks on its node."""
    node_id: str


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of every rank of a world, in rank order."""

    places: tuple[RankPlace, ...]

    @classmethod
    def from_node_ids(cls, node_ids: Sequence[str]) -> "Topology":
        """The topology in which rank r runs on node ``node_ids[r]``. The ranks of a node need not be neighbours.

        Raises `ClusterError` when there is no rank, or a rank reports no node.
        """
        if not node_ids:
            raise ClusterError("a topology needs the node id of at least one rank; got none")
        ranks_on = _ranks_by_node(node_ids)
        if "" in ranks_on:
            raise ClusterError(f"ranks {list(ranks_on[''])} reported an empty node id")
        return cls(
            tuple(
                RankPlace(rank, ranks_on[node_id].index(rank), len(ranks_on[node_id]), node_id)
                for rank, node_id in enumerate(node_ids)
            )
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that have a rank."""
        return len(self.ranks_by_node())

    def ranks_by_node(self) -> Mapping[str, tuple[int, ...]]:
        """Node id -> its ranks in ascending order. Nodes come in the order of their first rank."""
        return _ranks_by_node([place.node_id for place in self.places])

    def holders_by_node(self, holders: Iterable[int]) -> Mapping[str, tuple[int, ...]]:
        """Node id -> those of its ranks that are in `holders` (the ranks whose arenas hold bytes).

        Nodes without a holder are left out: they need no shared memory.
        """
        wanted = set(holders)
        held = {node: tuple(rank for rank in ranks if rank in wanted) for node, ranks in self.ranks_by_node().items()}
        return {node: ranks for node, ranks in held.items() if ranks}


def place_again(rank: int, node_id: str, others: Mapping[int, RankPlace]) -> RankPlace:
    """The place of a rank whose process is new on `node_id`: the lowest local number that no other rank there has.

    The others keep theirs; what they were told of the number of ranks on their node may be out of date.
    """
    taken = {place.local_worker_id for other, place in others.items() if other != rank and place.node_id == node_id}
    local = next(number for number in range(len(taken) + 1) if number not in taken)
    return RankPlace(rank, local, len(taken) + 1, node_id)


def spread(world_size: int, num_nodes: int, ranks_per_node: Sequence[int] | None = None) -> list[int]:
    """How many ranks each of `num_nodes` nodes gets: evenly, the first nodes one more when it does not divide.

    `ranks_per_node` names the counts instead. Every node gets at least one rank, and together they get all: anything
    else is a `ConfigError` that says which numbers do not agree.
    """
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1; got {world_size}")
    if num_nodes < 1:
        raise ConfigError(f"the number of nodes must be at least 1; got {num_nodes}")
    if ranks_per_node is None:
        if num_nodes > world_size:
            raise ConfigError(f"{num_nodes} nodes for {world_size} ranks leave a node without a rank")
        share, rest = divmod(world_size, num_nodes)
        return [share + 1] * rest + [share] * (num_nodes - rest)
    counts = list(ranks_per_node)
    shown = ",".join(map(str, counts))
    if len(counts) != num_nodes:
        raise ConfigError(f"ranks_per_node {shown!r} names {len(counts)} nodes; there are {num_nodes}")
    if min(counts) < 1:
        raise ConfigError(f"ranks_per_node {shown!r}: every node needs at least 1 rank")
    if sum(counts) != world_size:
        raise ConfigError(f"ranks_per_node {shown!r} makes {sum(counts)} ranks; world_size is {world_size}")
    return counts


def place_ranks(
    world_size: int,
    alive: Sequence[str],
    *,
    nodes: Sequence[str] | None = None,
    ranks_per_node: Sequence[int] | None = None,
) -> list[str]:
    """The node of each rank: `nodes[rank]` by hand, else spread over the alive nodes.

    Raises `ConfigError` for numbers that do not agree, or a node that is not alive.
    """
    if nodes is not None:
        if ranks_per_node is not None:
            raise ConfigError("nodes and ranks_per_node both place ranks: give one of them")
        if len(nodes) != world_size:
            raise ConfigError(f"nodes must name one node for each of {world_size} ranks; got {len(nodes)}")
        unknown = [node for node in nodes if node not in alive]
        if unknown:
            raise ConfigError(f"node {unknown[0]!r} is not alive; alive nodes: {', '.join(alive)}")
        return list(nodes)
    num_nodes = min(len(alive), world_size) if ranks_per_node is None else len(ranks_per_node)
    if num_nodes > len(alive):
        raise ConfigError(f"ranks_per_node names {num_nodes} nodes; {len(alive)} are alive")
    counts = spread(world_size, num_nodes, ranks_per_node)
    return [node for node, count in zip(alive, counts, strict=False) for _ in range(count)]


def parse_ranks_per_node(text: str) -> tuple[int, ...]:
    """``"3,1"`` -> ``(3, 1)``. Raises `ConfigError` for anything but decimal numbers between commas."""
    counts = [part.strip() for part in text.split(",")]
    if not all(count.isascii() and count.isdigit() for count in counts):
        raise ConfigError(f"ranks_per_node {text!r} is not a list of rank counts; accepted: numbers as in '3,1'")
    return tuple(int(count) for count in counts)


def _ranks_by_node(node_ids: Sequence[str]) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, list[int]] = {}
    for rank, node_id in enumerate(node_ids):
        ranks.setdefault(node_id, []).append(rank)
    return {node_id: tuple(on_node) for node_id, on_node in ranks.items()}
