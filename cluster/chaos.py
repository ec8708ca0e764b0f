"""A chaos run: verified traffic from several processes, while ranks, the coordinator and drivers are killed at random.

The cluster is the run's own, and so is its Ray. What is promised is measured from outside: a prompt that was stored
before a blow is loaded on every rank again and again after it, until it is a hit, and every byte is compared.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lmcache_ray.arena.names import cluster_digest, parse_file_name
from lmcache_ray.errors import LMCacheRayError

from .chaos_driver import PROMPT_BLOCKS, VerifiedCalls, probe_prompt
from .chaos_plan import RECOVERY_BAR_S, Blow, Call, ChaosReport, blows
from .client import CacheCluster
from .launch import is_taken
from .probe import PACKAGE_ROOT

NUM_DRIVERS = 2
_POLL_S = 0.1
_QUIET_S = 30.0
_LONGEST_RECOVERY_S = 4 * RECOVERY_BAR_S


class Drivers:
    """The driver processes of a run, and the lines they have written."""

    def __init__(self, cluster: CacheCluster, address: str, seed: int, folder: Path) -> None:
        self._world = cluster.link.world
        self._seed = seed
        self._folder = folder
        self._environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": PACKAGE_ROOT}
        self._processes = [self._started(number) for number in range(NUM_DRIVERS)]

    def kill(self, number: int) -> None:
        """Kill one at once, and start another in its place."""
        self._processes[number].kill()
        self._processes[number].wait()
        self._processes[number] = self._started(number)

    def stop(self, report: ChaosReport) -> None:
        """End all, and count their calls. One that has ended by itself is a fault."""
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                report.faults.append(f"driver {number} has ended by itself with {process.returncode}")
            process.terminate()
        for number, process in enumerate(self._processes):
            try:
                process.wait(_QUIET_S)
            except subprocess.TimeoutExpired:
                report.hangs.append(f"driver {number} did not end within {_QUIET_S:g} s")
                process.kill()
                process.wait()
        for path in sorted(self._folder.glob("driver-*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                with suppress(json.JSONDecodeError):  # the last line of one that was killed
                    report.count(Call(**json.loads(line)))

    def kill_all(self) -> None:
        """Whatever goes wrong, none is left."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _started(self, number: int) -> "subprocess.Popen[bytes]":
        path = self._folder / f"driver-{number}.jsonl"
        arguments = [self._world.name, self._world.namespace, str(number), str(self._seed), str(path)]
        with (self._folder / f"driver-{number}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cluster.chaos_driver", *arguments],
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=PACKAGE_ROOT,
            )


def run_chaos(
    cluster: CacheCluster,
    *,
    address: str,
    minutes: float,
    seed: int,
    tell: Callable[[str], None] = lambda line: None,
) -> ChaosReport:
    """Do to `cluster` what `seed` says, for so many minutes; `address` is that of its Ray. It is whole in the end."""
    world = cluster.link.world
    report = ChaosReport(seed, minutes, world.layout.world_size, not _is_per_rank(cluster))
    with tempfile.TemporaryDirectory(prefix="lmcache_ray-chaos-") as folder:
        drivers = Drivers(cluster, address, seed, Path(folder))
        try:
            _strike(cluster, drivers, report, time.monotonic() + 60 * minutes, tell)
            drivers.stop(report)
        finally:
            drivers.kill_all()
        _await_rest(cluster, report)
    return report


def files_left(arena_dir: str, namespace: str, name: str) -> list[str]:
    """What a cluster that has ended has left behind: actors, and files in shared memory."""
    digest = cluster_digest(namespace, name)
    parsed = {found: parse_file_name(found) for found in os.listdir(arena_dir)}
    ours = [found for found, said in parsed.items() if said is not None and said.cluster == digest]
    left = [f"file {found} in {arena_dir}" for found in ours if not found.endswith(".alive")]
    return left + (["actors"] if is_taken(name, namespace) else [])


def _strike(
    cluster: CacheCluster, drivers: Drivers, report: ChaosReport, until: float, tell: Callable[[str], None]
) -> None:
    stop_s = 1.5 * cluster.link.world.call_timeout_s
    calls = VerifiedCalls(cluster)
    for blow in blows(report.seed, world_size=report.world_size, num_drivers=NUM_DRIVERS, stop_s=stop_s):
        _await_hit(calls)
        time.sleep(blow.pause_s)
        if time.monotonic() > until:
            return
        _carry_out(blow, cluster, drivers)
        report.kills[blow.kind] += 1
        begun = time.monotonic()
        hit_after = _await_hit(calls)
        _await(cluster.is_healthy, _LONGEST_RECOVERY_S)
        report.recoveries_s.append(hit_after)
        report.whole_s.append(time.monotonic() - begun)
        tell(f"{sum(report.kills.values())}: {blow.kind}: a hit again after {hit_after:.1f} s")


def _carry_out(blow: Blow, cluster: CacheCluster, drivers: Drivers) -> None:
    if blow.driver is not None:
        drivers.kill(blow.driver)
        return
    status = cluster.status()
    pids = [pid for rank in blow.ranks if (pid := status.ranks[rank].pid) is not None]
    if blow.stop_s:
        for pid in pids:
            _send(pid, signal.SIGSTOP)
        time.sleep(blow.stop_s)
        for pid in pids:
            _send(pid, signal.SIGCONT)
        return
    for pid in [*pids, *([status.coordinator_pid] if blow.coordinator else [])]:
        _send(pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself
        os.kill(pid, number)


def _await_hit(calls: VerifiedCalls) -> float:
    """The seconds until the probe prompt is whole on every rank; it is stored if it was not there at first."""

    def is_hit() -> bool:
        try:
            hits, mismatches = calls.replay(probe_prompt())
        except LMCacheRayError:
            return False
        if mismatches:
            raise AssertionError(f"{mismatches} bytes of the probe prompt are wrong")
        return hits == PROMPT_BLOCKS

    return _await(is_hit, _LONGEST_RECOVERY_S)


def _await(is_so: Callable[[], bool], timeout_s: float) -> float:
    begun = time.monotonic()
    while not is_so() and time.monotonic() - begun < timeout_s:
        time.sleep(_POLL_S)
    return time.monotonic() - begun


def _await_rest(cluster: CacheCluster, report: ChaosReport) -> None:
    """Nothing is held, unfinished or contradictory when everybody has left."""
    found: list[str] = []

    def is_at_rest() -> bool:
        found[:] = _not_at_rest(cluster)
        return not found

    _await(is_at_rest, _QUIET_S)
    report.leftovers += found
    if not found:
        cluster.check_integrity()


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


def _is_per_rank(cluster: CacheCluster) -> bool:
    layout = cluster.link.world.layout
    return len(layout.holders) == layout.world_size
