"""One simulated cluster from its start to its rest: processes, what they do, what goes wrong, and what is checked.

A world is a function of its seed. It is busy for a while, with clients that ask and mishaps that strike; then all goes
well for as long as it takes, and the world must come to rest: whole, with nothing held, owed or left behind.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Final

from cluster.core import first_generation
from cluster.rank_port import Enlistment
from cluster.topology import Topology
from lmcache_ray.errors import ClusterError, LMCacheRayError
from lmcache_ray.storage.disk_space import disk_capacity
from lmcache_ray.storage.guarded import GuardedBackend
from lmcache_ray.storage.remote import RemoteChunks, RemoteStore
from lmcache_ray.storage.serde import make_serde
from lmcache_ray.tiers.spec import Tier
from tests.simulation.clients import REPORT_S, Client
from tests.simulation.coordinator import CoordinatorParts, SimulatedCoordinator
from tests.simulation.copying import Copying, Violation
from tests.simulation.faults import Faults
from tests.simulation.invariants import check_index, check_ranks, check_views
from tests.simulation.link import ClientParts
from tests.simulation.network import Handle, Network
from tests.simulation.nodes import ArenaFile, Node
from tests.simulation.oracle import Oracle
from tests.simulation.ranks import RankParts, SimulatedRank
from tests.simulation.record import Record
from tests.simulation.scheduler import Scheduler
from tests.simulation.shape import CALL_S, Shape
from tests.simulation.storage import MemoryDisk, MemoryRemote
from tests.simulation.story import Story
from tests.simulation.values import Bytes

_START_S: Final = 20.0
_RESTART_S: Final = 1.0
_TICK_S: Final = 0.05


class World:
    """The world of one seed. `clients` come and go; handles of the coordinator and the ranks stay."""

    def __init__(self, seed: int, *, is_told: bool = False) -> None:
        rng = Random(seed)
        self.seed: Final = seed
        self.rng: Final = rng
        self.shape: Final = Shape.draw(rng)
        self.spec: Final = self.shape.spec
        self.faults: Final = Faults(rng)
        self.faults.cease()
        self.scheduler: Final = Scheduler(rng, preemption=self.shape.preemption)
        self.story: Final = Story(self.scheduler.clock, is_told=is_told)
        self.network: Final = Network(self.scheduler, self.faults, rng)
        self.contents: Final = Bytes(self.spec.layout)
        self.copying: Final = Copying(self.scheduler, self.faults)
        self.remote: Final = MemoryRemote(self.scheduler, self.faults)
        self.every_key: Final = frozenset(key for prompt in self.shape.prompts for key in prompt.keys)
        self.oracle: Final = Oracle(self._tiers(), self.every_key)
        self.happened: Final[Counter[str]] = Counter()
        self.coordinator: Final = Handle("coordinator")
        self.ranks: Final = [Handle(f"rank {rank}") for rank in range(self.spec.layout.world_size)]
        self.nodes: Final[list[Node]] = []
        self.clients: Final[list[Client]] = []
        self.num_jumped_s = 0.0
        """How far the clock has gone forward by itself: no call is blamed for it."""
        self._num_pids = 0
        self._num_clients = 0
        self._record = Record(self.faults)
        self._rank_parts = RankParts(
            self.spec, self.copying, self.contents, open_disk=self._open_disk, open_remote=self._open_remote
        )
        self._coordinator_parts = CoordinatorParts(
            self.spec,
            self.scheduler,
            self.network,
            self.ranks,
            self._record,
            self.oracle,
            self.happened,
            self._open_remote,
        )
        self._client_parts = ClientParts(
            self.spec, self.scheduler, self.network, self.coordinator, self.ranks, self.copying, self.contents,
            self.happened,
        )  # fmt: skip
        for _ in range(rng.choice((1, 2))):
            self.add_node()

    # -- the start ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring the world up."""
        self._record.save(self._record.load().next_start())
        for rank in range(len(self.ranks)):
            self.start_rank(rank, self.nodes[rank % len(self.nodes)])
        self._start_coordinator(self._found)
        while self.living_coordinator() is None:
            if self.scheduler.now >= _START_S:
                raise Violation("the world did not start")
            self.scheduler.run_until(self.scheduler.now + 0.1)
        for _ in range(self.shape.num_clients):
            self.add_client()

    def _found(self) -> None:
        process = self.coordinator.process
        assert process is not None
        coordinator = SimulatedCoordinator(self._coordinator_parts, process, has_returned=False)
        places = Topology.from_node_ids([self._rank(rank).node_id() for rank in range(len(self.ranks))]).places
        epoch = coordinator.core.epoch
        enlisted = [
            self.network.call(
                handle, "enlist", Enlistment(place, epoch, first_generation(epoch), may_attach=False), timeout_s=CALL_S
            )
            for handle, place in zip(self.ranks, places, strict=True)
        ]
        coordinator.adopt(enlisted, CALL_S)
        self.coordinator.serving = coordinator

    def _start_coordinator(self, make: Callable[[], None]) -> None:
        self.coordinator.process = self.scheduler.process("coordinator")
        self.coordinator.serving = None
        self.scheduler.spawn(self.coordinator.process, "start", make)

    def restart_coordinator(self) -> None:
        """A new process takes the dead one's place, as often as it takes."""
        if self.coordinator.process is not None and self.coordinator.process.is_alive:
            return
        self._start_coordinator(self._return)

    def _return(self) -> None:
        process = self.coordinator.process
        assert process is not None
        try:
            coordinator = SimulatedCoordinator(self._coordinator_parts, process, has_returned=True)
        except ClusterError as error:  # its process ends by it, and is started again
            self.story.tell("coordinator", "cannot start: %s", error)
            self.scheduler.after(0.0, self.kill_coordinator)
            return
        self.story.tell("coordinator", "is back with epoch %d", coordinator.core.epoch)
        self.coordinator.serving = coordinator

    def start_rank(self, rank: int, node: Node) -> None:
        """A new process for a rank, idle until it is enlisted."""
        self._num_pids += 1
        handle = self.ranks[rank]
        handle.process = self.scheduler.process(f"rank {rank}")
        handle.serving = SimulatedRank(self._rank_parts, rank, self._num_pids, node)
        self.story.tell(handle.name, "process %d starts on %s", self._num_pids, node.name)

    def add_node(self) -> Node:
        """A machine joins."""
        node = Node(f"node{len(self.nodes)}")
        self.nodes.append(node)
        return node

    def add_client(self) -> Client:
        """A driver connects, on some node."""
        self._num_clients += 1
        name = f"client {self._num_clients}"
        client = Client(name, self.scheduler.process(name), self.rng.choice(self.living_nodes()), self._client_parts)
        self.clients.append(client)
        return client

    # -- ends ---------------------------------------------------------------------------------------------------------

    def kill_coordinator(self) -> None:
        """Its process ends, and Ray starts another."""
        assert self.coordinator.process is not None
        self.story.tell("coordinator", "dies")
        self.scheduler.kill(self.coordinator.process)
        self.scheduler.after(_RESTART_S * (0.5 + self.rng.random()), self.restart_coordinator)

    def kill_rank(self, rank: int) -> None:
        """Its process ends, and Ray starts another, on the same node if that is there."""
        handle, node = self.ranks[rank], self._rank(rank).node
        if handle.process is None or not handle.process.is_alive:
            return
        self.story.tell(handle.name, "dies")
        self.scheduler.kill(handle.process)

        def restart() -> None:
            self.start_rank(rank, node if node.is_alive else self.rng.choice(self.living_nodes()))

        self.scheduler.after(_RESTART_S * (0.2 + self.rng.random()), restart)

    def lose_node(self, node: Node) -> None:
        """A machine is gone with all that was on it; another one joins."""
        self.story.tell(node.name, "is gone")
        node.is_alive = False
        self.add_node()
        self._distrust()
        for client in self.clients:
            if client.node is node:
                self.scheduler.kill(client.process)
        for rank in range(len(self.ranks)):
            if self._rank(rank).node is node:
                self.kill_rank(rank)

    def _distrust(self) -> None:
        """Until the world has found out what is lost, it may still say that it has it."""
        self.oracle.lose()
        if not self.is_whole():
            self.scheduler.after(1.0, self._distrust)

    # -- looking ------------------------------------------------------------------------------------------------------

    def living_nodes(self) -> list[Node]:
        """Machines that are there."""
        return [node for node in self.nodes if node.is_alive]

    def living_coordinator(self) -> SimulatedCoordinator | None:
        """The coordinator, if it has come so far."""
        process, serving = self.coordinator.process, self.coordinator.serving
        if process is None or not process.is_alive or not isinstance(serving, SimulatedCoordinator):
            return None
        return serving

    def is_whole(self) -> bool:
        """Whether the coordinator has every rank's present process."""
        coordinator = self.living_coordinator()
        if coordinator is None:
            return False
        if not all(handle.process is not None and handle.process.is_alive for handle in self.ranks):
            return False
        present = [self._rank(rank).pid for rank in range(len(self.ranks))]
        known = [record.hello and record.hello.pid for record in coordinator.core.membership.records()]
        return present == known and coordinator.core.can_serve()

    def living_clients(self) -> list[Client]:
        """Those whose process lives."""
        return [client for client in self.clients if client.process.is_alive]

    def _rank(self, rank: int) -> SimulatedRank:
        serving = self.ranks[rank].serving
        assert isinstance(serving, SimulatedRank)
        return serving

    def check(self) -> None:
        """What must be so after every step."""
        coordinator = self.living_coordinator()
        if coordinator is not None:
            coordinator.note_recovery()
            check_index(coordinator.index)
            check_ranks(coordinator.core, coordinator.index, self._enlisted_arenas(), self.contents, self.every_key)
        check_views(self.clients, self.contents)

    def _enlisted_arenas(self) -> dict[int, ArenaFile]:
        """The arena of each rank whose node is there; of one that is gone nobody knows yet."""
        found = {}
        for rank in self.spec.layout.holders:
            serving = self._rank(rank)
            if serving.node.is_alive and serving.arena is not None:
                found[rank] = serving.arena
        return found

    # -- what a client's call may come to -----------------------------------------------------------------------------

    def timed(self, client: Client, what: str, call: Callable[[], object]) -> bool:
        """One call of a client: it must end in time, and in an answer or a named error. True for an answer."""
        started, lost, jumps = self.scheduler.now, client.process.lost_s, self.num_jumped_s
        self.happened[what.split(maxsplit=1)[0]] += 1
        try:
            answer, is_good = call(), True
            self.story.tell(client.name, "%s: %s", what, answer)
        except LMCacheRayError as error:
            is_good = False
            self.happened[type(error).__name__] += 1
            self.story.tell(client.name, "%s: %s: %s", what, type(error).__name__, error)
        took_s = self.scheduler.now - started - (client.process.lost_s - lost) - (self.num_jumped_s - jumps)
        if took_s > CALL_S + REPORT_S + _TICK_S and not what.startswith("view"):
            raise Violation(f"{client.name}: {what} took {took_s:.1f} s of {CALL_S:g}")
        return is_good

    # -- parts --------------------------------------------------------------------------------------------------------

    def _tiers(self) -> frozenset[Tier]:
        lower = {Tier.DISK: self.spec.tiers.disk, Tier.REMOTE: self.spec.tiers.remote}
        return frozenset((Tier.CPU, *(tier for tier, spec in lower.items() if spec is not None)))

    def _open_disk(self, node: Node, rank: int) -> MemoryDisk:
        disk = self.spec.tiers.disk
        assert disk is not None
        max_files = disk_capacity(disk.max_nbytes, self.spec.layout, rank)
        return MemoryDisk(node.directory(rank), self.scheduler, self.faults, max_files)

    def _open_remote(self) -> RemoteStore | None:
        remote = self.spec.tiers.remote
        if remote is None:
            return None
        backend = GuardedBackend(self.remote, timeout_s=remote.timeout_s, clock=self.scheduler.clock)
        chunks = RemoteChunks(
            backend, prefix=remote.prefix, scope="scope", serde=make_serde(remote.serde), layout=self.spec.layout,
            origin="life", clock=self.scheduler.clock,
        )  # fmt: skip
        return RemoteStore(chunks, backend)
