"""What of a machine outlives its processes: arenas in shared memory, directories on disk, and who is alive there."""

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
        self.floor = 0
        self.slots = self.mapped()
        """For who looks at it from outside."""

    def mapped(self) -> ArenaSlots:
        """The slots, as a process has them that maps the file."""
        return ArenaSlots(memoryview(self._memory).cast("B"), self.geometry)


@dataclass(slots=True)
class Liveness:
    """A client's liveness file: it is locked while the process lives, and says what its views hold, and which
    generations it may be writing itself."""

    client_id: str
    process: Process
    holds: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)

    @property
    def is_alive(self) -> bool:
        """Whether it is locked."""
        return self.process.is_alive

    def viewed(self) -> list[ViewedSlots]:
        """Its records."""
        return [ViewedSlots(self.client_id, lease_id, slots) for lease_id, slots in self.holds.items()]


class Node:
    """One machine, from its start to its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.arenas: dict[int, ArenaFile] = {}
        self.directories: dict[int, Directory] = {}
        self.liveness: dict[str, Liveness] = {}

    def directory(self, rank: int) -> Directory:
        """The rank's part of the disk."""
        return self.directories.setdefault(rank, Directory())
