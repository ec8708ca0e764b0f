"""How large an arena is, and whether all arenas of a node fit before the first of them is made.

The check looks at everything that a rank alone would run into too late: the free space of the directory, and the
memory that the machine and the control group still allow when the directory is in memory.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lmcache_ray.arena.memory_limit import free_memory_nbytes, is_in_memory
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.errors import ArenaError, CapacityError

_FREE_MEMORY: Final = "the free memory of this machine and control group"
_OTHER_DIRECTORY: Final = ", or set arena_dir to a larger directory"


@dataclass(frozen=True, slots=True)
class Limit:
    """How many bytes something still allows. `source` says what and `remedy` what else would help, for a message."""

    source: str
    available_nbytes: int
    remedy: str = ""


def arena_nbytes(num_slots: int, slot_nbytes: int) -> int:
    """The exact size of the file of an arena with these slots."""
    return ArenaGeometry(num_slots, slot_nbytes).file_nbytes


def num_slots_for(budget_nbytes: int, slot_nbytes: int) -> int:
    """How many chunks fit in a budget of chunk bytes. The tables beside them (72 bytes a slot) do not count.

    :raises CapacityError: not even one does; the message names both sizes.
    """
    if budget_nbytes < slot_nbytes:
        raise CapacityError(
            f"one chunk of {slot_nbytes} bytes is larger than the arena of {budget_nbytes} bytes: "
            f"raise max_local_cpu_size, or make chunks smaller (chunk_size)"
        )
    return budget_nbytes // slot_nbytes


def check_memory(requests: Mapping[int, int]) -> None:
    """Refuse arenas that this process cannot hold together in its own memory. `requests`: rank -> bytes.

    :raises CapacityError: with the bytes per rank, in total and available.
    """
    memory = free_memory_nbytes()
    if memory is not None and requests:
        check_fits(requests, [Limit(_FREE_MEMORY, memory)], "this process's memory")


def check_capacity(requests: Mapping[int, int], directory: str | Path) -> None:
    """Refuse arenas that do not fit on this node together. `requests`: rank -> bytes of a file that is yet to be made.

    :raises CapacityError: with the bytes per rank, in total and available, the directory and the remedy.
    :raises ArenaError: the directory cannot be looked at.
    """
    check_fits(requests, probe_limits(directory), directory)


def check_fits(requests: Mapping[int, int], limits: list[Limit], place: str | Path) -> None:
    """`check_capacity` against given limits. Pure. `place` is where the arenas are to be, for the message.

    :raises CapacityError: as there.
    """
    total = sum(requests.values())
    tightest = min(limits, key=lambda limit: limit.available_nbytes)
    if total <= tightest.available_nbytes:
        return
    per_rank = ", ".join(f"rank {rank}: {nbytes}" for rank, nbytes in sorted(requests.items()))
    raise CapacityError(
        f"the arenas of this node do not fit in {place}: they need {total} bytes ({per_rank}), "
        f"{tightest.source} has {tightest.available_nbytes} left; "
        f"lower max_local_cpu_size or capacity_chunks{tightest.remedy}"
    )


def probe_limits(directory: str | Path) -> list[Limit]:
    """What bounds new files in `directory` at this moment; never empty.

    :raises ArenaError: the directory cannot be looked at.
    """
    try:
        disk = os.statvfs(directory)
        limits = [Limit(f"the filesystem of {directory}", disk.f_bavail * disk.f_frsize, _OTHER_DIRECTORY)]
        memory = free_memory_nbytes() if is_in_memory(Path(directory)) else None
    except OSError as error:
        raise ArenaError(f"cannot look at arena directory {directory}: {error}") from error
    if memory is not None:
        limits.append(Limit(_FREE_MEMORY, memory))
    return limits
