"""How large arenas are and when they are refused."""

import os
from pathlib import Path

import pytest

from lmcache_ray.arena.capacity import (
    Limit,
    arena_nbytes,
    check_capacity,
    check_fits,
    check_memory,
    num_slots_for,
    probe_limits,
)
from lmcache_ray.arena.memory_limit import available_memory_nbytes, free_memory_nbytes, is_in_memory
from lmcache_ray.errors import ArenaError, CapacityError

GIB = 2**30


def test_the_budget_counts_chunk_bytes() -> None:
    assert num_slots_for(GIB, 2**20) == 1024
    assert num_slots_for(1000, 1000) == 1
    assert num_slots_for(1999, 1000) == 1


def test_a_chunk_larger_than_the_arena_is_refused_with_both_sizes() -> None:
    with pytest.raises(CapacityError, match=r"chunk of 1001 bytes .*arena of 1000 bytes.*max_local_cpu_size"):
        num_slots_for(1000, 1001)


def test_the_file_holds_header_tables_and_slots() -> None:
    assert arena_nbytes(1, 64) == 3 * 4096 + 64
    assert arena_nbytes(513, 64) == 4096 + 2 * 4096 + 9 * 4096 + 513 * 64


def test_what_fits_exactly_is_allowed_and_a_byte_more_is_not() -> None:
    limits = [Limit("shared memory", 300), Limit("the group", 200)]
    check_fits({0: 100, 1: 100}, limits, "/arenas")
    with pytest.raises(CapacityError) as caught:
        check_fits({1: 101, 0: 100}, limits, "/arenas")
    for part in ("/arenas", "need 201 bytes", "rank 0: 100, rank 1: 101", "the group has 200 left", "capacity_chunks"):
        assert part in str(caught.value)


def test_a_real_directory_is_measured(tmp_path: Path) -> None:
    check_capacity({0: 4096}, tmp_path)
    with pytest.raises(CapacityError, match=str(tmp_path)):
        check_capacity({0: 2**60}, tmp_path)
    with pytest.raises(ArenaError, match="nowhere"):
        probe_limits(tmp_path / "nowhere")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_group(group: Path, limit: str, used: int, cache: int) -> None:
    write(group / "memory.max", f"{limit}\n")
    write(group / "memory.current", f"{used}\n")
    write(group / "memory.stat", f"anon 5\ninactive_file {cache}\n")


def test_version_2_takes_the_tightest_group_on_the_way_up(tmp_path: Path) -> None:
    write(tmp_path / "proc/cgroup", "0::/outer/inner\n")
    make_group(tmp_path / "sys/outer/inner", "max", 10, 0)
    make_group(tmp_path / "sys/outer", "1000", 700, 150)
    assert available_memory_nbytes(tmp_path / "proc", tmp_path / "sys") == 450
    make_group(tmp_path / "sys/outer/inner", "400", 100, 0)
    assert available_memory_nbytes(tmp_path / "proc", tmp_path / "sys") == 300


def test_a_container_that_sees_only_its_own_group_is_measured(tmp_path: Path) -> None:
    write(tmp_path / "proc/cgroup", "0::/kubepods/pod1/not-visible-here\n")
    make_group(tmp_path / "sys", "1000", 1100, 0)
    assert available_memory_nbytes(tmp_path / "proc", tmp_path / "sys") == 0


def test_version_1_is_measured(tmp_path: Path) -> None:
    write(tmp_path / "proc/cgroup", "8:pids:/\n4:memory:/job\n0::/\n")
    group = tmp_path / "sys/memory/job"
    write(group / "memory.limit_in_bytes", "1000")
    write(group / "memory.usage_in_bytes", "600")
    write(group / "memory.stat", "inactive_file 1\ntotal_inactive_file 100\n")
    assert available_memory_nbytes(tmp_path / "proc", tmp_path / "sys") == 500


def test_no_limit_is_no_number(tmp_path: Path) -> None:
    write(tmp_path / "proc/cgroup", "0::/\n")
    assert available_memory_nbytes(tmp_path / "proc", tmp_path / "sys") is None


def test_free_memory_is_the_machines_or_the_groups_whichever_is_less(tmp_path: Path) -> None:
    write(tmp_path / "proc/cgroup", "0::/\n")
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       2000 kB\nMemFree:         500 kB\nMemAvailable:      1 kB\n")
    assert free_memory_nbytes(tmp_path / "proc", tmp_path / "sys", meminfo) == 1024
    make_group(tmp_path / "sys", "1000", 900, 0)
    assert free_memory_nbytes(tmp_path / "proc", tmp_path / "sys", meminfo) == 100


def test_memory_of_a_process_is_refused_with_both_sizes() -> None:
    with pytest.raises(CapacityError, match=r"rank 0: 1152921504606846976.*rank 1: 1"):
        check_memory({0: 2**60, 1: 1})
    check_memory({0: 4096})
    check_memory({})


def test_memory_filesystems_are_told_from_disks(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for kind, expected in (("tmpfs", True), ("ext4", False)):
        mounts = f"1 0 999:9 / /x rw - xfs y rw\n2 0 {number} / /z rw shared:1 - {kind} none rw\n"
        write(tmp_path / "proc/mountinfo", mounts)
        assert is_in_memory(tmp_path, tmp_path / "proc") is expected
