"""A disk directory under several real processes: kills while files are written, forks, two clusters.

The other processes run this very file: ``python test_disk_processes.py <role> <root>``. Each prints a line when it is
where its test wants it.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":  # run as another process of a test
    sys.path[0] = str(ROOT)

from lmcache_ray.errors import DirectoryTakenError  # noqa: E402
from lmcache_ray.storage.directory_lock import DirectoryOwner  # noqa: E402
from lmcache_ray.storage.disk import RankDisk  # noqa: E402
from lmcache_ray.storage.disk_space import disk_capacity  # noqa: E402
from tests.unit.disk_builders import OWNER, du, open_disk, put  # noqa: E402
from tests.unit.stored_chunks import CHUNK_SIZE, chunk_of, empty_slot, layout_of, slot_of  # noqa: E402

LAYOUT = layout_of(layers=16)  # 33 KiB a slot
LIMIT = 4 * 2**20
NEXT = DirectoryOwner("ns", "cache", "life 2")


def say(line: object) -> None:
    """Print in one piece."""
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


# -- roles of the other processes -------------------------------------------------------------------------------------


def hold(root: str) -> None:
    """Hold the directory, with a forked child and a started program that live on."""
    disk = open_disk(Path(root))
    program = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
    child = os.fork()
    if child == 0:
        disk.close()
        signal.pause()
    say(child)
    say(program.pid)
    signal.pause()


def write_for_ever(root: str) -> None:
    """Write and delete as fast as it goes, always as many chunks as fit."""
    disk = open_disk(Path(root), layout=LAYOUT, owner=DirectoryOwner("ns", "cache", str(os.getpid())), max_nbytes=LIMIT)
    kept = disk.inventory().entries
    capacity = disk_capacity(LIMIT, LAYOUT, 0)
    generation = 1 + max((entry.generation for entry in kept), default=0)
    say("writing")
    while True:
        while len(kept) >= capacity:
            disk.delete([kept.pop(0)])
        chunk = chunk_of(generation % 500, generation)
        assert put(disk, chunk, generation % 500, layout=LAYOUT)
        kept.append(chunk)
        generation += 1


# -- tests ------------------------------------------------------------------------------------------------------------


class Other:
    """Another process in one of the roles."""

    def __init__(self, role: str, root: Path) -> None:
        command = [sys.executable, __file__, role, str(root)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": ""})

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_directory_is_its_clusters_until_the_process_ends_and_no_longer(tmp_path: Path, end: signal.Signals) -> None:
    """Not even a child that it forked, nor a program that it started, keeps it."""
    other = Other("hold", tmp_path)
    left_behind = [int(other.line()), int(other.line())]
    try:
        with pytest.raises(DirectoryTakenError, match=rf"'ns/cache' \(process {other.process.pid} "):
            open_disk(tmp_path, owner=NEXT)
        second_rank = open_disk(tmp_path, rank=1)  # of the same life, in another process
        other.process.send_signal(end)
        other.process.wait()
        with pytest.raises(DirectoryTakenError, match="ns/cache"):
            open_disk(tmp_path, owner=NEXT)
        second_rank.close()
        assert [os.kill(pid, 0) for pid in left_behind] == [None, None]
        open_disk(tmp_path, owner=NEXT).close()
    finally:
        other.kill()
        for pid in left_behind:
            os.kill(pid, signal.SIGKILL)


def test_a_fork_of_ours_does_not_give_the_directory_up(tmp_path: Path) -> None:
    disk = open_disk(tmp_path)
    child = os.fork()
    if child == 0:
        disk.close()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(DirectoryTakenError):
        open_disk(tmp_path, owner=NEXT)
    assert put(disk, chunk_of(1), 1)


def test_killed_at_any_moment_it_leaves_chunks_and_nothing_else(tmp_path: Path) -> None:
    moments = random.Random(8)
    slot = empty_slot(LAYOUT)
    for round_ in range(6):
        other = Other("write_for_ever", tmp_path)
        assert other.line() == "writing"
        time.sleep(moments.uniform(0, 0.15))
        other.kill()
        assert du(tmp_path) <= LIMIT
        disk = RankDisk.open(tmp_path, owner=OWNER, layout=LAYOUT, rank=0, max_nbytes=LIMIT)
        found = disk.inventory()
        assert found.num_damaged == 0 and not list(tmp_path.rglob("*.tmp"))
        assert len(found.entries) <= disk_capacity(LIMIT, LAYOUT, 0)
        for chunk in found.entries:
            assert disk.read_into(chunk, slot) == (CHUNK_SIZE, None), f"round {round_}"
            assert np.array_equal(slot, slot_of(chunk.generation % 500, LAYOUT))
        disk.close()
    assert found.entries


if __name__ == "__main__":
    {role.__name__: role for role in (hold, write_for_ever)}[sys.argv[1]](sys.argv[2])
