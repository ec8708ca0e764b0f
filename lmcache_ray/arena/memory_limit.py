"""How much memory this process may still take: the machine's, and its control group's (cgroup v2 and v1).

Reads /proc and /sys. Files in a tmpfs are charged to the group; when it is full, processes are killed, not refused.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_PROC: Final = Path("/proc/self")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_MEMINFO: Final = Path("/proc/meminfo")


class _Version(NamedTuple):
    """The file names of one cgroup version. `cache` is the line of memory.stat that counts reclaimable file cache."""

    limit: str
    usage: str
    cache: str


_V1: Final = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = _Version("memory.max", "memory.current", "inactive_file")


def free_memory_nbytes(proc: Path = _PROC, cgroups: Path = _CGROUPS, meminfo: Path = _MEMINFO) -> int | None:
    """What this process can still take: the machine's or the control group's, whichever is less; None if unknown."""
    limits = [available_memory_nbytes(proc, cgroups), *_available_in(meminfo)]
    return min((limit for limit in limits if limit is not None), default=None)


def available_memory_nbytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """The least that this group and the groups around it have left; None where nothing is limited.

    File cache that the kernel can drop at will counts as free.
    """
    left = [
        available for version, group in _groups(proc, cgroups) if (available := _left_in(group, version)) is not None
    ]
    return min(left, default=None)


def is_in_memory(directory: Path, proc: Path = _PROC) -> bool:
    """True if the files of `directory` are memory (tmpfs, ramfs) and not on a disk."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (proc / "mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
    return False


def _available_in(meminfo: Path) -> list[int]:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[_Version, Path]]:
    """Every memory group that bounds this process, innermost first."""
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, root = _V2, cgroups
        elif "memory" in controllers.split(","):
            version, root = _V1, cgroups / "memory"
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the path may be the host's and not exist here; the root is then the container's own group.
        yield version, group
        for parent in group.parents:
            if not parent.is_relative_to(root):
                break
            yield version, parent


def _left_in(group: Path, version: _Version) -> int | None:
    try:
        limit = (group / version.limit).read_text().strip()
        used = int((group / version.usage).read_text())
        stat = (group / "memory.stat").read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None  # no such group here, or one without the memory controller
    if limit == "max":
        return None
    cache = sum(int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{version.cache} "))
    return max(0, int(limit) - used + cache)
