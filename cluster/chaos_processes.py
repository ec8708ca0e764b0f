"""The processes of a chaos run: its drivers, which are started here, and the blows that all processes are dealt."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from .chaos_plan import NUM_DRIVERS, Blow
from .chaos_report import Call, ChaosReport
from .probe import PACKAGE_ROOT
from .world import ClusterStatus

_ENDING_S: Final = 30.0
_TOLD_LINES: Final = 3


class Drivers:
    """The driver processes of a run, and the lines that they write into `folder`."""

    def __init__(self, name: str, namespace: str, address: str, seed: int, folder: Path) -> None:
        self._cluster = (name, namespace)
        self._seed = seed
        self._folder = folder
        self._environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": PACKAGE_ROOT}
        self._lives = [0] * NUM_DRIVERS
        self._processes = [self._started(number) for number in range(NUM_DRIVERS)]

    def kill(self, number: int) -> None:
        """Kill one at once, and start another in its place."""
        self._processes[number].kill()
        self._processes[number].wait()
        self._lives[number] += 1
        self._processes[number] = self._started(number)

    def stop(self, report: ChaosReport) -> None:
        """End all, and count what they did. One that has ended by itself is a fault."""
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                report.faults.append(f"driver {number} has ended by itself: {self._last_words(number)}")
            process.terminate()
        for number, process in enumerate(self._processes):
            try:
                process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                report.hangs.append(f"driver {number} did not end within {_ENDING_S:g} s")
        self.kill_all()
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
        life = self._lives[number]
        lines = self._folder / f"driver-{number}-{life}.jsonl"
        with (self._folder / f"driver-{number}.log").open("ab") as log:
            return subprocess.Popen(
                [
                    sys.executable, "-m", "cluster.chaos_driver",
                    *self._cluster, str(number), str(life), str(self._seed), str(lines),
                ],
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=PACKAGE_ROOT,
            )  # fmt: skip

    def _last_words(self, number: int) -> str:
        lines = (self._folder / f"driver-{number}.log").read_text(encoding="utf-8", errors="replace").splitlines()
        return " / ".join(lines[-_TOLD_LINES:]) or f"status {self._processes[number].returncode}"


def deal(blow: Blow, status: ClusterStatus, drivers: Drivers) -> None:
    """Carry a blow out; `status` says which processes the cluster has."""
    if blow.driver is not None:
        drivers.kill(blow.driver)
        return
    pids = [pid for rank in blow.ranks if (pid := status.ranks[rank].pid) is not None]
    pids += [status.coordinator_pid] if blow.coordinator else []
    if blow.stop_s:
        _send(pids, signal.SIGSTOP)
        try:
            time.sleep(blow.stop_s)
        finally:
            _send(pids, signal.SIGCONT if not blow.kills else signal.SIGKILL)
    else:
        _send(pids, signal.SIGKILL)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.kill(pid, number)
