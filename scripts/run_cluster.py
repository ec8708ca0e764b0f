"""A driver to copy from: starts a cache cluster, stores a few prompts on every rank, loads them back, checks the bytes.

    python scripts/run_cluster.py --world-size 4 --json

Joins the Ray that RAY_ADDRESS names (as in a Ray job), else starts a local one, which ends with this process. Works
from any folder, installed or not. Exit status: 0, or 1 if a byte differed or the run failed, or 2 for wrong arguments.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# This project's folder stands first on the path, here and (since Ray puts a driver's current folder first on the path
# of its workers) there: a package named `cluster` in the caller's folder or in site-packages must not win.
_CALLER_FOLDER = Path.cwd()
_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))
os.chdir(_ROOT)

import numpy as np  # noqa: E402
import torch  # noqa: E402  # imports of what stands above

from cluster.client import CacheCluster, ClusterStatus  # noqa: E402
from cluster.rank_start import RankContext  # noqa: E402
from lmcache_ray import LMCacheEngineConfig  # noqa: E402
from lmcache_ray.config import load_config  # noqa: E402
from lmcache_ray.errors import LMCacheRayError  # noqa: E402
from lmcache_ray.shape_spec import parse_kvcache_shape_spec  # noqa: E402

Slots = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_LAYER_GROUPS = {False: "(2,2,512,1,4):float16:2", True: "(2,1,512,1,8):float16:2"}  # 32 bytes per token and rank
_QUESTIONS = 3
_SYSTEM_CHUNKS = 2  # the prompts begin alike, as those of one application do
_QUESTION_CHUNKS = 1


@dataclass(frozen=True, slots=True)
class PromptResult:
    """What the cluster did with one prompt, in tokens; `mismatched_ranks` got other bytes than were stored."""

    num_tokens: int
    cached_before: int
    stored: int
    retrieved: int
    mismatched_ranks: list[int]


def main() -> int:
    """Run it; the exit status."""
    arguments = _parse_arguments()
    try:
        config = load_config(_CALLER_FOLDER / arguments.config)
        results, status, seconds = _run(config, arguments)
    except (LMCacheRayError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1  # 2: the configuration or the arguments cannot be meant
    passed = all(result.retrieved == result.num_tokens and not result.mismatched_ranks for result in results)
    _show(results, status)
    if arguments.json:
        prompts = [asdict(result) for result in results]
        answer = {"ok": passed, "world_size": len(status.ranks), "use_mla": arguments.use_mla, "prompts": prompts}
        print(json.dumps(answer | {"seconds": round(seconds, 3), "status": asdict(status)}), flush=True)
    return 0 if passed else 1


def _run(
    config: LMCacheEngineConfig, arguments: argparse.Namespace
) -> tuple[list[PromptResult], ClusterStatus, float]:
    prompts = _prompts(config.chunk_size)
    num_rows = 2 * sum(len(prompt) for prompt in prompts)  # of every rank's paged KV: to store from and to load into
    with CacheCluster.start(
        config,
        model_name="demo",
        layer_groups=parse_kvcache_shape_spec(_LAYER_GROUPS[arguments.use_mla]),
        world_size=arguments.world_size,
        use_mla=arguments.use_mla,
        name=arguments.name,
        num_blocks=-(-num_rows // config.block_size),
    ) as cluster:
        begin = time.perf_counter()
        slots = np.arange(num_rows).reshape(len(prompts), 2, -1)  # the prompts are equally long
        results = [
            _store_and_load(cluster, prompt, source, target)
            for prompt, (source, target) in zip(prompts, slots, strict=True)
        ]
        return results, cluster.status(), time.perf_counter() - begin


def _prompts(chunk_size: int) -> list[list[int]]:
    system = list(range(_SYSTEM_CHUNKS * chunk_size))
    length = _QUESTION_CHUNKS * chunk_size
    return [[*system, number, *range(1, length)] for number in range(_QUESTIONS)]


def _store_and_load(cluster: CacheCluster, prompt: Sequence[int], source: Slots, target: Slots) -> PromptResult:
    """Store the prompt from the KV rows `source` of each rank, load it into the rows `target`, compare them."""
    cached_before = cluster.lookup(prompt)
    cluster.retrieve(prompt, source)  # what is cached comes from the cluster, as in a serving engine ...
    wanted = cluster.run_on_ranks(prefill, source, cached_before)  # ... and only the rest is computed
    stored = cluster.store(prompt, source)
    retrieved = int(cluster.retrieve(prompt, target).sum())
    found = cluster.run_on_ranks(digest, target)
    mismatched = [rank for rank, pair in enumerate(zip(wanted, found, strict=True)) if pair[0] != pair[1]]
    return PromptResult(len(prompt), cached_before, stored, retrieved, mismatched)


def prefill(context: RankContext, slots: Slots, num_cached: int) -> str:
    """In a rank's process: stand in for the model that computes the rows after the cached ones; the digest of all.

    Writes random bytes, other ones for each rank and prompt; with MLA, the same on all ranks.
    """
    rank = 0 if context.engine.metadata.use_mla else context.worker_id
    generator = torch.Generator().manual_seed(1_000_000 * rank + int(slots[0]))
    for rows in _rows(context):
        shape = (rows.shape[0], len(slots) - num_cached, rows.shape[2])
        rows[:, slots[num_cached:]] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return digest(context, slots)


def digest(context: RankContext, slots: Slots) -> str:
    """In a rank's process: a digest of the KV rows `slots` of all layers."""
    found = hashlib.sha256()
    for rows in _rows(context):
        found.update(rows[:, slots].numpy().tobytes())
    return found.hexdigest()


def _rows(context: RankContext) -> list[torch.Tensor]:
    """The bytes of each layer's paged KV, ``[kv_size, slots, bytes of a row]``."""
    layers = []
    for cache in context.kv_caches:
        kv_size, num_blocks, block_size = cache.shape[:3]
        layers.append(cache.view(torch.uint8).view(kv_size, num_blocks * block_size, -1))
    return layers


def _show(results: Sequence[PromptResult], status: ClusterStatus) -> None:
    for number, result in enumerate(results):
        verdict = f"ranks {result.mismatched_ranks} differ" if result.mismatched_ranks else "bytes equal on every rank"
        print(
            f"prompt {number}: {result.num_tokens} tokens, {result.cached_before} were cached, {result.stored} are "
            f"now, {result.retrieved} loaded, {verdict}"
        )
    for rank in status.ranks:
        state = "alive" if rank.alive else "dead"
        print(f"rank {rank.worker_id} {state}: pid {rank.pid}, {rank.slots_used} of {rank.slots_total} slots")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start a cache cluster, store and load prompts, check the bytes.")
    parser.add_argument(
        "--config", default=_ROOT / "configs" / "cluster.yaml", metavar="FILE", help="YAML (configs/cluster.yaml)"
    )
    parser.add_argument("--world-size", type=int, default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--use-mla", action="store_true", help="one copy of the KV, held by rank 0")
    parser.add_argument("--name", metavar="NAME", help="of the cluster (the configuration's cluster_name)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line of stdout")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
