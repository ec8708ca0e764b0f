"""Arenas under several real processes: locks, kills, forks, slots reused under a reader.

The other processes run this very file: ``python test_arena_processes.py <role> <directory>``. Each prints a line
when it is where its test wants it.
"""

import contextlib
import hashlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import lmcache_ray.arena
from lmcache_ray.arena.arena import Arena
from lmcache_ray.arena.liveness import LivenessFile, living_clients
from lmcache_ray.arena.mapped import ArenaMap
from lmcache_ray.arena.names import arena_path, liveness_path
from lmcache_ray.arena.process import is_alive, process_start_ticks
from lmcache_ray.arena.slots import CommittedSlot
from lmcache_ray.arena.spec import ArenaGeometry, ArenaSpec
from lmcache_ray.arena.sweep import sweep
from lmcache_ray.errors import ArenaLockedError, CapacityError, ClosedError, ProtocolError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.shard import EngineShard

SLOT_NBYTES = 256 * 1024
SPEC = ArenaSpec("ns", "processes", 0, 1, b"f" * 32, ArenaGeometry(num_slots=4, slot_nbytes=SLOT_NBYTES))
TIMEOUT_S = 20.0


def create(directory: str | Path) -> Arena:
    return Arena.create(SPEC, directory, node_id="n", now=time.time())


def attach(directory: str | Path) -> Arena:
    return Arena.attach(SPEC, directory, node_id="n", now=time.time())


def open_map(directory: str | Path) -> ArenaMap:
    return ArenaMap.open(arena_path(directory, "ns", "processes", 0), expected_fingerprint=SPEC.fingerprint)


def key_of(generation: int) -> bytes:
    return hashlib.sha256(b"%d" % generation).digest()


def low_half(high_half: int) -> int:
    """What must stand in the low half of a generation: never 0, all bytes change when the high half goes up by one."""
    return high_half * 2654435761 & 0xFFFFFFFF | 1


def say(line: object) -> None:
    """Print in one piece: several processes may share the pipe."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


# -- roles of the other processes -------------------------------------------------------------------------------------


def own_and_write(directory: str) -> None:
    """Commit slots 0 and 1 and stop in the middle of writing slot 2."""
    arena = create(directory)
    slots = arena.slots
    for slot in (0, 1):
        slots.begin_write(slot, slot + 10)
        slots.data(slot)[:] = slot + 1
        slots.commit(slot, slot + 10, key_of(slot), 16)
    slots.begin_write(2, 12)
    slots.data(2)[: SLOT_NBYTES // 2] = 3
    say("half written")
    signal.pause()


def put_and_stop(directory: str) -> None:
    """A client that stops in the middle of writing slot 1, and then goes on as if nothing had happened."""
    client = LivenessFile.create(directory, "ns", "processes", "client", num_slots=4)
    slots = open_map(directory).slots
    with client.writing([(1, 20), (2, 21)]):
        slots.begin_write(1, 20)
        slots.data(1)[: SLOT_NBYTES // 2] = 5
        say("half written")
        sys.stdin.readline()
        slots.data(1)[SLOT_NBYTES // 2 :] = 5
        refusals = 0
        for refused in (lambda: slots.commit(1, 20, key_of(20), 16), lambda: slots.begin_write(2, 21)):
            try:
                refused()
            except ProtocolError:
                refusals += 1
    say(f"{refusals} refused")
    sys.stdin.readline()


def own_and_fork(directory: str) -> None:
    """Own an arena and a liveness file; let a forked child and a started program live on."""
    arena, client = create(directory), LivenessFile.create(directory, "ns", "processes", "c")
    program = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
    child = os.fork()
    if child == 0:
        arena.close()
        client.close()
        try:
            arena.slots.begin_write(0, 1)
        except ClosedError:
            say("the child owns nothing")
        signal.pause()
    say(child)
    say(program.pid)
    signal.pause()


def reuse_slots(directory: str) -> None:
    """Give two slots to one chunk after another; every byte of a chunk tells its generation."""
    slots = open_map(directory).slots
    generation = 0
    say("writing")
    while True:
        generation += 1
        slot = generation % 2
        slots.begin_write(slot, generation)
        slots.data(slot).view(np.uint64)[:] = generation
        slots.commit(slot, generation, key_of(generation), 16)


def hammer_word(directory: str) -> None:
    """Store generations whose low half follows from the high one."""
    slots = open_map(directory).slots
    say("hammering")
    number = 0
    while True:
        number += 1
        with contextlib.suppress(ProtocolError):  # the other one was here with a larger number
            slots.begin_write(0, number << 32 | low_half(number))
        number = max(number, slots.word(0).generation >> 32)


def create_beyond_limit(directory: str) -> None:
    """Make an arena that the process's file size limit forbids."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
    try:
        create(directory)
    except CapacityError as error:
        say(error)


def create_on_signal(directory: str) -> None:
    """Make the arena as soon as a line comes, at the same time as others do."""
    say("ready")
    sys.stdin.readline()
    try:
        arena = create(directory)
    except ArenaLockedError:
        say("refused")
        return
    say("owner")
    sys.stdin.readline()
    arena.close()


def sweep_forever(directory: str) -> None:
    """Sweep the whole directory again and again, as another rank of the same cluster does at its start."""
    say("sweeping")
    while True:
        sweep(directory, "ns", "processes", restart_window_s=0.0, now=time.time())


ROLES: dict[str, Callable[[str], None]] = {
    role.__name__: role
    for role in (
        own_and_write,
        own_and_fork,
        put_and_stop,
        reuse_slots,
        hammer_word,
        create_beyond_limit,
        create_on_signal,
        sweep_forever,
    )
}


@contextlib.contextmanager
def running(role: Callable[[str], None], directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in that role; killed at the end with all that it started."""
    root = Path(lmcache_ray.arena.__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, __file__, role.__name__, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(TIMEOUT_S)


# -- tests ------------------------------------------------------------------------------------------------------------


def test_the_lock_excludes_others_until_a_kill_and_committed_chunks_survive_it(tmp_path: Path) -> None:
    with running(own_and_write, tmp_path) as owner:
        assert line_of(owner) == "half written"
        for take in (create, attach):
            with pytest.raises(ArenaLockedError, match=f"process {owner.pid} "):
                take(tmp_path)
        kill(owner)
        with attach(tmp_path) as arena:
            assert list(arena.slots.committed()) == [
                CommittedSlot(0, 10, key_of(0), 16),
                CommittedSlot(1, 11, key_of(1), 16),
            ]
            assert all(np.all(arena.slots.data(slot) == slot + 1) for slot in (0, 1))
            assert arena.slots.unfinished() == [(2, 12)], "its writer might be another process, and live"
            assert arena.slots.abort(2, 12)
            with pytest.raises(ProtocolError):
                arena.slots.begin_write(2, 12)
            arena.slots.check_integrity()
    assert list(tmp_path.iterdir()) == []


def test_a_client_that_was_stopped_while_it_wrote_harms_nobody_when_it_goes_on(tmp_path: Path) -> None:
    with create(tmp_path) as arena, running(put_and_stop, tmp_path) as client:
        shard, mine = EngineShard(arena.slots), ChunkRef(key_of(20), 1, 20)

        def written() -> set[tuple[int, int]]:
            return {slot for one in living_clients(tmp_path, "ns", "processes") for slot in one.writing}

        assert line_of(client) == "half written"
        os.kill(client.pid, signal.SIGSTOP)
        shard.fence(100, wait_s=0.0)
        assert shard.unfinished(foreign=written()) == [(1, 20), (2, 21)]
        assert shard.settle([mine], foreign=written()) == [False], "it may write at any moment"
        os.kill(client.pid, signal.SIGCONT)
        assert client.stdin is not None
        client.stdin.write("\n")
        client.stdin.flush()
        assert line_of(client) == "2 refused"
        assert shard.settle([mine], foreign=written()) == [True]
        assert list(arena.slots.committed()) == []


def test_the_recorded_owner_is_known_dead_after_a_kill(tmp_path: Path) -> None:
    with running(own_and_write, tmp_path) as owner:
        line_of(owner)
        with open_map(tmp_path) as peer:
            recorded = peer.owner
        assert recorded.pid == owner.pid and is_alive(recorded)
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(recorded), "a zombie does not live"


def test_children_and_programs_do_not_inherit_the_locks(tmp_path: Path) -> None:
    with running(own_and_fork, tmp_path) as owner:
        lines = {line_of(owner) for _ in range(3)}
        assert "the child owns nothing" in lines
        survivors = [int(line) for line in lines if line.isdigit()]
        client = liveness_path(tmp_path, "ns", "processes", "c")
        assert arena_path(tmp_path, "ns", "processes", 0).exists(), "a child's close must not remove the file"
        assert LivenessFile.is_alive(client)
        kill(owner)
        assert len(survivors) == 2 and all(process_start_ticks(pid) is not None for pid in survivors)
        attach(tmp_path).close()
        assert not LivenessFile.is_alive(client)


def test_a_reader_never_takes_another_chunks_bytes(tmp_path: Path) -> None:
    num_intact = num_refused_mixtures = 0
    deadline = time.monotonic() + TIMEOUT_S
    with create(tmp_path) as arena, running(reuse_slots, tmp_path) as writer:
        line_of(writer)
        slots = arena.slots
        while num_intact < 200 or num_refused_mixtures < 20:
            assert time.monotonic() < deadline, f"{num_intact=} {num_refused_mixtures=}: nothing was proven"
            for slot in (0, 1):
                generation = slots.word(slot).generation
                if not slots.holds(slot, generation, key_of(generation)):
                    continue
                copy = slots.data(slot).view(np.uint64).copy()
                is_intact = slots.is_committed(slot, generation)
                is_pure = bool(np.all(copy == generation))
                assert is_pure or not is_intact, f"slot {slot} gave bytes of {set(copy.tolist())} as {generation}"
                num_intact += is_intact
                num_refused_mixtures += not is_pure


def test_a_word_is_never_seen_half_written(tmp_path: Path) -> None:
    with create(tmp_path) as arena:
        arena.slots.begin_write(0, 1 << 32 | low_half(1))
        words = np.memmap(arena.path, np.uint64, "r", SPEC.geometry.words_offset, (4,))
        with running(hammer_word, tmp_path) as one, running(hammer_word, tmp_path) as other:
            line_of(one), line_of(other)
            many_times = np.zeros(2000, np.int64)
            seen: set[int] = set()
            deadline = time.monotonic() + TIMEOUT_S
            while len(seen) < 2000:
                assert time.monotonic() < deadline, f"only {len(seen)} words were seen"
                generations = {arena.slots.word(0).generation, *(words[many_times] >> 2).tolist()}
                for generation in generations:
                    assert generation & 0xFFFFFFFF == low_half(generation >> 32), hex(generation)
                seen |= generations


def test_a_file_size_limit_is_a_capacity_error_and_leaves_nothing(tmp_path: Path) -> None:
    with running(create_beyond_limit, tmp_path) as process:
        message = line_of(process)
    assert f"rank 0 needs {SPEC.geometry.file_nbytes} bytes" in message and str(tmp_path) in message
    assert list(tmp_path.iterdir()) == []


def test_more_than_all_shared_memory_is_a_capacity_error_and_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        disk = os.statvfs(directory)
        num_slots = disk.f_blocks * disk.f_frsize // SLOT_NBYTES + 1
        geometry = ArenaGeometry(num_slots, SLOT_NBYTES)
        spec = ArenaSpec("ns", "processes", 0, 1, b"f" * 32, geometry)
        with pytest.raises(CapacityError, match=rf"needs {geometry.file_nbytes} bytes.*\d+ bytes were free"):
            Arena.create(spec, directory, node_id="n", now=0.0)
        assert os.listdir(directory) == []


@pytest.mark.parametrize("is_dead_one_there", [False, True])
def test_of_many_that_make_the_same_arena_one_gets_it(tmp_path: Path, is_dead_one_there: bool) -> None:
    if is_dead_one_there:
        create(tmp_path).close(unlink=False)
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(running(create_on_signal, tmp_path)) for _ in range(4)]
        assert [line_of(process) for process in processes] == ["ready"] * 4
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        assert sorted(line_of(process) for process in processes) == ["owner", "refused", "refused", "refused"]
        assert [entry.name for entry in tmp_path.iterdir()] == [arena_path(tmp_path, "ns", "processes", 0).name]


def test_sweepers_harm_neither_each_other_nor_the_living(tmp_path: Path) -> None:
    with running(sweep_forever, tmp_path) as one, running(sweep_forever, tmp_path) as other:
        line_of(one), line_of(other)
        for turn in range(60):
            with create(tmp_path) as arena, LivenessFile.create(tmp_path, "ns", "processes", "c") as client:
                assert arena.path.exists() and LivenessFile.is_alive(client.path)
                assert arena.slots.num_committed == 0
                if turn % 2:
                    arena.close(unlink=False)  # leave a dead one to the sweepers and the next turn
        for _ in range(1000):
            with LivenessFile.create(tmp_path, "ns", "processes", "c") as client:
                assert LivenessFile.is_alive(client.path)
        assert one.poll() is None and other.poll() is None, "a sweeper failed"


if __name__ == "__main__":
    ROLES[sys.argv[1]](sys.argv[2])
