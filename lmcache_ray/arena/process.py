"""Which process, of which boot, this is: what an arena's header records of its owner. Reads /proc.

Apart from the header because that one is pure.
"""

import os
from pathlib import Path

from lmcache_ray.arena.header import ArenaOwner
from lmcache_ray.errors import ArenaError


def current_owner(node_id: str) -> ArenaOwner:
    """This process as an owner on the node called `node_id`."""
    pid = os.getpid()
    start_ticks = process_start_ticks(pid)
    if start_ticks is None:
        raise ArenaError(f"cannot read this process's start time from /proc/{pid}/stat")
    return ArenaOwner(pid, start_ticks, node_id)


def is_alive(owner: ArenaOwner) -> bool:
    """True if that very process still runs: same pid, same start time, not a zombie."""
    return process_start_ticks(owner.pid) == owner.start_ticks


def process_start_ticks(pid: int) -> int | None:
    """When a running process was started, in clock ticks since boot; None if there is none, or only its zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name stands in parentheses and may itself hold blanks and parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(fields[18])


def boot_id() -> str:
    """The id of this machine's present boot: memory of another boot is not to be trusted."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        raise ArenaError(f"cannot read this machine's boot id: {error}") from error
