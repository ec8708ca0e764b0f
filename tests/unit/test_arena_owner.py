"""Making, taking over, sharing and closing arenas within one process."""

import os
import platform
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmcache_ray.arena.arena import Arena
from lmcache_ray.arena.liveness import LivenessFile
from lmcache_ray.arena.lock import lock_existing
from lmcache_ray.arena.mapped import ArenaMap, read_header
from lmcache_ray.arena.names import arena_path
from lmcache_ray.arena.process import is_alive, process_start_ticks
from lmcache_ray.arena.slots import CommittedSlot
from lmcache_ray.arena.spec import ArenaGeometry, ArenaSpec
from lmcache_ray.errors import ArenaError, ArenaLockedError, ClosedError

FINGERPRINT = b"f" * 32
SPEC = ArenaSpec("ns", "cluster", 1, 2, FINGERPRINT, ArenaGeometry(num_slots=4, slot_nbytes=4096))
KEY = b"k" * 32


def create(directory: Path, spec: ArenaSpec = SPEC) -> Arena:
    return Arena.create(spec, directory, node_id="node-1", now=100.0)


def attach(directory: Path, spec: ArenaSpec = SPEC) -> Arena:
    return Arena.attach(spec, directory, node_id="node-1", now=200.0)


def store(arena: Arena, slot: int, generation: int, fill: int) -> None:
    arena.slots.begin_write(slot, generation)
    arena.slots.data(slot)[:] = fill
    arena.slots.commit(slot, generation, KEY, 16)


def test_a_new_arena_is_reserved_empty_and_the_only_file(tmp_path: Path) -> None:
    with create(tmp_path) as arena:
        assert arena.path == arena_path(tmp_path, "ns", "cluster", 1)
        assert [entry.name for entry in tmp_path.iterdir()] == [arena.path.name]
        status = arena.path.stat()
        assert status.st_size == SPEC.geometry.file_nbytes
        assert status.st_blocks * 512 >= status.st_size, "a sparse arena kills its users when memory runs out"
        assert arena.spec == SPEC and arena.slots.num_slots == 4 and arena.slots.num_committed == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("machine", "num_warnings"), [("x86_64", 0), ("AMD64", 0), ("aarch64", 1), ("", 1)])
def test_an_owner_is_warned_where_stores_may_be_seen_out_of_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    machine: str,
    num_warnings: int,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with create(tmp_path) as arena:
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == num_warnings
        assert all(str(arena.path) in message and f"type {machine}" in message for message in messages)


def test_the_header_names_the_owner_and_its_heartbeat(tmp_path: Path) -> None:
    with create(tmp_path) as arena, arena.path.open("rb") as file:
        header = read_header(file.fileno(), arena.path)
        assert header.spec == SPEC and header.heartbeat == 100.0
        assert (header.owner.pid, header.owner.node_id) == (os.getpid(), "node-1")
        assert header.owner.start_ticks == process_start_ticks(os.getpid()) and is_alive(header.owner)
        assert not is_alive(replace(header.owner, start_ticks=header.owner.start_ticks + 1))
        arena.heartbeat(123.5)
        assert read_header(file.fileno(), arena.path).heartbeat == 123.5


def test_a_living_owner_is_not_replaced(tmp_path: Path) -> None:
    with create(tmp_path) as arena:
        store(arena, 0, 1, 7)
        for take in (create, attach):
            with pytest.raises(ArenaLockedError, match=f"process {os.getpid()} on node 'node-1'"):
                take(tmp_path)
        assert arena.slots.holds(0, 1, KEY) and len(list(tmp_path.iterdir())) == 1


def test_one_who_only_looks_is_not_taken_for_an_owner(tmp_path: Path) -> None:
    create(tmp_path).close(unlink=False)
    sweeper = lock_existing(arena_path(tmp_path, "ns", "cluster", 1))
    assert sweeper is not None
    timer = threading.Timer(0.03, sweeper.release)
    timer.start()
    attach(tmp_path).close()
    timer.join()


def test_a_dead_owners_arena_is_replaced_by_an_empty_one(tmp_path: Path) -> None:
    arena = create(tmp_path)
    store(arena, 0, 1, 7)
    arena.close(unlink=False)
    peer = ArenaMap.open(arena.path, expected_fingerprint=FINGERPRINT)
    assert peer.is_published()
    with create(tmp_path) as successor:
        assert successor.slots.num_committed == 0
        assert peer.slots.holds(0, 1, KEY) and not peer.is_published(), "a mapping outlives its file's name"


def test_a_successor_keeps_chunks_and_leaves_unfinished_writes_to_their_writers(tmp_path: Path) -> None:
    arena = create(tmp_path)
    store(arena, 0, 5, 7)
    arena.slots.begin_write(1, 6)
    arena.close(unlink=False)
    with attach(tmp_path) as successor:
        assert list(successor.slots.committed()) == [CommittedSlot(0, 5, KEY, 16)]
        assert set(successor.slots.data(0).tolist()) == {7}
        assert successor.slots.unfinished() == [(1, 6)]
        with ArenaMap.open(successor.path, expected_fingerprint=FINGERPRINT) as peer:
            assert peer.owner.pid == os.getpid()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"fingerprint": b"g" * 32}, "fingerprint"),
        ({"world_size": 3}, "world_size is 2, not 3"),
        ({"geometry": ArenaGeometry(8, 4096)}, "num_slots=4.*num_slots=8"),
    ],
)
def test_an_arena_of_another_spec_is_refused_and_left_alone(
    tmp_path: Path, change: dict[str, object], word: str
) -> None:
    arena = create(tmp_path)
    store(arena, 0, 5, 7)
    arena.slots.begin_write(1, 6)
    arena.close(unlink=False)
    before = arena.path.read_bytes()
    with pytest.raises(ArenaError, match=word):
        attach(tmp_path, replace(SPEC, **change))  # type: ignore[arg-type]
    assert arena.path.read_bytes() == before
    attach(tmp_path).close()  # and the lock was given back


def test_a_file_under_anothers_name_is_refused(tmp_path: Path) -> None:
    arena = create(tmp_path)
    arena.close(unlink=False)
    arena.path.rename(arena_path(tmp_path, "ns", "cluster", 0))
    with pytest.raises(ArenaError, match="rank is 1, not 0"):
        attach(tmp_path, replace(SPEC, rank=0))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    path = arena_path(tmp_path, "ns", "cluster", 1)
    for make in (lambda: attach(tmp_path), lambda: ArenaMap.open(path, expected_fingerprint=FINGERPRINT)):
        with pytest.raises(ArenaError, match=str(path)):
            make()
    path.write_bytes(b"x" * 10_000)
    for make in (lambda: attach(tmp_path), lambda: ArenaMap.open(path, expected_fingerprint=FINGERPRINT)):
        with pytest.raises(ArenaError, match=rf"{path}.*magic"):
            make()
    create(tmp_path).close()  # replaces it
    with pytest.raises(ArenaError, match="nowhere"):
        create(tmp_path / "nowhere")


def test_a_truncated_file_is_refused_before_it_can_kill_its_reader(tmp_path: Path) -> None:
    arena = create(tmp_path)
    arena.close(unlink=False)
    os.truncate(arena.path, SPEC.geometry.file_nbytes - 4096)
    with pytest.raises(ArenaError, match=str(SPEC.geometry.file_nbytes)):
        ArenaMap.open(arena.path, expected_fingerprint=FINGERPRINT)


def test_peers_and_owner_see_each_others_writes(tmp_path: Path) -> None:
    with create(tmp_path) as arena, ArenaMap.open(arena.path, expected_fingerprint=FINGERPRINT) as peer:
        store(arena, 0, 1, 7)
        assert peer.slots.holds(0, 1, KEY) and set(peer.slots.data(0).tolist()) == {7}
        peer.slots.begin_write(2, 5)
        peer.slots.data(2)[:] = 9
        peer.slots.commit(2, 5, KEY, 3)
        assert arena.slots.holds(2, 5, KEY) and set(arena.slots.data(2).tolist()) == {9}


def test_a_peer_of_another_layout_is_refused(tmp_path: Path) -> None:
    with create(tmp_path) as arena, pytest.raises(ArenaError, match=f"{FINGERPRINT.hex()}, not {'00' * 32}"):
        ArenaMap.open(arena.path, expected_fingerprint=bytes(32))


def test_prefault_changes_no_byte(tmp_path: Path) -> None:
    with create(tmp_path) as arena:
        for slot in range(4):
            store(arena, slot, 1, slot + 1)
        before = arena.path.read_bytes()
        arena.prefault()
        assert arena.path.read_bytes() == before


def test_after_close_every_use_is_refused_and_close_may_come_again(tmp_path: Path) -> None:
    arena = create(tmp_path)
    peer = ArenaMap.open(arena.path, expected_fingerprint=FINGERPRINT)
    arena.close()
    arena.close()
    peer.close()
    peer.close()
    assert arena.is_closed and peer.is_closed
    for use in (lambda: arena.slots, lambda: arena.heartbeat(1.0), arena.prefault, lambda: peer.slots, peer.prefault):
        with pytest.raises(ClosedError, match=str(arena.path)):
            use()


def test_views_outlive_close_and_the_last_one_frees_the_memory(tmp_path: Path) -> None:
    arena = create(tmp_path)
    store(arena, 0, 1, 7)
    view = arena.slots.data(0)
    path = str(arena.path)
    arena.close()
    assert np.all(view == 7)
    assert path in Path("/proc/self/maps").read_text()
    del view
    assert path not in Path("/proc/self/maps").read_text()


def test_close_leaves_a_successors_file_alone(tmp_path: Path) -> None:
    arena = create(tmp_path)
    arena.path.unlink()  # by hand
    with create(tmp_path) as successor:
        arena.close()
        assert successor.path.exists()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with create(tmp_path) as arena, ArenaMap.open(arena.path, expected_fingerprint=FINGERPRINT):
        for failing in (create, attach):
            with pytest.raises(ArenaLockedError):
                failing(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_client_is_alive_until_it_closes(tmp_path: Path) -> None:
    with LivenessFile.create(tmp_path, "ns", "cluster", "client 1") as client:
        path = client.path
        assert LivenessFile.is_alive(path)
        with pytest.raises(ArenaLockedError, match="client 1"):
            LivenessFile.create(tmp_path, "ns", "cluster", "client 1")
        LivenessFile.create(tmp_path, "ns", "cluster", "client 2").close()
    client.close()
    assert not LivenessFile.is_alive(path) and not path.exists()


def test_an_arena_of_another_node_is_not_taken_over_but_made_anew(tmp_path: Path) -> None:
    """Simulated nodes share one directory; what another node's memory held is gone with the node."""
    arena = create(tmp_path)
    store(arena, 0, 5, 7)
    arena.close(unlink=False)
    with pytest.raises(ArenaError, match="is of node 'node-1', not of 'node-2'"):
        Arena.attach(SPEC, tmp_path, node_id="node-2", now=200.0)
    with Arena.attach_or_create(SPEC, tmp_path, node_id="node-2", now=200.0) as fresh:
        assert fresh.slots.num_committed == 0


def test_attach_or_create_takes_over_what_it_can_trust_and_replaces_the_rest(tmp_path: Path) -> None:
    def take() -> Arena:
        return Arena.attach_or_create(SPEC, tmp_path, node_id="node-1", now=200.0)

    with take() as arena, pytest.raises(ArenaLockedError):
        take()
    arena = take()
    store(arena, 0, 5, 7)
    arena.slots.raise_floor(6)
    arena.close(unlink=False)
    with take() as successor:
        assert list(successor.slots.committed()) == [CommittedSlot(0, 5, KEY, 16)] and successor.slots.floor == 6
        successor.close(unlink=False)
    with successor.path.open("r+b") as file:
        file.write(b"damaged!")
    with take() as fresh:
        assert fresh.slots.num_committed == 0
