"""What of a machine outlives its processes: arenas in shared memory, directories on disk, and who is alive there."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from lmcache_ray.arena.slots import ArenaSlots
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.index.arena_report import ViewedSlots
from tests.simulation.scheduler import Process
from tests.simulation.storage import Directory


class ArenaFile:
    """The memory of an arena. Whoever maps it has `ArenaSlots` of its own over the same bytes."""

    def __init__(self, geometry: ArenaGeometry) -> None:
        self.geometry = geometry
        self._memory = np.zeros(geometry.file_nbytes // 8, dtype=np.uint64)
        self.slots = self.mapped()
        """For who looks at it from outside."""

    def mapped(self) -> ArenaSlots:
        """The slots, as a process has them that maps the file."""
        return ArenaSlots(self._memory.data.cast("B"), self.geometry)


@dataclass(slots=True)
class Liveness:
    """A client's liveness file: locked while the process lives; it has what its views show, and what it writes."""

    client_id: str
    path: str
    process: Process
    held: Counter[tuple[int, int]] = field(default_factory=Counter)
    writing: set[tuple[int, int]] = field(default_factory=set)

    @property
    def is_alive(self) -> bool:
        """Whether it is locked."""
        return self.process.is_alive

    def viewed(self) -> ViewedSlots:
        """Slots and generations that its views show."""
        return ViewedSlots(self.client_id, f"views/{self.client_id}", tuple(self.held), self.path)


class Node:
    """One machine, from its start to its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.arenas: dict[int, ArenaFile] = {}
        self.directories: dict[int, Directory] = {}
        self.liveness: dict[str, Liveness] = {}

    def living_clients(self) -> list[Liveness]:
        """Those whose file is locked."""
        return [one for one in self.liveness.values() if one.is_alive]

    def directory(self, rank: int) -> Directory:
        """The rank's part of the disk."""
        return self.directories.setdefault(rank, Directory())
