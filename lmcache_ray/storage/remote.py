"""One world's chunks in a remote store: shards put and got by ranks, manifests by whoever decides for the world.

A chunk counts from the moment its manifest is there, which is written after every rank has put its shard and deleted
before any shard is. So a writer that dies anywhere leaves no chunk that could be read in part, and a reader that finds
a shard gone has a miss. Shards are never written twice under one name; clusters that write the same chunk at the same
time do not disturb each other, and the later manifest counts.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import Final, NamedTuple, TypeVar

import numpy as np
from typing_extensions import Buffer

from lmcache_ray.errors import DamagedChunkError, ProtocolError, StorageError
from lmcache_ray.layout import WorldLayout
from lmcache_ray.storage.base import StorageBackend
from lmcache_ray.storage.faults import ChunkFault, ReadResult
from lmcache_ray.storage.guarded import GuardedBackend
from lmcache_ray.storage.remote_manifest import Manifest, pack_manifest, parse_manifest
from lmcache_ray.storage.remote_names import ChunkPlace, RemoteNames, Writing, check_word
from lmcache_ray.storage.remote_shard import ShardObjects
from lmcache_ray.storage.remote_space import RoomMade, parts_by_chunk, plan_room
from lmcache_ray.storage.serde import Serde

_FIRST_ASKED: Final = 1  # of a lookup's keys, then eight times as many, and so on
_GROWTH: Final = 8
_MOST_AT_ONCE: Final = 512  # names of one request
_ORPHAN_AGE_S: Final = 3600.0

T = TypeVar("T")


class RemoteChunk(NamedTuple):
    """A chunk in the store: the writing of it that its manifest names."""

    key: bytes
    origin: str
    generation: int


class RemoteChunks:
    """The chunks of one `scope` below one `prefix`, as one serde writes them. Thread-safe as its backend is.

    `scope` must differ wherever model or layout do. `origin` names this cluster: no other one, nor an earlier one with
    the same generations, may have had it. All methods but `load_shard` raise `StorageError`.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        prefix: str,
        scope: str,
        serde: Serde,
        layout: WorldLayout,
        origin: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        check_word("origin", origin)
        self._backend = backend
        self._names = RemoteNames(prefix, scope, serde.name)
        self._prefix = prefix
        self._serde_name = serde.name
        self._shards = ShardObjects(layout, serde)
        self._layout = layout
        self._origin = origin
        self._clock = clock
        self._damaged_manifests = _Counter()

    def through(self, backend: StorageBackend) -> "RemoteChunks":
        """The same chunks, asked by another view of the backend: one with less time, for instance."""
        view = copy(self)
        view._backend = backend
        return view

    @property
    def num_damaged_manifests(self) -> int:
        """Manifests that were found and not believed."""
        return self._damaged_manifests.value

    def put_shard(
        self,
        key: bytes,
        generation: int,
        rank: int,
        num_tokens: int,
        data: np.ndarray,
        is_intact: Callable[[], bool],
    ) -> bool:
        """Store the shard of holder `rank`, uint8 ``[slot_nbytes]``; no one sees it before `commit`.

        False if `is_intact`, asked after the last byte of `data` was read, says that those may be another chunk's.
        """
        if rank not in self._layout.holders:
            raise ProtocolError(f"rank {rank} holds no shards; those who do: {list(self._layout.holders)}")
        encoded = self._shards.encode(rank, num_tokens, data)
        if not is_intact():
            return False
        writing = Writing(self._origin, generation)
        parts = self._shards.pack(key, writing, rank, num_tokens, encoded)
        self._backend.put(self._names.shard(key, writing, rank), parts)
        return True

    def load_shard(self, chunk: RemoteChunk, rank: int, data: np.ndarray) -> ReadResult:
        """Fill `data`, uint8 ``[slot_nbytes]``, with what `rank` needs of the chunk. Never raises `StorageError`.

        With a fault, `data` holds garbage. Whoever decides should then `remove` the chunk, so that it is stored anew.
        """
        holder = self._layout.holder_of(rank)
        writing = Writing(chunk.origin, chunk.generation)
        try:
            stored = self._backend.get(self._names.shard(chunk.key, writing, holder))
            if stored is None:
                return ReadResult(0, ChunkFault.MISSING)
            return ReadResult(self._shards.unpack(stored, chunk.key, writing, holder, data))
        except DamagedChunkError:
            return ReadResult(0, ChunkFault.DAMAGED)
        except StorageError:
            return ReadResult(0, ChunkFault.UNREADABLE)

    def commit(self, chunks: Sequence[tuple[bytes, int]]) -> None:
        """Make chunks (key, generation) count of which every holder has put its shard. In the order of their prompt.

        The last is written first: the store's oldest go first, and of a prompt those should be its tail.
        """
        for key, generation in reversed(chunks):
            manifest = self._manifest(key, Writing(self._origin, generation))
            self._backend.put(self._names.manifest(key), [pack_manifest(manifest)])

    def find(self, keys: Sequence[bytes]) -> list[RemoteChunk | None]:
        """For each key the chunk that counts, as far as the keys lead from one to the next.

        Behind the first None nothing is promised: the store is asked for few keys at first, then for more at a time,
        and not for those behind one that is absent. A damaged manifest is None.
        """
        found: list[RemoteChunk | None] = []
        for some in _growing(keys):
            found += self._find(some)
            if None in found:
                break
        return found + [None] * (len(keys) - len(found))

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """For each key whether its chunk counts, wherever it stands in a prompt."""
        return [chunk is not None for some in _slices(keys) for chunk in self._find(some)]

    def remove(self, chunks: Iterable[RemoteChunk | bytes]) -> int:
        """Delete chunks: those that were found, or whatever counts for a key. How many manifests were deleted.

        A chunk that has been written again since it was found stays, as that writing.
        """
        wanted = {chunk if isinstance(chunk, bytes) else chunk.key: chunk for chunk in chunks}
        manifests: list[str] = []
        shards: list[str] = []
        found = [stored for some in _slices(list(wanted)) for stored in self._stored_manifests(some)]
        for (key, chunk), stored in zip(wanted.items(), found, strict=True):
            named = self._named(key, stored)
            writing = Writing(chunk.origin, chunk.generation) if isinstance(chunk, RemoteChunk) else named
            if stored is not None and (named is None or named == writing):
                manifests.append(self._names.manifest(key))
            if writing is not None:
                shards += [self._names.shard(key, writing, rank) for rank in self._layout.holders]
        self._delete(manifests, shards)
        return len(manifests)

    def remove_all(self) -> set[bytes]:
        """Delete everything of this scope, of all serdes and clusters. The keys of the chunks that counted."""
        chunks = parts_by_chunk(self._backend.list(self._names.folder), self._names)
        committed = {place: parts.manifest.name for place, parts in chunks.items() if parts.manifest is not None}
        shards = [stored.name for parts in chunks.values() for stored in parts.shard_objects]
        self._delete(list(committed.values()), shards)
        return {place.key for place in committed}

    def make_room(self, nbytes: int, limit_nbytes: int, *, orphan_age_s: float = _ORPHAN_AGE_S) -> RoomMade:
        """Delete the oldest of our objects, of all scopes below the prefix, until `nbytes` more fit within the limit.

        Lists the store, so ask rarely, for many chunks at once. A store that evicts by itself is left to do so.
        """
        if self._backend.evicts_itself:
            return RoomMade(fits=True, used_nbytes=0, num_chunks=0, num_orphans=0)
        chunks = parts_by_chunk(self._backend.list(self._prefix), self._names)
        ambiguous = [place for place, parts in chunks.items() if parts.is_ambiguous]
        removals = plan_room(
            chunks,
            self._writings_named(ambiguous),
            nbytes=nbytes,
            limit_nbytes=limit_nbytes,
            orphaned_before_s=self._clock() - orphan_age_s,
        )
        self._delete(removals.manifests, removals.shards)
        return removals.room

    def close(self) -> None:
        """Close the backend, for all who use it."""
        self._backend.close()

    def _manifest(self, key: bytes, writing: Writing) -> Manifest:
        holders = self._layout.holders
        nbytes = sum(self._layout.ranks[rank].slot_nbytes for rank in holders)
        return Manifest(key, writing, self._layout.fingerprint, self._serde_name, holders, nbytes)

    def _find(self, keys: Sequence[bytes]) -> list[RemoteChunk | None]:
        found: list[RemoteChunk | None] = []
        for key, stored in zip(keys, self._stored_manifests(keys), strict=True):
            named = self._named(key, stored)
            found.append(None if named is None else RemoteChunk(key, *named))
        return found

    def _stored_manifests(self, keys: Sequence[bytes]) -> list[Buffer | None]:
        return self._backend.get_many([self._names.manifest(key) for key in keys])

    def _named(self, key: bytes, stored: Buffer | None) -> Writing | None:
        """The writing that a manifest of ours names; None, and counted, if it is damaged or another world's."""
        if stored is None:
            return None
        try:
            manifest = parse_manifest(stored)
        except DamagedChunkError:
            self._damaged_manifests.add()
            return None
        if manifest != self._manifest(key, manifest.writing):
            self._damaged_manifests.add()
            return None
        return manifest.writing

    def _writings_named(self, places: Sequence[ChunkPlace]) -> dict[ChunkPlace, Writing | None]:
        """What manifests of any scope name."""
        named: dict[ChunkPlace, Writing | None] = {}
        stored = self._backend.get_many([self._names.manifest_at(place) for place in places])
        for place, manifest in zip(places, stored, strict=True):
            try:
                named[place] = None if manifest is None else parse_manifest(manifest).writing
            except DamagedChunkError:
                named[place] = None
        return named

    def _delete(self, manifests: Sequence[str], shards: Sequence[str]) -> None:
        for names in (manifests, shards):
            for some in _slices(names):
                self._backend.delete(some)


class RemoteStore(NamedTuple):
    """A world's part of a remote store, and what it is asked through."""

    chunks: RemoteChunks
    backend: GuardedBackend

    def within(self, timeout_s: float) -> RemoteChunks:
        """The chunks, for calls that must all have ended `timeout_s` from now."""
        return self.chunks.through(self.backend.within(timeout_s))


class _Counter:
    """A number that several threads count up."""

    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self.value += 1


def _slices(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + _MOST_AT_ONCE] for start in range(0, len(items), _MOST_AT_ONCE))


def _growing(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The keys in slices of 1, 8, 64 … of them."""
    start, number = 0, _FIRST_ASKED
    while start < len(keys):
        yield keys[start : start + number]
        start, number = start + number, min(_GROWTH * number, _MOST_AT_ONCE)
