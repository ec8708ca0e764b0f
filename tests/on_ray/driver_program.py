"""A driver for tests that end drivers: starts a cluster, says so, and works until it is told otherwise.

    python driver_program.py ARENA_DIR NAME NAMESPACE WORLD_SIZE once|endless

Prints "starting", then a JSON list of the process ids of coordinator and ranks, then, once calls go on, "calling".
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from cluster.client import CacheCluster
from lmcache_ray import LMCacheEngineConfig

_NUM_TOKENS = 256


def main() -> None:
    """Runs one request, or one after the other."""
    arena_dir, name, namespace, world_size, how_long = sys.argv[1:]
    print("starting", flush=True)
    with CacheCluster.start(
        LMCacheEngineConfig(chunk_size=16, capacity_chunks=64, arena_dir=arena_dir),
        model_name="m",
        kv_shape=(1, 2, 16, 1, 4),
        kv_dtype=torch.float16,
        world_size=int(world_size),
        name=name,
        namespace=namespace,
    ) as cluster:
        status = cluster.status()
        print(json.dumps([status.coordinator_pid, *(rank.pid for rank in status.ranks)]), flush=True)
        _request(cluster, 0)
        print("calling", flush=True)
        number = 0
        while how_long == "endless":
            number += 1
            _request(cluster, number)


def _request(cluster: CacheCluster, number: int) -> None:
    tokens, slots = list(range(number, number + _NUM_TOKENS)), list(range(_NUM_TOKENS))
    assert cluster.store(tokens, slots) == _NUM_TOKENS
    assert cluster.retrieve(tokens, slots).all()


if __name__ == "__main__":
    main()
