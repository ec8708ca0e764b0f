"""What the commands of `python -m cluster` do with a cluster, once their arguments are read."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lmcache_ray.build import tiers_of_config
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.errors import ClusterNotFoundError, ConfigError, WorkloadError
from lmcache_ray.shape_spec import LayerGroupSpec, parse_kvcache_shape_spec
from lmcache_ray.tiers.assembly import check_remote

from .chaos import files_left, run_chaos
from .chaos_plan import KV_ROWS
from .chat_workload import chat_workload
from .cli import read_config
from .client import CacheCluster
from .launch import end_remains, is_taken
from .outcome import Outcome
from .probe import PACKAGE_ROOT
from .ray_session import join_session, open_session
from .replay import Advance
from .replay import replay as run_replay
from .replay_name import held_name
from .report import ReplayReport
from .tables import chaos_table, replay_table, status_table
from .topology import spread
from .workload import BLOCK_SIZE, TraceRequest, count_distinct_blocks, parse_trace

_MAX_KV_NBYTES = 128 * 2**20
_DEFAULT_SPECS = {False: "(1,2,512,1,4):float16:1", True: "(1,1,512,1,8):float16:1"}  # 16 bytes per token
_TIMEOUT_S = 180.0
_CHAOS_CHUNKS = 256
_CHAOS_CALL_S = 6.0


def replay(arguments: argparse.Namespace) -> Outcome:
    """Run a workload on a running cluster or on a local one made for it."""
    requests = _workload(arguments)
    config = read_config(arguments)
    if arguments.cluster is not None:
        with CacheCluster.connect(arguments.cluster, namespace=config.cluster_namespace) as cluster:
            report = _replay_with_progress(cluster, requests, arguments)
    else:
        report = _replay_locally(config, requests, arguments)
    if not arguments.json:
        Console().print(replay_table(report))
    return Outcome(report.to_json(), 1 if report.byte_mismatches else 0)


def up(arguments: argparse.Namespace) -> Outcome:
    """Start a detached cluster on the running Ray."""
    config = read_config(arguments)
    groups = _layer_groups(arguments)
    with _in_own_folder():
        session = join_session(config.cluster_namespace)
    try:
        with CacheCluster.start(
            config,
            model_name=arguments.model_name,
            layer_groups=groups,
            world_size=arguments.world_size,
            use_mla=arguments.use_mla,
            ranks_per_node=arguments.ranks_per_node,
            num_blocks=arguments.num_blocks,
            detached=True,
            timeout_s=_TIMEOUT_S,
        ) as cluster:
            return _shown_status(cluster, arguments)
    finally:
        session.close()


def status(arguments: argparse.Namespace) -> Outcome:
    """How a running cluster stands; exit status 1 if it is not whole."""
    config = read_config(arguments)
    with CacheCluster.connect(config.cluster_name, namespace=config.cluster_namespace) as cluster:
        return _shown_status(cluster, arguments)


def check(arguments: argparse.Namespace) -> Outcome:
    """Compare a running cluster's disk files with its index; exit status 1 if they disagree and are left so."""
    config = read_config(arguments)
    with CacheCluster.connect(config.cluster_name, namespace=config.cluster_namespace) as cluster:
        if "disk" not in cluster.status().tiers:
            raise ConfigError(f"cluster {config.cluster_name!r} has no disk tier: it was started without local_disk")
        findings = cluster.check_tiers(repair=arguments.fix)
        remaining = cluster.check_tiers() if findings and arguments.fix else findings
    if not arguments.json:
        for finding in findings:
            print(finding)
        print(f"{len(findings)} findings, {len(remaining)} of them are left" if findings else "index and files agree")
    return Outcome({"findings": findings, "remaining": remaining}, 1 if remaining else 0)


def chaos(arguments: argparse.Namespace) -> Outcome:
    """Kill processes of a cluster of its own at random under verified traffic; exit status 1 if a promise broke."""
    config = read_config(arguments)
    config.update({"chunk_size": BLOCK_SIZE, "capacity_chunks": _CHAOS_CHUNKS, "call_timeout_s": _CHAOS_CALL_S})
    namespace = config.cluster_namespace
    with _in_own_folder():
        session = open_session(namespace)
    try:
        with held_name(
            config.arena_dir,
            namespace,
            restart_window_s=config.restart_window_s,
            now=time.time(),
            is_taken=lambda name: is_taken(name, namespace),
        ) as name:
            with CacheCluster.start(
                config,
                model_name="replay",
                layer_groups=_layer_groups(arguments),
                world_size=arguments.world_size,
                use_mla=arguments.use_mla,
                name=name,
                kv_source="cluster.replay_rank:zeroed_kv",
                num_blocks=-(-KV_ROWS // config.block_size),
                timeout_s=_TIMEOUT_S,
            ) as cluster:
                report = run_chaos(
                    cluster,
                    address=session.address,
                    minutes=arguments.minutes,
                    seed=arguments.seed,
                    tell=lambda line: print(line, file=sys.stderr, flush=True),
                )
            report.leftovers += files_left(config.arena_dir, namespace, name, config.local_disk)
    finally:
        session.close()
    if not arguments.json:
        Console().print(chaos_table(report))
    return Outcome(report.to_json(), 0 if report.is_good else 1)


def restart(arguments: argparse.Namespace) -> Outcome:
    """Start the ranks of a running cluster anew, one by one."""
    config = read_config(arguments)
    with CacheCluster.connect(config.cluster_name, namespace=config.cluster_namespace) as cluster:
        ranks = None if arguments.rank is None else [arguments.rank]
        away = cluster.restart_ranks(ranks, timeout_s=arguments.timeout)
    if not arguments.json:
        for rank, seconds in away.items():
            print(f"rank {rank} is back after {seconds:.1f} s")
    return Outcome({"away_s": {str(rank): round(seconds, 3) for rank, seconds in away.items()}})


def drain(arguments: argparse.Namespace) -> Outcome:
    """End a running cluster with all stores finished and copied to disk; exit status 1 if something was left out."""
    config = read_config(arguments)
    cluster = CacheCluster.connect(config.cluster_name, namespace=config.cluster_namespace)
    drained = cluster.drain(timeout_s=arguments.timeout)
    if not arguments.json:
        print(
            f"cluster {config.cluster_name!r} ended: {drained.open_stores} stores were not finished, "
            f"{drained.unflushed} chunks not copied to disk"
        )
    return Outcome(asdict(drained), 1 if drained.open_stores or drained.unflushed else 0)


def down(arguments: argparse.Namespace) -> Outcome:
    """End a running cluster, whatever is left of it."""
    config = read_config(arguments)
    name, namespace = config.cluster_name, config.cluster_namespace
    session = join_session(namespace)
    try:
        ended = end_remains(name, namespace)
    finally:
        session.close()
    if not ended:
        raise ClusterNotFoundError(f"no cache cluster {name!r} lives in namespace {namespace!r}")
    if not arguments.json:
        print(f"cluster {name!r} ended: {ended} processes")
    return Outcome({"name": name, "namespace": namespace, "ended_processes": ended})


def _workload(arguments: argparse.Namespace) -> list[TraceRequest]:
    if arguments.trace is None:
        wanted = {} if arguments.requests is None else {"num_requests": arguments.requests}
        return chat_workload(seed=arguments.seed, **wanted)
    path = Path(arguments.trace)
    try:
        with path.open(encoding="utf-8") as lines:
            requests = list(parse_trace(lines, source=str(path), limit=arguments.requests))
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"trace {path} cannot be read: {error}") from error
    if not requests:
        raise WorkloadError(f"trace {path} has no requests")
    if not any(request.hash_ids for request in requests):
        raise WorkloadError(f"trace {path} has no blocks: hash_ids is empty in every request")
    return requests


def _replay_locally(
    config: LMCacheEngineConfig, requests: Sequence[TraceRequest], arguments: argparse.Namespace
) -> ReplayReport:
    check_remote(tiers_of_config(config).remote)  # before anything is started for it
    capacity = arguments.capacity_blocks or max(1, count_distinct_blocks(requests))
    config.update({"chunk_size": BLOCK_SIZE, "capacity_chunks": capacity})
    groups = _layer_groups(arguments)
    num_nodes = arguments.nodes or len(arguments.ranks_per_node or [1])
    ranks_per_node = spread(arguments.world_size, num_nodes, arguments.ranks_per_node)
    namespace = config.cluster_namespace
    with _in_own_folder():
        session = open_session(namespace, num_nodes=num_nodes)
    try:
        with (
            held_name(
                config.arena_dir,
                namespace,
                restart_window_s=config.restart_window_s,
                now=time.time(),
                is_taken=lambda name: is_taken(name, namespace),
            ) as name,
            CacheCluster.start(
                config,
                model_name="replay",
                layer_groups=groups,
                world_size=arguments.world_size,
                use_mla=arguments.use_mla,
                name=name,
                ranks_per_node=ranks_per_node,
                kv_source="cluster.replay_rank:zeroed_kv",
                num_blocks=_num_blocks(requests, groups, arguments.window, config.block_size),
                timeout_s=_TIMEOUT_S,
            ) as cluster,
        ):
            return _replay_with_progress(cluster, requests, arguments)
    finally:
        session.close()


@contextmanager
def _in_own_folder() -> Iterator[None]:
    """Around a connection to Ray whose workers have to import this package.

    Ray puts the folder in which it is connected to first on the path of its workers, where a package `cluster` of
    somebody else would win over this one, even over the installed one.
    """
    callers = Path.cwd()
    os.chdir(PACKAGE_ROOT)
    try:
        yield
    finally:
        os.chdir(callers)


def _layer_groups(arguments: argparse.Namespace) -> list[LayerGroupSpec]:
    return parse_kvcache_shape_spec(arguments.kvcache_shape_spec or _DEFAULT_SPECS[arguments.use_mla])


def _num_blocks(
    requests: Sequence[TraceRequest], groups: Sequence[LayerGroupSpec], window: int, block_size: int
) -> int:
    """KV blocks for a window of the longest prompts, but for no more than `_MAX_KV_NBYTES` beyond one prompt."""
    longest = max(len(request.hash_ids) for request in requests) * BLOCK_SIZE
    wanted = min(longest * window, _MAX_KV_NBYTES // sum(group.token_nbytes for group in groups))
    return -(-max(longest, wanted) // block_size)


def _replay_with_progress(
    cluster: CacheCluster, requests: Sequence[TraceRequest], arguments: argparse.Namespace
) -> ReplayReport:
    with _progress(len(requests)) as advance:
        return run_replay(
            cluster, requests, window=arguments.window, verify=arguments.verify, advance=advance
        )


@contextmanager
def _progress(num_requests: int) -> Iterator[Advance]:
    """A bar on stderr; nothing where stderr is no terminal."""
    columns = (TextColumn("replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("replay", total=num_requests)
        yield lambda count: progress.advance(task, count)


def _shown_status(cluster: CacheCluster, arguments: argparse.Namespace) -> Outcome:
    found = cluster.status()
    if not arguments.json:
        Console().print(status_table(found))
        for problem in found.problems:
            print(problem, file=sys.stderr)
    return Outcome(asdict(found), 1 if found.problems else 0)
