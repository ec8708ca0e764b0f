"""Which objects go when a remote store's share for us is full. Pure: from a listing to names.

Whole chunks go, the least recently written (or used, where the store knows that) first, whatever model and layout they
are of: nobody here can know which others still use. Before them go *orphans*: shards that no manifest names, because
their writer died, or because the chunk has been written again since. Young ones may be a writing that is under way.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lmcache_ray.storage.base import StoredObject
from lmcache_ray.storage.remote_names import ChunkPlace, RemoteNames, Writing


class RoomMade(NamedTuple):
    """What making room did."""

    fits: bool
    """Whether what is to be stored is within the limit now."""
    used_nbytes: int
    """What our objects below the prefix take now, of all scopes and clusters."""
    num_chunks: int
    """Chunks that were deleted."""
    num_orphans: int
    """Shards without a chunk that were deleted."""


@dataclass(slots=True)
class StoredParts:
    """What a listing shows of one chunk."""

    manifest: StoredObject | None = None
    shards: dict[Writing, list[StoredObject]] = field(default_factory=lambda: defaultdict(list))

    @property
    def is_ambiguous(self) -> bool:
        """Whether only the manifest's content tells which of several writings counts."""
        return self.manifest is not None and len(self.shards) > 1

    def orphans(self, named: Writing | None) -> list[StoredObject]:
        """The shards that do not count, `named` being what the manifest of an ambiguous chunk says."""
        if self.manifest is not None and (named is None or len(self.shards) < 2):
            return []
        return [shard for writing, shards in self.shards.items() if writing != named for shard in shards]

    @property
    def shard_objects(self) -> list[StoredObject]:
        """The shards of all writings."""
        return [shard for shards in self.shards.values() for shard in shards]

    @property
    def objects(self) -> list[StoredObject]:
        """All of them, the manifest first."""
        return ([self.manifest] if self.manifest is not None else []) + self.shard_objects


@dataclass(frozen=True, slots=True)
class Removals:
    """What is to be deleted: first `manifests`, then `shards`; and what it comes to."""

    manifests: Sequence[str]
    shards: Sequence[str]
    room: RoomMade


def parts_by_chunk(objects: Iterable[StoredObject], names: RemoteNames) -> dict[ChunkPlace, StoredParts]:
    """The objects of ours in a listing. Others are left alone and not counted."""
    found: dict[ChunkPlace, StoredParts] = defaultdict(StoredParts)
    for stored in objects:
        name = names.parse(stored.name)
        if name is None:
            continue
        if name.writing is None:
            found[name.place].manifest = stored
        else:
            found[name.place].shards[name.writing].append(stored)
    return found


def plan_room(
    chunks: Mapping[ChunkPlace, StoredParts],
    named: Mapping[ChunkPlace, Writing | None],
    *,
    nbytes: int,
    limit_nbytes: int,
    orphaned_before_s: float,
) -> Removals:
    """What to delete so that `nbytes` more fit into `limit_nbytes`.

    `named` tells the writing that the manifest of each ambiguous chunk names. Orphans from before `orphaned_before_s`
    go in any case. If all that may go would not be enough, chunks are left as they are.
    """
    orphans = [
        shard
        for place, parts in chunks.items()
        for shard in parts.orphans(named.get(place))
        if shard.modified_s < orphaned_before_s
    ]
    used = sum(stored.nbytes for parts in chunks.values() for stored in parts.objects)
    used -= sum(shard.nbytes for shard in orphans)
    victims = _victims(_oldest_first(chunks, {shard.name for shard in orphans}), used + nbytes - limit_nbytes)
    used -= sum(stored.nbytes for objects in victims for stored in objects)
    room = RoomMade(used + nbytes <= limit_nbytes, used, len(victims), len(orphans))
    manifests = [objects[0].name for objects in victims]
    shards = [shard.name for shard in orphans] + [shard.name for objects in victims for shard in objects[1:]]
    return Removals(manifests, shards, room)


def _victims(chunks: Iterable[list[StoredObject]], excess_nbytes: int) -> list[list[StoredObject]]:
    """The leading chunks that take `excess_nbytes` together; none if all of them take less."""
    victims: list[list[StoredObject]] = []
    for objects in chunks:
        if excess_nbytes <= 0:
            break
        victims.append(objects)
        excess_nbytes -= sum(stored.nbytes for stored in objects)
    return victims if excess_nbytes <= 0 else []


def _oldest_first(chunks: Mapping[ChunkPlace, StoredParts], gone: set[str]) -> list[list[StoredObject]]:
    """The objects of each committed chunk, its manifest first."""
    committed = [
        [stored for stored in parts.objects if stored.name not in gone]
        for parts in chunks.values()
        if parts.manifest is not None
    ]
    return sorted(committed, key=lambda objects: max(stored.modified_s for stored in objects))
