"""The clusters that are measured: started in one way, under names of their own, in one local Ray."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from benchmarks.measure import Case, Json, TimedElsewhere, progress
from benchmarks.workload import BLOCK_SIZE, CHUNK_SIZE, MODEL_NAME, KVShape
from cluster.client import CacheCluster
from cluster.ray_session import open_session
from lmcache_ray import LMCacheEngineConfig
from lmcache_ray.shape_spec import LayerGroupSpec, parse_kvcache_shape_spec

_NAMESPACE = "lmcache_ray-benchmarks"
_LEAD_S = 0.01  # from a message to the moment at which all ranks begin: it must have reached them by then
_TIMEOUT_S = 120.0
_RANK_SIDE = "benchmarks.cluster_parts.rank_side"
_ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class World:
    """What is started: ranks, what each holds, and how much."""

    world_size: int
    layer_groups: Sequence[LayerGroupSpec]
    capacity_tokens: int
    use_mla: bool = False


def per_rank_world(world_size: int, shape: KVShape, *, kv_tokens: int, capacity_tokens: int) -> World:
    """Every rank holds its own shards; its paged KV has `kv_tokens` rows."""
    dims = (shape.num_layers, 2, kv_tokens // BLOCK_SIZE, shape.num_heads, shape.head_size)
    groups = parse_kvcache_shape_spec(f"({','.join(map(str, dims))}):bfloat16:{shape.num_layers}")
    return World(world_size, groups, capacity_tokens)


@contextmanager
def local_ray() -> Iterator[None]:
    """One Ray for all worlds of a script, whose workers import this project's packages."""
    os.chdir(_ROOT)  # Ray puts the current folder on the path of its workers
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    session = open_session(_NAMESPACE)
    try:
        yield
    finally:
        session.close()


@contextmanager
def running(world: World) -> Iterator[CacheCluster]:
    """The world, as long as the `with` lasts."""
    begin = time.perf_counter()
    config = LMCacheEngineConfig.from_dict(
        {
            "chunk_size": CHUNK_SIZE,
            "block_size": BLOCK_SIZE,
            "capacity_chunks": world.capacity_tokens // CHUNK_SIZE,
        }
    )
    with CacheCluster.start(
        config,
        model_name=MODEL_NAME,
        layer_groups=world.layer_groups,
        world_size=world.world_size,
        use_mla=world.use_mla,
        name=f"benchmark-{os.getpid()}",
        namespace=_NAMESPACE,
        timeout_s=_TIMEOUT_S,
    ) as cluster:
        progress(f"  {world.world_size} ranks up in {time.perf_counter() - begin:.1f} s")
        yield cluster


def concurrent_copy(cluster: CacheCluster, name: str, nbytes: int) -> Case:
    """A case: the plain copy `name` of `nbytes` in all ranks' processes at once; the slowest rank's time counts."""

    return timed_in_ranks(cluster, "memory_copy", name, nbytes)


def timed_in_ranks(cluster: CacheCluster, function: str, *arguments: object, lead_s: float = _LEAD_S) -> Case:
    """A case: `function` of `rank_side.py`, begun in all ranks at once; the slowest rank's own time counts.

    `lead_s` is how long the message, and what precedes the timing, may take to be ready in every rank.
    """

    def run() -> TimedElsewhere:
        begin_at = time.perf_counter() + lead_s
        return TimedElsewhere(max(cluster.run_on_ranks(f"{_RANK_SIDE}:{function}", *arguments, begin_at)))

    return run


def fan_out_copy(cluster: CacheCluster, name: str, nbytes: int) -> Case:
    """A case: one message to each rank, in which it copies `nbytes` once; timed here, with the messages."""
    return lambda: cluster.run_on_ranks(f"{_RANK_SIDE}:memory_copy", name, nbytes, 0.0)


def retrieve_in_ranks(cluster: CacheCluster, tokens: Sequence[int], rows: np.ndarray) -> list[int]:
    """Every rank's own engine loads the prompt; the tokens that each loaded."""
    return cluster.run_on_ranks(f"{_RANK_SIDE}:retrieve", list(tokens), rows)


def check_rows(cluster: CacheCluster, sources: np.ndarray, targets: np.ndarray) -> None:
    """RuntimeError unless every rank's KV rows `targets` are equal to its `sources`: what was timed did its work."""
    _check_same(_digests(cluster, sources), _digests(cluster, targets))


def check_rows_of_first(cluster: CacheCluster, sources: np.ndarray, targets: np.ndarray) -> None:
    """RuntimeError unless every rank's KV rows `targets` are equal to rank 0's `sources`."""
    found = _digests(cluster, targets)
    _check_same([_digests(cluster, sources)[0]] * len(found), found)


def _digests(cluster: CacheCluster, rows: np.ndarray) -> list[str]:
    return cluster.run_on_ranks(f"{_RANK_SIDE}:digest", rows)


def _check_same(wanted: Sequence[str], found: Sequence[str]) -> None:
    wrong = [rank for rank, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1]]
    if wrong:
        raise RuntimeError(f"ranks {wrong} got other bytes back than had been stored")


def copy_facts(cluster: CacheCluster) -> dict[str, Json]:
    """How the ranks copy: threads of torch, and by which means rows."""
    facts: list[tuple[int, bool]] = cluster.run_on_ranks(f"{_RANK_SIDE}:copy_facts")
    return {
        "torch_threads_per_rank": [threads for threads, _ in facts],
        "is_row_copy_compiled": all(is_compiled for _, is_compiled in facts),
    }


def no_op(cluster: CacheCluster) -> Case:
    """A case: a call of the coordinator that does nothing, over the handle that all calls use."""
    ping = cluster.link.coordinator.actor.ping
    return lambda: ray.get(ping.remote(), timeout=_TIMEOUT_S)


def no_op_in_ranks(cluster: CacheCluster) -> Case:
    """A case: a message to each rank that does nothing there."""
    pings = [worker.ping for worker in cluster.link.workers]
    return lambda: ray.get([ping.remote() for ping in pings], timeout=_TIMEOUT_S)


def expect(found: int, wanted: int, what: str) -> None:
    """RuntimeError unless a timed call did all of its work."""
    if found != wanted:
        raise RuntimeError(f"{what}: {found} of {wanted} tokens")
