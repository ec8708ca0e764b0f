"""A world's chunks in a remote store: what counts, what is found, what goes, and that no wrong byte is ever given."""

import os
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from lmcache_ray.errors import ConfigError, InvalidRequestError, ProtocolError, StorageUnavailableError
from lmcache_ray.layout import WorldLayout
from lmcache_ray.storage.backends import open_backend
from lmcache_ray.storage.base import StorageBackend
from lmcache_ray.storage.faults import ChunkFault, ReadResult
from lmcache_ray.storage.guarded import GuardedBackend
from lmcache_ray.storage.remote import RemoteChunk, RemoteChunks
from lmcache_ray.storage.remote_space import RoomMade
from lmcache_ray.storage.serde import make_serde
from tests.redis_server import RedisServer
from tests.unit.held_backend import HeldBackend
from tests.unit.shard_builders import CHUNK_SIZE, key_of, meant, random_shard, world

WORLD = world(2)


@pytest.fixture
def backend() -> HeldBackend:
    return HeldBackend(open_backend(f"memory://{uuid4().hex}", timeout_s=10.0))


class Clock:
    """The time of day, as far as it is ahead of the store's."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def chunks_in(
    backend: StorageBackend,
    *,
    layout: WorldLayout = WORLD,
    scope: str = "scope",
    serde: str = "naive",
    origin: str = "a",
    clock: Callable[[], float] | None = None,
) -> RemoteChunks:
    made = make_serde(serde)
    return RemoteChunks(
        backend, prefix="p/q", scope=scope, serde=made, layout=layout, origin=origin, clock=clock or Clock()
    )


def shard_of(layout: WorldLayout, number: int, rank: int) -> np.ndarray:
    return random_shard(layout.ranks[rank], 100 * number + rank)


def put(chunks: RemoteChunks, number: int, layout: WorldLayout = WORLD, generation: int = 1) -> None:
    """Every holder's shard, without a manifest."""
    for rank in layout.holders:
        data = shard_of(layout, number, rank)
        assert chunks.put_shard(key_of(number), generation, rank, CHUNK_SIZE, data, lambda: True)


def store(chunks: RemoteChunks, numbers: Sequence[int], layout: WorldLayout = WORLD, generation: int = 1) -> None:
    for number in numbers:
        put(chunks, number, layout, generation)
    chunks.commit([(key_of(number), generation) for number in numbers])


def found_numbers(chunks: RemoteChunks, numbers: Sequence[int]) -> list[int]:
    found = chunks.find([key_of(number) for number in numbers])
    return [number for number, chunk in zip(numbers, found, strict=True) if chunk is not None]


def load(
    chunks: RemoteChunks, chunk: RemoteChunk, rank: int, layout: WorldLayout = WORLD
) -> tuple[ReadResult, np.ndarray]:
    data = np.full(layout.ranks[rank].slot_nbytes, 0xEE, np.uint8)
    return chunks.load_shard(chunk, rank, data), data


def the_chunk(chunks: RemoteChunks, number: int) -> RemoteChunk:
    (chunk,) = chunks.find([key_of(number)])
    assert chunk is not None
    return chunk


def names_in(backend: StorageBackend) -> list[str]:
    return sorted(stored.name for stored in backend.list(""))


@pytest.mark.parametrize("serde", ["naive", "zstd"])
@pytest.mark.parametrize("num_tokens", [1, 3, CHUNK_SIZE])
def test_every_rank_gets_back_what_it_put(backend: HeldBackend, serde: str, num_tokens: int) -> None:
    chunks = chunks_in(backend, serde=serde)
    for rank in WORLD.holders:
        assert chunks.put_shard(key_of(1), 5, rank, num_tokens, shard_of(WORLD, 1, rank), lambda: True)
    chunks.commit([(key_of(1), 5)])
    other = chunks_in(backend, serde=serde, origin="another-cluster")
    chunk = the_chunk(other, 1)
    assert chunk == RemoteChunk(key_of(1), "a", 5)
    for rank in WORLD.holders:
        result, data = load(other, chunk, rank)
        assert result == ReadResult(num_tokens, None)
        layout = WORLD.ranks[rank]
        assert meant(data, layout, num_tokens) == meant(shard_of(WORLD, 1, rank), layout, num_tokens)


def test_a_chunk_counts_from_its_manifest_on(backend: HeldBackend) -> None:
    chunks = chunks_in(backend)
    put(chunks, 1)
    assert chunks.find([key_of(1)]) == [None] and chunks.has([key_of(1)]) == [False]
    chunks.commit([(key_of(1), 1)])
    assert chunks.find([key_of(1)]) == [RemoteChunk(key_of(1), "a", 1)] and chunks.has([key_of(1)]) == [True]


def test_bytes_of_a_slot_that_changed_meanwhile_are_not_put(backend: HeldBackend) -> None:
    """The check comes after the last byte was read, and what is put is what was read before it."""
    chunks, data = chunks_in(backend), shard_of(WORLD, 1, 0)

    def is_reused() -> bool:
        assert backend.calls == []
        data[:] = 0
        return False

    assert not chunks.put_shard(key_of(1), 1, 0, CHUNK_SIZE, data, is_reused)
    assert backend.calls == []

    data[:] = shard_of(WORLD, 1, 0)
    backend.mishap = lambda: data.fill(0)  # the slot is used again while the object is on its way
    assert chunks.put_shard(key_of(1), 1, 0, CHUNK_SIZE, data, lambda: True)
    result, loaded = load(chunks, RemoteChunk(key_of(1), "a", 1), 0)
    assert result.fault is None
    assert meant(loaded, WORLD.ranks[0], CHUNK_SIZE) == meant(shard_of(WORLD, 1, 0), WORLD.ranks[0], CHUNK_SIZE)


def test_only_holders_put(backend: HeldBackend) -> None:
    layout = world(2, is_mla=True)
    data = random_shard(layout.ranks[1])
    with pytest.raises(ProtocolError, match="rank 1 holds no shards"):
        chunks_in(backend, layout=layout).put_shard(key_of(1), 1, 1, CHUNK_SIZE, data, lambda: True)


def test_mla_worlds_of_other_sizes_read_the_one_shard(backend: HeldBackend) -> None:
    small, large = world(1, is_mla=True), world(4, is_mla=True)
    store(chunks_in(backend, layout=small), [1], small)
    chunks = chunks_in(backend, layout=large, origin="b")
    for rank in range(4):
        result, data = load(chunks, the_chunk(chunks, 1), rank, large)
        assert result == ReadResult(CHUNK_SIZE, None)
        assert meant(data, large.ranks[rank], CHUNK_SIZE) == meant(
            shard_of(small, 1, 0), small.ranks[0], CHUNK_SIZE
        )


def test_worlds_of_another_layout_scope_or_serde_see_nothing(backend: HeldBackend) -> None:
    store(chunks_in(backend), [1])
    assert found_numbers(chunks_in(backend, serde="fp8"), [1]) == []
    assert found_numbers(chunks_in(backend, scope="other"), [1]) == []
    wider = chunks_in(backend, layout=world(3))
    assert found_numbers(wider, [1]) == [], "the same scope for another layout is a mistake, but no wrong byte"
    assert wider.num_damaged_manifests == 1
    result, _ = load(wider, RemoteChunk(key_of(1), "a", 1), 0)
    assert result == ReadResult(0, ChunkFault.DAMAGED)


def test_a_lossy_chunk_comes_back_as_one(backend: HeldBackend) -> None:
    store(chunks_in(backend, serde="fp8"), [1])
    chunks = chunks_in(backend, serde="fp8", origin="b")
    result, _ = load(chunks, the_chunk(chunks, 1), 1)
    assert result == ReadResult(CHUNK_SIZE, None)
    assert found_numbers(chunks_in(backend), [1]) == []


@pytest.mark.parametrize(("num_there", "asked"), [
    (0, ["get_many 1"]),
    (1, ["get_many 1", "get_many 8"]),
    (9, ["get_many 1", "get_many 8", "get_many 64"]),
    (100, ["get_many 1", "get_many 8", "get_many 64", "get_many 27"]),
])  # fmt: skip
def test_few_are_asked_for_first_and_none_behind_the_first_absent_one(
    backend: HeldBackend, num_there: int, asked: list[str]
) -> None:
    chunks = chunks_in(backend)
    chunks.commit([(key_of(number), 1) for number in range(num_there)])
    backend.calls.clear()
    found = chunks.find([key_of(number) for number in range(100)])
    assert backend.calls == asked
    assert [chunk is not None for chunk in found] == [number < num_there for number in range(100)]


def test_nothing_is_asked_for_no_keys(backend: HeldBackend) -> None:
    chunks = chunks_in(backend)
    assert chunks.find([]) == [] and chunks.has([]) == [] and chunks.remove([]) == 0
    chunks.commit([])
    assert backend.calls == []


def test_has_asks_for_each(backend: HeldBackend) -> None:
    chunks = chunks_in(backend)
    chunks.commit([(key_of(number), 1) for number in (0, 2, 700)])
    there = chunks.has([key_of(number) for number in range(701)])
    assert [number for number, is_there in enumerate(there) if is_there] == [0, 2, 700]


def test_of_a_prompt_the_head_is_committed_last(backend: HeldBackend) -> None:
    """The store's oldest go first, and a head without its tail is of use, a tail without its head is not."""
    chunks_in(backend).commit([(key_of(number), 1) for number in (1, 2, 3)])
    written = [call.split("/")[3] for call in backend.calls]
    assert written == [key_of(number).hex() for number in (3, 2, 1)]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "half of it": lambda stored: stored[: len(stored) // 2],
    "nothing": lambda stored: b"",
    "extended": lambda stored: stored + b"\0",
    "a bit of the magic": lambda stored: bytes([stored[0] ^ 1]) + stored[1:],
    "a bit of a length": lambda stored: stored[:17] + bytes([stored[17] ^ 1]) + stored[18:],
    "a bit of the header": lambda stored: stored[:60] + bytes([stored[60] ^ 1]) + stored[61:],
    "a bit of the data": lambda stored: stored[:-1] + bytes([stored[-1] ^ 0x80]),
}


@pytest.mark.parametrize("serde", ["naive", "zstd", "fp8"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_a_fault(backend: HeldBackend, serde: str, damage: str) -> None:
    chunks = chunks_in(backend, serde=serde)
    store(chunks, [1])
    chunk = the_chunk(chunks, 1)
    (name,) = (name for name in names_in(backend) if ".r1." in name)
    whole = bytes(backend.get(name) or b"")
    backend.put(name, [DAMAGES[damage](whole)])
    assert load(chunks, chunk, 1)[0] == ReadResult(0, ChunkFault.DAMAGED)
    assert load(chunks, chunk, 0)[0] == ReadResult(CHUNK_SIZE, None)


def test_another_shard_in_its_place_is_a_fault(backend: HeldBackend) -> None:
    """Of another chunk, writing, rank, cluster or serde: each is whole in itself."""
    chunks = chunks_in(backend)
    store(chunks, [1, 2])
    store(chunks, [1], generation=2)
    store(chunks_in(backend, origin="b"), [1])
    store(chunks_in(backend, serde="zstd"), [1])
    shards = [name for name in names_in(backend) if ".r" in name]
    (place,) = (name for name in shards if f"{key_of(1).hex()}/a-{1:016x}.r0.naive" in name)
    right = bytes(backend.get(place) or b"")
    for name in shards:
        backend.put(place, [backend.get(name) or b""])
        expected = ReadResult(CHUNK_SIZE, None) if name == place else ReadResult(0, ChunkFault.DAMAGED)
        assert load(chunks, RemoteChunk(key_of(1), "a", 1), 0)[0] == expected, name
        backend.put(place, [right])


class Trap:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return (os.mkdir, (str(self.path),))


def test_a_pickle_is_never_executed(backend: HeldBackend, tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    chunks = chunks_in(backend)
    store(chunks, [1])
    chunk = the_chunk(chunks, 1)
    for name in names_in(backend):
        backend.put(name, [trap])
    assert found_numbers(chunks, [1]) == []
    assert load(chunks, chunk, 0)[0] == ReadResult(0, ChunkFault.DAMAGED)
    assert not (tmp_path / "sprung").exists()


def test_a_damaged_manifest_is_a_miss_that_is_counted_and_the_next_store_repairs_it(backend: HeldBackend) -> None:
    chunks = chunks_in(backend)
    store(chunks, [1])
    (manifest,) = (name for name in names_in(backend) if "manifest" in name)
    backend.put(manifest, [b"{}"])
    assert found_numbers(chunks, [1]) == [] and chunks.num_damaged_manifests == 1
    store(chunks, [1], generation=2)
    assert the_chunk(chunks, 1).generation == 2


def test_another_chunks_manifest_in_its_place_is_a_miss(backend: HeldBackend) -> None:
    chunks = chunks_in(backend)
    store(chunks, [1, 2])
    one, two = (name for name in names_in(backend) if "manifest" in name)
    backend.put(one, [backend.get(two) or b""])
    assert found_numbers(chunks, [1]) == [] and chunks.num_damaged_manifests == 1


def test_a_vanished_shard_is_a_fault_and_what_is_removed_is_stored_anew(backend: HeldBackend) -> None:
    chunks = chunks_in(backend)
    store(chunks, [1])
    chunk = the_chunk(chunks, 1)
    backend.delete([name for name in names_in(backend) if ".r0." in name])
    assert load(chunks, chunk, 0)[0] == ReadResult(0, ChunkFault.MISSING)
    assert chunks.remove([chunk]) == 1
    assert names_in(backend) == []
    store(chunks, [1], generation=2)
    assert load(chunks, the_chunk(chunks, 1), 0)[0] == ReadResult(CHUNK_SIZE, None)


def test_a_store_that_does_not_answer_is_a_fault_of_a_load_and_an_error_of_all_else(backend: HeldBackend) -> None:
    chunks = chunks_in(backend)
    store(chunks, [1])
    chunk = the_chunk(chunks, 1)

    def out_of_order() -> None:
        raise StorageUnavailableError("no answer")

    backend.mishap = out_of_order
    assert load(chunks, chunk, 0)[0] == ReadResult(0, ChunkFault.UNREADABLE)
    for call in (
        lambda: put(chunks, 2),
        lambda: chunks.commit([(key_of(1), 1)]),
        lambda: chunks.find([key_of(1)]),
        lambda: chunks.has([key_of(1)]),
        lambda: chunks.remove([chunk]),
        chunks.remove_all,
        lambda: chunks.make_room(1, 1),
    ):
        with pytest.raises(StorageUnavailableError, match="no answer"):
            call()


def test_a_view_asks_through_another_backend(backend: HeldBackend) -> None:
    chunks = chunks_in(backend)
    store(chunks, [1])
    empty = HeldBackend(open_backend(f"memory://{uuid4().hex}", timeout_s=10.0))
    assert found_numbers(chunks.through(empty), [1]) == []
    assert found_numbers(chunks, [1]) == [1]
    assert empty.calls == ["get_many 1"]


def test_two_clusters_write_the_same_chunk_and_the_later_manifest_counts(backend: HeldBackend) -> None:
    one, other = chunks_in(backend, origin="a"), chunks_in(backend, origin="b")
    put(one, 1)
    put(other, 1)
    one.commit([(key_of(1), 1)])
    early = the_chunk(other, 1)
    other.commit([(key_of(1), 1)])
    late = the_chunk(one, 1)
    assert (early.origin, late.origin) == ("a", "b")
    for chunk in (early, late):
        assert load(one, chunk, 0)[0] == ReadResult(CHUNK_SIZE, None)
    assert one.remove([early]) == 0, "it has been written again since"
    assert the_chunk(one, 1) == late
    assert load(one, late, 0)[0].fault is None and load(one, early, 0)[0].fault is ChunkFault.MISSING


def test_remove_deletes_the_manifest_before_any_shard(backend: HeldBackend) -> None:
    chunks = chunks_in(backend)
    store(chunks, [1, 2, 3])
    backend.calls.clear()
    assert chunks.remove([the_chunk(chunks, 1), key_of(2), key_of(9)]) == 2
    assert backend.calls[-2:] == ["delete 2", "delete 4"]
    assert found_numbers(chunks, [3]) == [3]
    assert len(names_in(backend)) == 3


def test_remove_all_is_of_one_scope(backend: HeldBackend) -> None:
    ours, theirs = chunks_in(backend), chunks_in(backend, scope="theirs")
    store(ours, [1, 2])
    put(ours, 3)
    store(chunks_in(backend, serde="zstd", origin="b"), [1, 4])
    store(theirs, [1])
    backend.put("p/q/scope/readme", [b"somebody's"])
    assert ours.remove_all() == {key_of(1), key_of(2), key_of(4)}
    assert found_numbers(theirs, [1]) == [1]
    assert [name for name in names_in(backend) if "theirs" not in name] == ["p/q/scope/readme"]
    assert ours.remove_all() == set()


def test_a_limit_of_our_own_over_all_scopes(backend: HeldBackend) -> None:
    old, new = chunks_in(backend, scope="old"), chunks_in(backend, scope="new")
    for number in range(4):
        store(old if number < 2 else new, [number])
    used = sum(stored.nbytes for stored in backend.list(""))
    assert new.make_room(0, used) == RoomMade(True, used, 0, 0)
    made = new.make_room(used // 2, used)
    assert made == RoomMade(True, used // 2, 2, 0)
    assert sum(stored.nbytes for stored in backend.list("")) == used // 2
    assert found_numbers(old, [0, 1]) == [] and found_numbers(new, [2, 3]) == [2, 3]


def test_room_is_made_of_superseded_and_dead_writings_first(backend: HeldBackend) -> None:
    clock = Clock()
    chunks = chunks_in(backend, clock=clock)
    store(chunks, [1])
    store(chunks, [1], generation=2)
    put(chunks, 2)
    assert chunks.make_room(0, 10**9).num_orphans == 0, "they may be under way"
    clock.ahead_s = 3601.0
    made = chunks.make_room(0, 10**9)
    assert (made.num_orphans, made.num_chunks) == (4, 0)
    assert load(chunks, the_chunk(chunks, 1), 0)[0] == ReadResult(CHUNK_SIZE, None)
    assert len(names_in(backend)) == 3


def test_lookups_in_a_frozen_server_end_and_hits_return_with_it(redis_server: RedisServer) -> None:
    now = [0.0]
    server = open_backend(redis_server.url, timeout_s=10.0)
    store(chunks_in(server), [1, 2], generation=7)
    guard = GuardedBackend(server, timeout_s=0.2, clock=lambda: now[0])
    chunks = chunks_in(guard, origin="b")
    redis_server.freeze()
    for _ in range(4):  # the last is not even asked
        with pytest.raises(StorageUnavailableError):
            chunks.through(guard.within(0.1)).find([key_of(1)])
        assert load(chunks, RemoteChunk(key_of(1), "a", 7), 0)[0] == ReadResult(0, ChunkFault.UNREADABLE)
    assert guard.problem is not None
    redis_server.thaw()
    while not guard.probe():
        now[0] += 30.0
    assert found_numbers(chunks.through(server), [1, 2, 3]) == [1, 2]
    result, data = load(chunks.through(server), RemoteChunk(key_of(1), "a", 7), 1)
    assert result == ReadResult(CHUNK_SIZE, None)
    assert meant(data, WORLD.ranks[1], CHUNK_SIZE) == meant(shard_of(WORLD, 1, 1), WORLD.ranks[1], CHUNK_SIZE)
    guard.close()


def test_a_server_that_evicts_is_left_to_do_so(redis_server: RedisServer) -> None:
    redis_server.kill()
    redis_server.start(["--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru"])
    chunks = chunks_in(open_backend(redis_server.url, timeout_s=10.0))
    store(chunks, [1])
    assert chunks.make_room(10**9, 1).fits
    assert found_numbers(chunks, [1]) == [1]


def test_an_origin_of_which_no_name_can_be_made_is_refused(backend: HeldBackend) -> None:
    with pytest.raises(ConfigError, match="origin"):
        chunks_in(backend, origin="a/b")
    with pytest.raises(InvalidRequestError, match="32 bytes"):
        chunks_in(backend).find([b"short"])
