"""The real coordinator actor under many drivers at once, which look prompts of 128 chunks up.

Drivers are threads, shared out among client processes (Ray actors), each with its own connection to the cluster; a
driver asks again as soon as it has its answer. All of them run on this machine, beside the coordinator: they take more
of the processors than it does. So its own time on the processor is given too, read from the kernel before and after.
"""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import ray

from benchmarks.claims import Claim, Part, beside
from benchmarks.cluster_parts.worlds import local_ray, per_rank_world, running
from benchmarks.index_parts.latency import Latency
from benchmarks.index_parts.prompts import NUM_CHUNKS, drawn, keys_of, packed_keys
from benchmarks.measure import Json, progress
from benchmarks.workload import CHUNK_SIZE, KVShape
from cluster.client import CacheCluster, Request
from cluster.messages import StoreDone, StoreItem, pack_flags
from cluster.ray_calls import Actor

HOW = (
    "client processes are Ray actors on the coordinator's machine; each has one connection (CacheCluster.connect) and "
    "as many threads as it has drivers; every driver calls lookup_many with ready keys, of prompts that are all READY, "
    "again and again; ping is the coordinator's no-op"
)
_TINY = KVShape(num_layers=1, num_heads=1, head_size=8)
_NUM_PROMPTS = 128
_FILL_PROMPTS = 16  # in one message
_LEAD_S = 1.0
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """How many drivers in how many processes; `batch` prompts in a call, or 0 for a call that does nothing."""

    num_processes: int
    threads_per_process: int
    batch: int

    @property
    def num_drivers(self) -> int:
        """All threads."""
        return self.num_processes * self.threads_per_process

    @property
    def name(self) -> str:
        """For tables."""
        call = f"lookups of {self.batch} prompts" if self.batch > 1 else "lookups" if self.batch else "pings"
        return f"{call}, {self.num_drivers} driver{'s' if self.num_drivers > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the drivers saw. `num_missed` prompts were answered as misses: too late, since all are there."""

    load: Load
    latency: Latency
    elapsed_s: float
    num_missed: int
    coordinator_s: float

    @property
    def calls_per_second(self) -> float:
        """Of all drivers together."""
        return len(self.latency.times_s) / self.elapsed_s

    def to_json(self) -> dict[str, Json]:
        """All of it, without the single times."""
        num_calls = len(self.latency.times_s)
        return {
            "processes": self.load.num_processes,
            "threads_per_process": self.load.threads_per_process,
            "prompts_per_call": self.load.batch,
            "calls_per_second": self.calls_per_second,
            "prompts_per_second": self.calls_per_second * self.load.batch,
            "chunks_per_second": self.calls_per_second * self.load.batch * NUM_CHUNKS,
            "missed_prompts": self.num_missed,
            "coordinator_processor_s_per_call": self.coordinator_s / num_calls,
            "coordinator_processor_share": self.coordinator_s / self.elapsed_s,
            **self.latency.to_json(),
        }


def measure_drivers(loads: Sequence[Load], *, seconds: float) -> Part:
    """Each load for so many seconds."""
    world = per_rank_world(1, _TINY, kv_tokens=CHUNK_SIZE, capacity_tokens=_NUM_PROMPTS * NUM_CHUNKS * CHUNK_SIZE)
    with local_ray(), running(world) as cluster:
        _fill(cluster)
        outcomes = [_run(cluster, load, seconds) for load in loads]
    claims = [claim for outcome in outcomes for claim in _claims(outcome)]
    return Part(claims, {"how": HOW, "loads": {outcome.load.name: outcome.to_json() for outcome in outcomes}})


def _claims(outcome: Outcome) -> list[Claim]:
    rate, load = outcome.calls_per_second, outcome.load
    spread = outcome.latency.spread
    processor_ms = outcome.coordinator_s / len(outcome.latency.times_s) * 1000
    times = beside(f"coordinator, median of {load.name}", note="as the driver sees it")
    prompts = rate * load.batch
    in_prompts = beside(f"coordinator, {load.name}", "a second", "prompts of 128 chunks")
    return [
        beside(f"coordinator, {load.name}", "a second", "calls").claim(rate, rate, rate),
        *([in_prompts.claim(prompts, prompts, prompts)] if load.batch > 1 else []),
        times.claim(*(time_s * 1000 for time_s in (spread.median, spread.lower_quartile, spread.upper_quartile))),
        beside(f"coordinator, p99 of {load.name}", note="as the driver sees it").of_spread(outcome.latency.p99_ms),
        beside(f"coordinator, {load.name}", note="its own time on the processor, of a call").claim(
            processor_ms, processor_ms, processor_ms
        ),
    ]


def _fill(cluster: CacheCluster) -> None:
    """Make all prompts READY in the index. No bytes are written: nothing is going to read any."""
    coordinator, good = cluster.link.coordinator, pack_flags([True] * NUM_CHUNKS)
    for first in range(0, _NUM_PROMPTS, _FILL_PROMPTS):
        items = [StoreItem(packed_keys(prompt), 0) for prompt in range(first, first + _FILL_PROMPTS)]
        plans = coordinator.prepare_stores(items)
        done = [StoreDone(plan.plan_id, {0: good}) for plan in plans if plan.plan_id is not None]
        if coordinator.complete(done) != [NUM_CHUNKS] * _FILL_PROMPTS:
            raise RuntimeError("not all prompts became READY: what follows would be void")


def _run(cluster: CacheCluster, load: Load, seconds: float) -> Outcome:
    progress(f"coordinator: {load.name}, {load.num_processes} processes x {load.threads_per_process} threads")
    world = cluster.link.world
    client_class = ray.remote(num_cpus=0)(Client)
    clients: list[Actor] = [
        client_class.remote(world.name, world.namespace, number)  # type: ignore[misc]  # Ray's types: a class, a handle
        for number in range(load.num_processes)
    ]
    ray.get([client.ready.remote() for client in clients], timeout=_GRACE_S)
    coordinator_pid = cluster.status().coordinator_pid
    begin_at, used_s = time.time() + _LEAD_S, _processor_s(coordinator_pid)
    calls = [client.run.remote(load.threads_per_process, load.batch, begin_at, seconds) for client in clients]
    answers: list[tuple[list[float], int]] = ray.get(calls, timeout=seconds + _GRACE_S)
    used_s, elapsed_s = _processor_s(coordinator_pid) - used_s, time.time() - begin_at
    for client in clients:
        ray.kill(client)
    times_s = list(chain.from_iterable(zip(*(times for times, _ in answers), strict=False)))
    return Outcome(load, Latency(times_s), elapsed_s, sum(missed for _, missed in answers), used_s)


def _processor_s(pid: int) -> float:
    """Seconds that a process has run, in all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Client:
    """One client process."""

    def __init__(self, name: str, namespace: str, number: int) -> None:
        self._number = number
        self._cluster = CacheCluster.connect(name, namespace=namespace)
        lengths = [CHUNK_SIZE] * NUM_CHUNKS
        self._requests = [Request(hashes=keys_of(prompt), offsets=lengths) for prompt in range(_NUM_PROMPTS)]

    def ready(self) -> None:
        """The first call: everything is imported and connected."""
        self._cluster.lookup_many(self._requests[:1])

    def run(self, num_threads: int, batch: int, begin_at: float, seconds: float) -> tuple[list[float], int]:
        """Ask from so many threads; how long each call took, and prompts that were not found."""
        results: list[tuple[list[float], int]] = [([], 0)] * num_threads

        def work(thread: int) -> None:
            results[thread] = self._ask(thread, batch, begin_at, seconds)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return list(chain.from_iterable(times for times, _ in results)), sum(missed for _, missed in results)

    def _ask(self, thread: int, batch: int, begin_at: float, seconds: float) -> tuple[list[float], int]:
        prompts = drawn(range(_NUM_PROMPTS), seed=self._number * 1000 + thread)
        times_s: list[float] = []
        num_missed = 0
        time.sleep(max(0.0, begin_at - time.time()))
        end = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            if batch:
                requests = [self._requests[next(prompts)] for _ in range(batch)]
                counts = self._cluster.lookup_many(requests)
                num_missed += sum(count != NUM_CHUNKS * CHUNK_SIZE for count in counts)
            else:
                ray.get(self._cluster.link.coordinator.actor.ping.remote())
            times_s.append(time.perf_counter() - begin)
        return times_s, num_missed
