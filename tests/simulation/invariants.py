"""What must be so after every step of a world, whatever has gone wrong."""

from collections.abc import Container, Mapping, Sequence

from cluster.core import CoordinatorCore
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.slot_table import SlotState
from lmcache_ray.tiers.tiered_index import TieredIndex
from tests.simulation.clients import Client
from tests.simulation.copying import Violation
from tests.simulation.nodes import ArenaFile
from tests.simulation.values import Bytes


def check_index(index: TieredIndex) -> None:
    """Raises `IntegrityError` where the index contradicts itself, `Violation` where its slots do not add up."""
    index.check_integrity()
    counts = index.memory.counts()
    if counts.ready + counts.writing + counts.free + counts.quarantined != counts.capacity:
        raise Violation(f"slots do not add up: {counts}")


def check_ranks(
    core: CoordinatorCore,
    index: TieredIndex,
    arenas: Mapping[int, ArenaFile],
    contents: Bytes,
    keys: Container[bytes],
) -> None:
    """Every rank that counts as alive has, in the same slot, every chunk that the index calls READY, byte for byte.

    `arenas` are those that the ranks had when they were enlisted. What has none of `keys` is kept for views alone.
    """
    if not core.can_serve():
        return
    table = index.memory.table
    ready = [ref for ref in table.refs(table.slots_in(SlotState.READY)) if ref.key in keys]
    for rank in core.world.layout.holders:
        if rank in arenas:
            _check_rank(rank, arenas[rank], ready, contents)


def _check_rank(rank: int, arena: ArenaFile, ready: Sequence[ChunkRef], contents: Bytes) -> None:
    for ref in ready:
        if not arena.slots.holds(ref.slot, ref.generation, ref.key):
            word = arena.slots.word(ref.slot)
            raise Violation(
                f"the index has {ref.key[:2].hex()} READY in slot {ref.slot} with generation {ref.generation:#x}, but "
                f"rank {rank} has {word}"
            )
        if not contents.are_of(arena.slots.data(ref.slot), ref.key, rank):
            raise Violation(f"slot {ref.slot} of rank {rank} is COMMITTED with other bytes than those stored")


def check_views(clients: Sequence[Client], contents: Bytes) -> None:
    """What living clients look at is what it was."""
    for client in clients:
        if client.process.is_alive:
            for view in client.views:
                view.check(contents)
