"""What one rank's arena holds, told to a coordinator that rebuilds its index or takes the rank back. Pure."""

from dataclasses import dataclass

from lmcache_ray.index.plans import ChunkRef


@dataclass(frozen=True, slots=True)
class ViewedSlots:
    """Slots (slot, generation) that views of a living client process show; they must not change until it lets go.

    `lease_id` stands for all its views together, and `liveness_path` is the file that proves its end.
    """

    client_id: str
    lease_id: str
    slots: tuple[tuple[int, int], ...]
    liveness_path: str = ""


@dataclass(frozen=True, slots=True)
class ArenaReport:
    """The arena at the moment of its fence: from then on no write below the fence's generation begins or commits.

    `committed` chunks are whole. `unfinished` slots (slot, generation) are not free to be used again until they are
    settled: a client process, or a stuck thread of the rank, may still be writing bytes there. `viewed` may name slots
    that are in neither.
    """

    committed: tuple[ChunkRef, ...] = ()
    unfinished: tuple[tuple[int, int], ...] = ()
    viewed: tuple[ViewedSlots, ...] = ()
