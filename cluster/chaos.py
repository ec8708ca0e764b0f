"""A chaos run: verified traffic from several processes, while ranks, the coordinator and drivers are killed at random.

The cluster is the run's own, and so is its Ray. What is promised is measured from outside: before each blow a prompt is
stored; after it, that prompt and one that has been there from the beginning are loaded on every rank, again and again,
until all of both is a hit. Nobody stores them meanwhile. What was cleared before the blow must be a miss then.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from lmcache_ray.arena.names import cluster_digest, parse_file_name
from lmcache_ray.errors import LMCacheRayError

from .chaos_calls import VerifiedCalls
from .chaos_plan import NUM_DRIVERS, PROMPT_BLOCKS, Blow, blows, watched_prompt
from .chaos_processes import Drivers, deal
from .chaos_report import RECOVERY_BAR_S, ChaosReport
from .client import CacheCluster
from .launch import is_taken
from .workload import TraceRequest
from .world import ClusterStatus

_POLL_S: Final = 0.1
_QUIET_S: Final = 30.0
_PATIENCE_S: Final = 4 * RECOVERY_BAR_S
_STOP_TIMEOUTS: Final = 1.5  # how long a process is stopped, in deadlines of a call
_LASTING: Final = watched_prompt(0)

Tell = Callable[[str], None]


def run_chaos(
    cluster: CacheCluster, *, address: str, minutes: float, seed: int, tell: Tell = lambda line: None
) -> ChaosReport:
    """Do to `cluster` what `seed` says, for so many minutes; `address` is that of its Ray. It is whole in the end."""
    world = cluster.link.world
    is_shared = len(world.layout.holders) < world.layout.world_size
    report = ChaosReport(seed, minutes, world.layout.world_size, is_shared)
    with tempfile.TemporaryDirectory(prefix="lmcache_ray-chaos-") as folder:
        drivers = Drivers(world.name, world.namespace, address, seed, Path(folder))
        try:
            _ChaosRun(cluster, drivers, report, tell).strike_until(time.monotonic() + 60 * minutes)
            drivers.stop(report)
        finally:
            drivers.kill_all()
    _await_rest(cluster, report)
    return report


def files_left(arena_dir: str, namespace: str, name: str, disk: str | None) -> list[str]:
    """What a cluster that has ended has left behind: actors, files in shared memory, half-written ones on disk."""
    digest = cluster_digest(namespace, name)
    parsed = {found: parse_file_name(found) for found in os.listdir(arena_dir)}
    ours = [found for found, said in parsed.items() if said is not None and said.cluster == digest]
    left = [f"file {found} in {arena_dir}" for found in ours if not found.endswith(".alive")]
    left += [f"file {path}" for path in Path(disk).rglob("*.tmp")] if disk is not None else []
    return left + (["actors"] if is_taken(name, namespace) else [])


class _ChaosRun:
    """The process that kills, with a connection of its own."""

    def __init__(self, cluster: CacheCluster, drivers: Drivers, report: ChaosReport, tell: Tell) -> None:
        self._cluster = cluster
        self._calls = VerifiedCalls(cluster, NUM_DRIVERS)
        self._drivers = drivers
        self._report = report
        self._tell = tell

    def strike_until(self, end: float) -> None:
        """Blow after blow, until that time of the monotonic clock; the cluster is whole at the return."""
        report = self._report
        stop_s = _STOP_TIMEOUTS * self._cluster.link.world.call_timeout_s
        self._store(_LASTING)
        for number, blow in enumerate(blows(report.seed, world_size=report.world_size, stop_s=stop_s), start=1):
            time.sleep(blow.pause_s)
            if time.monotonic() > end:
                return
            newest = watched_prompt(number)
            self._store(newest)
            deal(blow, self._whole_status(), self._drivers)
            (report.kills if blow.kills else report.stops)[blow.kind] += 1
            self._recover(blow, number, [_LASTING, newest])
            self._clear(newest)

    def _recover(self, blow: Blow, number: int, committed: Sequence[TraceRequest]) -> None:
        begun = time.monotonic()
        what = f"{number}: {blow.kind}"
        if not _until(lambda: all(self._is_hit(prompt) for prompt in committed)):
            self._fail(f"{what}: what was committed was no hit within {_PATIENCE_S:g} s")
            self._store(_LASTING)
        hit_s = time.monotonic() - begun
        if not _until(self._cluster.is_healthy):
            self._fail(f"{what}: not whole within {_PATIENCE_S:g} s")
        whole_s = time.monotonic() - begun
        if number > 1 and self._count_hits("lookup", watched_prompt(number - 1)):
            self._fail(f"{what}: what was cleared is a hit again")
        self._report.recoveries_s.append(hit_s)
        self._report.whole_s.append(whole_s)
        self._tell(f"{what}: hits again after {hit_s:.1f} s, whole after {whole_s:.1f} s")

    def _store(self, prompt: TraceRequest) -> None:
        def is_stored() -> bool:
            self._count_hits("put", prompt)
            return self._count_hits("lookup", prompt) == PROMPT_BLOCKS

        if not _until(is_stored):
            self._fail(f"a prompt could not be stored within {_PATIENCE_S:g} s")

    def _clear(self, prompt: TraceRequest) -> None:
        def is_cleared() -> bool:
            return not self._calls.timed("clear", prompt).error and self._count_hits("lookup", prompt) == 0

        if not _until(is_cleared):
            self._fail(f"a prompt could not be cleared within {_PATIENCE_S:g} s")

    def _is_hit(self, prompt: TraceRequest) -> bool:
        return self._count_hits("retrieve", prompt) == PROMPT_BLOCKS

    def _count_hits(self, kind: str, prompt: TraceRequest) -> int:
        call = self._calls.timed(kind, prompt)
        self._report.count(call)
        return call.hits

    def _whole_status(self) -> ClusterStatus:
        found: list[ClusterStatus] = []

        def is_whole() -> bool:
            try:
                found[:] = [self._cluster.status()]
            except LMCacheRayError:
                return False
            return not found[0].problems

        if not _until(is_whole):
            self._fail(f"not whole within {_PATIENCE_S:g} s: {found[0].problems if found else 'no answer'}")
        return found[0] if found else self._cluster.status()

    def _fail(self, what: str) -> None:
        self._report.faults.append(what)
        self._tell(what)


def _until(is_so: Callable[[], bool], timeout_s: float = _PATIENCE_S) -> bool:
    """Ask until it is so; False if it never was."""
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def _await_rest(cluster: CacheCluster, report: ChaosReport) -> None:
    """Nothing is held, unfinished or contradictory when everybody has left."""
    found: list[str] = []

    def is_at_rest() -> bool:
        found[:] = _not_at_rest(cluster)
        return not found

    if _until(is_at_rest, _QUIET_S):
        try:
            cluster.check_integrity()
            if "disk" in cluster.status().tiers:
                found += cluster.check_tiers()
        except LMCacheRayError as error:
            found.append(f"{type(error).__name__}: {error}")
    report.leftovers += found


def _not_at_rest(cluster: CacheCluster) -> list[str]:
    try:
        status = cluster.status()
    except LMCacheRayError as error:
        return [str(error)]
    tiers = {
        f"{what} chunks of tier {name}": count
        for name, tier in status.tiers.items()
        for what, count in (("written", tier.writing), ("quarantined", tier.quarantined), ("waiting", tier.waiting))
    }
    counts = {"leases": status.leases, "clients beside this one": max(0, status.clients - 1), **tiers}
    return [f"{count} {what}" for what, count in counts.items() if count] + list(status.problems)
