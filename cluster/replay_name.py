"""What the cluster of a local replay is called: a fixed name, so that a run sweeps what a killed one has left.

Several replays may run at once, so the name is numbered: replay, replay-2, ... Each run holds its own by a locked file
that ends with the process, from before its cluster is made until after it has ended.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from lmcache_ray.arena.liveness import LivenessFile
from lmcache_ray.arena.names import cluster_digest, liveness_path, parse_file_name
from lmcache_ray.arena.sweep import sweep
from lmcache_ray.errors import ArenaError, ArenaLockedError, ClusterError

MAX_REPLAYS: Final = 32
_NAMES: Final = ("replay", *(f"replay-{number}" for number in range(2, MAX_REPLAYS + 1)))
_HOLDER: Final = "the replay itself"  # as a client of the cluster that it makes


@contextmanager
def held_name(
    arena_dir: str,
    namespace: str,
    *,
    restart_window_s: float,
    now: float,
    is_taken: Callable[[str], bool] = lambda name: False,
) -> Iterator[str]:
    """The first name that nobody holds on this machine and that is not `is_taken` elsewhere; held within the context.

    Sweeps what killed replays of the other names have left in `arena_dir`; what is left of this name the start of its
    cluster sweeps, on every node. `restart_window_s` and `now` are those of `sweep`.

    Raises `ArenaError` if `arena_dir` cannot be used, `ClusterError` if all names are taken.
    """
    name, lock = _hold_first(arena_dir, namespace, is_taken)
    with lock:
        left = _clusters_in(arena_dir)
        for other in _NAMES:
            if other != name and cluster_digest(namespace, other) in left:
                _sweep_if_free(arena_dir, namespace, other, restart_window_s, now)
        yield name


def _hold_first(arena_dir: str, namespace: str, is_taken: Callable[[str], bool]) -> tuple[str, LivenessFile]:
    for name in _NAMES:
        lock = _hold(arena_dir, namespace, name)
        if lock is not None and not is_taken(name):
            return name, lock
        if lock is not None:
            lock.close()
    raise ClusterError(f"{MAX_REPLAYS} replays run already in namespace {namespace!r} with arena_dir {arena_dir}")


def _sweep_if_free(arena_dir: str, namespace: str, name: str, restart_window_s: float, now: float) -> None:
    lock = _hold(arena_dir, namespace, name)
    if lock is not None:
        with lock:
            sweep(arena_dir, namespace, name, restart_window_s=restart_window_s, now=now)


def _hold(arena_dir: str, namespace: str, name: str) -> LivenessFile | None:
    """None if a replay that lives, or another user, has the name. Raises `ArenaError`."""
    path = liveness_path(arena_dir, namespace, name, _HOLDER)
    try:
        return None if LivenessFile.is_alive(path) else LivenessFile.create(arena_dir, namespace, name, _HOLDER)
    except ArenaLockedError:
        return None
    except ArenaError:
        if path.exists():  # another user's, who may have left it for good
            return None
        raise


def _clusters_in(arena_dir: str) -> set[str]:
    """Digests of the clusters that have files there."""
    parsed = (parse_file_name(file_name) for file_name in os.listdir(arena_dir))
    return {found.cluster for found in parsed if found is not None}
