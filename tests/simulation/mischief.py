"""What goes wrong in a busy world beside messages and storage: ends, standstills, losses, and the clock."""

from collections.abc import Callable, Sequence
from typing import Final

from tests.simulation.faults import Fault
from tests.simulation.scheduler import Process
from tests.simulation.workload import Workload
from tests.simulation.world import World

_WEIGHTS: Final = {
    Fault.RANK_STOPPED: 3.0,
    Fault.RANK_KILLED: 4.0,
    Fault.RANKS_KILLED: 1.0,
    Fault.NODE_GONE: 1.5,
    Fault.COORDINATOR_KILLED: 4.0,
    Fault.COORDINATOR_KILLED_RECOVERING: 4.0,
    Fault.RANK_KILLED_RECOVERING: 4.0,
    Fault.COORDINATOR_STOPPED: 2.0,
    Fault.CLIENT_KILLED: 2.0,
    Fault.CLIENT_STOPPED: 3.0,
    Fault.DISK_TORN: 2.0,
    Fault.DISK_DAMAGED: 2.0,
    Fault.REMOTE_DOWN: 2.0,
    Fault.CLOCK_JUMP: 1.0,
}
_LONGEST_STOP_S: Final = 15.0


class Mischief:
    """Strikes again and again while the world is busy."""

    def __init__(self, world: World, workload: Workload) -> None:
        self._world = world
        self._workload = workload
        self._weights = world.faults.weights(_WEIGHTS)
        self._pause_s = world.rng.choice((1.0, 3.0, 6.0))
        self._deeds: dict[Fault, Callable[[], bool]] = {
            Fault.RANK_STOPPED: lambda: self._stop([handle.process for handle in world.ranks]),
            Fault.RANK_KILLED: self._kill_rank,
            Fault.RANKS_KILLED: self._kill_ranks,
            Fault.NODE_GONE: self._lose_node,
            Fault.COORDINATOR_KILLED: self._kill_coordinator,
            Fault.COORDINATOR_KILLED_RECOVERING: lambda: self._is_recovering() and self._kill_coordinator(),
            Fault.RANK_KILLED_RECOVERING: lambda: self._is_recovering() and self._kill_rank(),
            Fault.COORDINATOR_STOPPED: lambda: self._stop([world.coordinator.process]),
            Fault.CLIENT_KILLED: self._kill_client,
            Fault.CLIENT_STOPPED: lambda: self._stop([client.process for client in world.living_clients()]),
            Fault.DISK_TORN: lambda: self._any_directory(lambda directory, at: directory.tear(at)),
            Fault.DISK_DAMAGED: lambda: self._any_directory(lambda directory, at: directory.damage(at)),
            Fault.REMOTE_DOWN: self._end_remote,
            Fault.CLOCK_JUMP: self._jump,
        }

    def begin(self) -> None:
        """Strike for the first time, some time from now."""
        self._world.scheduler.after(self._world.rng.random() * self._pause_s, self._strike)

    def _strike(self) -> None:
        world = self._world
        if self._workload.is_over:
            return
        if self._weights:
            (fault,) = world.rng.choices(list(self._weights), weights=list(self._weights.values()))
            if self._deeds[fault]():
                world.faults.count(fault)
        soon = self._is_recovering() and world.rng.random() < 0.7
        world.scheduler.after(world.rng.random() * (0.3 if soon else self._pause_s), self._strike)

    # -- deeds: each answers whether it did anything ------------------------------------------------------------------

    def _is_recovering(self) -> bool:
        coordinator = self._world.living_coordinator()
        return coordinator is not None and coordinator.is_recovering

    def _kill_rank(self) -> bool:
        rank = self._world.rng.randrange(len(self._world.ranks))
        process = self._world.ranks[rank].process
        is_alive = process is not None and process.is_alive
        self._world.kill_rank(rank)
        return is_alive

    def _kill_ranks(self) -> bool:
        for rank in range(len(self._world.ranks)):
            self._world.kill_rank(rank)
        return True

    def _lose_node(self) -> bool:
        node = self._world.rng.choice(self._world.living_nodes())
        num_clients = sum(client.node is node for client in self._world.living_clients())
        self._world.lose_node(node)
        for _ in range(num_clients):
            self._workload.employ(self._world.add_client())
        return True

    def _kill_coordinator(self) -> bool:
        process = self._world.coordinator.process
        if process is None or not process.is_alive:
            return False
        self._world.kill_coordinator()
        return True

    def _kill_client(self) -> bool:
        clients = self._world.living_clients()
        if not clients:
            return False
        client = self._world.rng.choice(clients)
        if not client.is_known_where_it_runs:
            self._world.faults.count(Fault.CLIENT_GONE)
        self._world.story.tell(client.name, "dies")
        self._world.scheduler.kill(client.process)
        self._workload.employ(self._world.add_client())
        return True

    def _stop(self, processes: Sequence[Process | None]) -> bool:
        living = [
            process for process in processes if process is not None and process.is_alive and not process.is_stopped
        ]
        if not living:
            return False
        process, scheduler = self._world.rng.choice(living), self._world.scheduler
        stop_s = self._world.rng.random() ** 2 * _LONGEST_STOP_S
        self._world.story.tell(process.name, "stands still for %.1f s", stop_s)
        scheduler.stop(process)
        scheduler.after(stop_s, lambda: scheduler.go_on(process))
        return True

    def _any_directory(self, harm: Callable[..., bool]) -> bool:
        directories = [directory for node in self._world.living_nodes() for directory in node.directories.values()]
        return bool(directories) and harm(self._world.rng.choice(directories), self._world.rng.randrange(64))

    def _end_remote(self) -> bool:
        world = self._world
        if self._world.spec.tiers.remote is None or world.remote.is_down:
            return False

        def come_back() -> None:
            world.remote.is_down = False

        world.remote.is_down = True
        world.scheduler.after(world.rng.random() * _LONGEST_STOP_S, come_back)
        return True

    def _jump(self) -> bool:
        seconds = self._world.rng.choice((1.0, 10.0, 100.0)) * self._world.rng.random()
        self._world.story.tell("clock", "goes forward by %.1f s", seconds)
        self._world.num_jumped_s += seconds
        self._world.scheduler.jump(seconds)
        return True
