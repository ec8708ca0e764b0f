"""A client process's tie to the cluster: whom it asks, where the ranks are, and which arenas it can map."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster.messages import ClientHello, RankHello
from cluster.world import WorldSpec
from lmcache_ray.errors import ClusterError, LMCacheRayError, UnknownClientError
from lmcache_ray.shard import EngineShard
from tests.simulation.copying import Copying
from tests.simulation.network import Handle, Network
from tests.simulation.nodes import ArenaFile, Liveness, Node
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.values import Bytes


@dataclass(frozen=True, slots=True)
class ClientParts:
    """What the clients of one world are made with."""

    world: WorldSpec
    scheduler: Scheduler
    network: Network
    coordinator: Handle
    ranks: Sequence[Handle]
    copying: Copying
    contents: Bytes
    happened: Counter[str]


class Deadline:
    """`timeout_s` from now."""

    def __init__(self, scheduler: Scheduler, timeout_s: float) -> None:
        self._scheduler = scheduler
        self.timeout_s = timeout_s
        self.end = scheduler.now + timeout_s

    def left_s(self) -> float:
        """What is left of it."""
        return max(0.0, self.end - self._scheduler.now)


class Link:
    """One client process on `node`. It registers once and again: coordinators forget."""

    def __init__(self, name: str, process: Process, node: Node, parts: ClientParts) -> None:
        self.name: Final = name
        self.process: Final = process
        self.node: Final = node
        self.liveness: Final = Liveness(name, f"/{node.name}/{name}", process)
        self._world = parts.world
        self._scheduler = parts.scheduler
        self._network = parts.network
        self._coordinator = parts.coordinator
        self._ranks = parts.ranks
        self._happened = parts.happened
        self._hellos: list[RankHello] = []
        self._maps: dict[int, tuple[ArenaFile, EngineShard]] = {}
        self._path: str | None = None

    def register(self) -> None:
        """Begin to use the cluster. Only where there are ranks can its end be proven, and can it map arenas."""
        deadline = Deadline(self._scheduler, self._world.call_timeout_s)
        hellos = self._network.call(self._coordinator, "introduce", timeout_s=deadline.left_s())
        if hellos is None:
            raise ClusterError("the cluster is not whole")
        self._hellos = hellos
        if self._path is None and any(hello.node_id == self.node.name for hello in hellos):
            self._path = self.liveness.path
            self.node.liveness[self._path] = self.liveness
        self._network.call(self._coordinator, "register_client", self._hello(), timeout_s=deadline.left_s())

    @property
    def is_known_where_it_runs(self) -> bool:
        """Whether some rank can prove its end."""
        return self._path is not None

    def _hello(self) -> ClientHello:
        return ClientHello(self.name, self.node.name, 0, self._path)

    def _node_of(self, rank: int) -> str:
        return self._hellos[rank].node_id if self._hellos else ""

    def _is_here(self, rank: int) -> bool:
        return self._path is not None and self._node_of(rank) == self.node.name

    def _map(self, rank: int) -> tuple[ArenaFile, EngineShard] | None:
        """The rank's arena of this node, mapped anew if another file has taken its place."""
        file = self.node.arenas.get(rank)
        if file is None:
            return None
        if rank not in self._maps or self._maps[rank][0] is not file:
            self._maps[rank] = (file, EngineShard(file.mapped()))
        return self._maps[rank]

    def _file(self, rank: int) -> ArenaFile | None:
        mapped = self._map(rank) if self._is_here(rank) else None
        return None if mapped is None else mapped[0]

    def _decide(self, name: str, *arguments: object, timeout_s: float) -> Any:
        return self._ask("decide", name, *arguments, timeout_s=timeout_s)

    def _decide_patiently(self, name: str, *arguments: object, timeout_s: float) -> Any:
        if name != "clear":
            arguments = (*arguments, max(0.0, timeout_s - min(0.5, timeout_s / 4)))
        return self._ask("decide_patiently", name, *arguments, timeout_s=timeout_s)

    def _ask(self, method: str, *arguments: object, timeout_s: float) -> Any:
        end = self._scheduler.now + timeout_s
        try:
            return self._network.call(self._coordinator, method, *arguments, timeout_s=timeout_s)
        except UnknownClientError:
            self._happened["a client registered again"] += 1
            self._network.call(
                self._coordinator, "register_client", self._hello(),
                timeout_s=max(0.0, end - self._scheduler.now),
            )  # fmt: skip
            left_s = max(0.0, end - self._scheduler.now)
            return self._network.call(self._coordinator, method, *arguments, timeout_s=left_s)


def outcome_of(call: Callable[[], Any]) -> Any:
    """What a call answers, or the named error that it ends with."""
    try:
        return call()
    except LMCacheRayError as error:
        return error
