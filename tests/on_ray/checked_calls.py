"""Calls of a cluster whose every byte is compared: what a prompt's KV must be follows from its tokens (`shards_of`)."""

import time
from collections.abc import Callable, Sequence

import numpy as np

from cluster.client import CacheCluster
from tests.on_ray import rank_functions
from tests.on_ray.kv_bytes import GroupBytes, assert_same, repeated, shard_bytes
from tests.on_ray.random_driver import C, shards_of

_PATIENCE_S = 30.0


def prompt(number: int, num_chunks: int = 4) -> list[int]:
    """The tokens of the prompt of that number; no two have a chunk in common."""
    return [1000 * number + at for at in range(num_chunks * C)]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = _PATIENCE_S) -> None:
    """Look again and again; fails when it has taken too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def flush(cluster: CacheCluster) -> None:
    """Wait until nothing waits for a tier below memory."""

    def is_flushed() -> bool:
        return not any(tier.waiting or tier.writing or tier.quarantined for tier in cluster.status().tiers.values())

    wait_until(is_flushed, "all that waits for a tier below is there")


def drop_local(cluster: CacheCluster) -> None:
    """Forget all that is in memory and on disk."""
    assert cluster.clear(locations=["cpu", "disk"]).num_kept == 0


def put(cluster: CacheCluster, tokens: Sequence[int]) -> int:
    """Store from the driver."""
    return cluster.put(tokens, shards_of(cluster.link.world.layout, tokens))


def store(cluster: CacheCluster, tokens: Sequence[int], *, first_row: int = 0) -> int:
    """Store from the ranks' rows."""
    rows = np.arange(first_row, first_row + len(tokens))
    cluster.run_on_ranks(rank_functions.write_rows, rows, _bytes_of(cluster, tokens))
    return cluster.store(tokens, rows)


def got(cluster: CacheCluster, tokens: Sequence[int]) -> int:
    """The leading tokens that `get` brings, each of whose bytes was compared."""
    num_tokens, shards = cluster.get(tokens)
    if num_tokens:
        assert_same(shard_bytes(shards), _bytes_of(cluster, tokens), slice(0, num_tokens))
    return num_tokens


def retrieved(cluster: CacheCluster, tokens: Sequence[int], *, first_row: int = 0) -> int:
    """The same by way of the ranks' own rows."""
    cluster.run_on_ranks(rank_functions.poison)
    rows = np.arange(first_row, first_row + len(tokens))[::-1].copy()
    mask = cluster.retrieve(tokens, rows)
    count = int(mask.sum())
    assert mask.tolist() == [True] * count + [False] * (len(tokens) - count)
    found = cluster.run_on_ranks(rank_functions.read_rows, rows[:count])
    assert_same(found, repeated(_bytes_of(cluster, tokens), len(found)), slice(0, count))
    return count


def _bytes_of(cluster: CacheCluster, tokens: Sequence[int]) -> list[GroupBytes]:
    return shard_bytes(shards_of(cluster.link.world.layout, tokens))
