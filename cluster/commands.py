"""What the commands of `python -m cluster` do, once their arguments are read."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lmcache_ray.arena.liveness import LivenessFile
from lmcache_ray.arena.names import arena_path
from lmcache_ray.config import COMMAND_LINE, LMCacheEngineConfig, load_config, parse_overrides
from lmcache_ray.errors import ClusterNotFoundError, WorkloadError
from lmcache_ray.shape_spec import LayerGroupSpec, parse_kvcache_shape_spec

from .chat_workload import chat_workload
from .client import CacheCluster
from .launch import end_remains
from .ray_session import join_session, open_session
from .replay import Advance
from .replay import replay as run_replay
from .report import ReplayReport
from .tables import replay_table, status_table
from .workload import BLOCK_SIZE, TraceRequest, count_distinct_blocks, parse_trace

_KV_BLOCK = 16
_MAX_KV_NBYTES = 128 * 2**20
_DEFAULT_SPECS = {False: "(1,2,512,1,4):float16:1", True: "(1,1,512,1,8):float16:1"}  # 16 bytes per token
_LOCAL_NAME = "replay"
_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command answers: the JSON that `--json` prints, and the exit status."""

    as_json: dict[str, object]
    exit_status: int = 0


def replay(arguments: argparse.Namespace) -> Outcome:
    """Run a workload on a running cluster or on a local one made for it."""
    requests = _workload(arguments)
    if arguments.cluster is not None:
        with CacheCluster.connect(arguments.cluster, namespace=arguments.namespace) as cluster:
            report = _replay_with_progress(cluster, requests, arguments)
    else:
        report = _replay_locally(requests, arguments)
    if not arguments.json:
        Console().print(replay_table(report))
    return Outcome(report.to_json(), 1 if report.byte_mismatches else 0)


def up(arguments: argparse.Namespace, rest: Sequence[str]) -> Outcome:
    """Start a detached cluster on the running Ray."""
    config = load_config(arguments.config)
    config.update(parse_overrides(rest), COMMAND_LINE)
    groups = _layer_groups(arguments)
    session = join_session(arguments.namespace)
    try:
        with CacheCluster.start(
            config,
            model_name=arguments.model_name,
            layer_groups=groups,
            world_size=arguments.world_size,
            use_mla=arguments.use_mla,
            name=arguments.name,
            namespace=arguments.namespace,
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
    with CacheCluster.connect(arguments.name, namespace=arguments.namespace) as cluster:
        return _shown_status(cluster, arguments)


def down(arguments: argparse.Namespace) -> Outcome:
    """End a running cluster, whatever is left of it."""
    session = join_session(arguments.namespace)
    try:
        ended = end_remains(arguments.name, arguments.namespace)
    finally:
        session.close()
    if not ended:
        raise ClusterNotFoundError(f"no cache cluster {arguments.name!r} lives in namespace {arguments.namespace!r}")
    if not arguments.json:
        print(f"cluster {arguments.name!r} ended: {ended} processes")
    return Outcome({"name": arguments.name, "namespace": arguments.namespace, "ended_processes": ended})


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
    return requests


def _replay_locally(requests: Sequence[TraceRequest], arguments: argparse.Namespace) -> ReplayReport:
    capacity = arguments.capacity_blocks or max(1, count_distinct_blocks(requests))
    config = LMCacheEngineConfig(
        chunk_size=BLOCK_SIZE, block_size=_KV_BLOCK, capacity_chunks=capacity, cache_policy=arguments.policy
    )
    groups = _layer_groups(arguments)
    num_nodes = len(arguments.ranks_per_node) if arguments.ranks_per_node else arguments.nodes
    if arguments.nodes not in (1, num_nodes):
        raise WorkloadError(f"--nodes {arguments.nodes} and --ranks-per-node disagree on the number of nodes")
    session = open_session(arguments.namespace, num_nodes=num_nodes)
    try:
        with CacheCluster.start(
            config,
            model_name="replay",
            layer_groups=groups,
            world_size=arguments.world_size,
            use_mla=arguments.use_mla,
            name=_free_name(config.arena_dir, arguments.namespace),
            namespace=arguments.namespace,
            ranks_per_node=arguments.ranks_per_node,
            kv_source="cluster.replay_rank:zeroed_kv",
            num_blocks=_num_blocks(requests, groups, arguments.window),
            timeout_s=_TIMEOUT_S,
        ) as cluster:
            return _replay_with_progress(cluster, requests, arguments)
    finally:
        session.close()


def _layer_groups(arguments: argparse.Namespace) -> list[LayerGroupSpec]:
    return parse_kvcache_shape_spec(arguments.kvcache_shape_spec or _DEFAULT_SPECS[arguments.use_mla])


def _num_blocks(requests: Sequence[TraceRequest], groups: Sequence[LayerGroupSpec], window: int) -> int:
    """KV blocks for a window of the longest prompts, but for no more than `_MAX_KV_NBYTES` beyond one prompt."""
    longest = max(len(request.hash_ids) for request in requests) * BLOCK_SIZE
    token_nbytes = sum(_elements_per_token(group) * group.dtype.itemsize for group in groups)
    wanted = min(longest * window, _MAX_KV_NBYTES // token_nbytes)
    return -(-max(longest, wanted, _KV_BLOCK) // _KV_BLOCK)


def _elements_per_token(group: LayerGroupSpec) -> int:
    if len(group.shape) == 3:  # MLA: (layers, blocks, size)
        return group.shape[0] * group.shape[2]
    layers, kv_size, _, heads, head_size = group.shape
    return layers * kv_size * heads * head_size


def _free_name(arena_dir: str, namespace: str) -> str:
    """A fixed name, so that a run sweeps what a killed one left; numbered while other runs are at work."""
    number = 1
    while True:
        name = _LOCAL_NAME if number == 1 else f"{_LOCAL_NAME}-{number}"
        if not LivenessFile.is_alive(arena_path(arena_dir, namespace, name, 0)):
            return name
        number += 1


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
