"""Removing what dead clusters left on this node.

A file is touched only if its name is one of ours and its lock can be taken, so never a living process's. Between
looking and unlinking the name may have been given to another file; the lock is therefore taken first and the file
unlinked only if the name still is its own: two sweepers, or a sweeper and a successor, do each other no harm.
"""

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lmcache_ray.arena.lock import lock_existing
from lmcache_ray.arena.mapped import read_header
from lmcache_ray.arena.names import FileName, cluster_digest, parse_file_name
from lmcache_ray.errors import ArenaError


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of ours that the sweep left, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep did, in order of file names."""

    removed: tuple[Path, ...]
    kept: tuple[KeptFile, ...]


@dataclass(frozen=True, slots=True)
class _Rules:
    cluster: str
    keep_ranks: Collection[int]
    restart_window_s: float
    now: float

    def reason_to_keep(self, path: Path, name: FileName) -> str | None:
        """Why a file without a living owner stays, or None if it may go.

        :raises OSError: it vanished or cannot be read.
        """
        if name.cluster == self.cluster:
            is_expected = not name.is_temporary and name.rank in self.keep_ranks
            return f"rank {name.rank} of this cluster may take it over" if is_expected else None
        # A clock that was set back leaves times in the future: those far from now, either way, mean nothing alive.
        age = abs(self.now - _last_sign_of_life(path, name))
        if age > self.restart_window_s:
            return None
        return f"another cluster's, last alive {age:.1f} s ago: it may restart within {self.restart_window_s:g} s"


def sweep(
    directory: str | Path,
    namespace: str,
    name: str,
    *,
    restart_window_s: float,
    now: float,
    keep_ranks: Collection[int] = (),
) -> SweepReport:
    """Remove the files of dead processes from `directory`.

    Of the cluster (`namespace`, `name`): all but the arenas of `keep_ranks`, ranks that may yet be restarted and take
    theirs over. Of other clusters: what showed no sign of life within `restart_window_s` before `now` (seconds since
    the Unix epoch); such a sign is an arena's heartbeat, else (no readable header, temporary or liveness file) the
    time of the file's last modification.

    :raises ArenaError: the directory cannot be listed.
    """
    rules = _Rules(cluster_digest(namespace, name), keep_ranks, restart_window_s, now)
    removed: list[Path] = []
    kept: list[KeptFile] = []
    try:
        file_names = sorted(os.listdir(directory))
    except OSError as error:
        raise ArenaError(f"cannot sweep arena directory {directory}: {error}") from error
    for file_name in file_names:
        parsed = parse_file_name(file_name)
        if parsed is None:
            continue
        path = Path(directory) / file_name
        try:
            reason = _sweep_file(path, parsed, rules)
        except FileNotFoundError:
            continue  # another one swept it
        except OSError as error:
            reason = f"cannot be examined: {error}"
        if reason is None:
            removed.append(path)
        else:
            kept.append(KeptFile(path, reason))
    return SweepReport(tuple(removed), tuple(kept))


def _sweep_file(path: Path, name: FileName, rules: _Rules) -> str | None:
    # Look before locking, so that a file that stays is never locked, not even for an instant.
    reason = rules.reason_to_keep(path, name)
    if reason is not None:
        return reason
    lock = lock_existing(path)
    if lock is None:
        return "a living process holds its lock"
    reason = rules.reason_to_keep(path, name)  # again: it may have been taken over and left meanwhile
    if reason is None:
        lock.unlink()
    lock.release()
    return reason


def _last_sign_of_life(path: Path, name: FileName) -> float:
    """Seconds since the Unix epoch."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if name.rank is not None and not name.is_temporary:
            with suppress(ArenaError):
                return read_header(fd, path).heartbeat
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)
