"""Random operations on a small cluster, checked byte by byte; as a program, a second driver that connects to it.

    python -m tests.on_ray.random_driver NAME NAMESPACE OPERATIONS

prints "ready", waits for a line, runs, and ends with "no failure" or with what went wrong (exit status 1).
"""

import random
import sys
import threading
from collections.abc import Sequence

import numpy as np
import torch

from cluster.client import CacheCluster
from lmcache_ray.connector.dense import empty_shard
from lmcache_ray.layout import WorldLayout
from tests.on_ray import rank_functions
from tests.on_ray.kv_bytes import GroupBytes, shard_bytes

C = 4
CAPACITY = 10
NUM_THREADS = 4
MAX_CHUNKS = 4
ROWS_PER_THREAD = (MAX_CHUNKS + 1) * C
NUM_HEADS = 6  # distinct beginnings of prompts
NUM_CHUNKS = NUM_HEADS * MAX_CHUNKS


def prompt(generator: random.Random) -> list[int]:
    """One of a few prompts of some chunks; those of one head are prefixes of each other up to a fork."""
    head, length, fork = generator.randrange(NUM_HEADS), generator.randint(1, MAX_CHUNKS), generator.randrange(2)
    chunks = [[100 * head + 10 * min(at, 2) + (fork if at > 1 else 0)] * C for at in range(length)]
    return [token for chunk in chunks for token in chunk] + [7] * generator.randrange(C)


def shards_of(layout: WorldLayout, tokens: Sequence[int]) -> list[list[torch.Tensor]]:
    """What the KV of `tokens` must be: each token's bytes follow from all tokens up to the end of its chunk."""
    shards = [empty_shard(layout.ranks[rank], len(tokens)) for rank in layout.holders]
    for rank, shard in enumerate(shards):
        for group, tensor in enumerate(shard):
            raw = tensor.view(torch.uint8).numpy()
            for begin in range(0, len(tokens), C):
                prefix = [*tokens[: begin + C], rank, group]
                part = raw[:, :, begin : begin + C]
                part[:] = np.random.default_rng(prefix).integers(0, 256, part.shape, dtype=np.uint8)
    return shards


class RandomDriver:
    """`num_operations` of one thread, in KV rows that no other thread uses; `failures` says what went wrong."""

    def __init__(self, cluster: CacheCluster, number: int, num_operations: int) -> None:
        self._cluster = cluster
        self._layout = cluster.link.world.layout
        self._number = number
        self._num_operations = num_operations
        self._random = random.Random(number)
        self._rows = np.arange(ROWS_PER_THREAD) + number * ROWS_PER_THREAD
        self.failures: list[str] = []
        self.num_hit_tokens = 0

    def run(self) -> None:
        """Any exception is a failure too."""
        operations = [self._store, self._retrieve, self._retrieve, self._put, self._get, self._get, self._pin]
        for step in range(self._num_operations):
            operation = self._clear if self._random.random() < 0.03 else self._random.choice(operations)
            tokens = prompt(self._random)
            try:
                operation(tokens)
                if step % 10 == 0:
                    self._check_capacity()
            except Exception as error:  # the outermost frame of a thread: recorded, and the test fails on it
                self.failures.append(f"driver {self._number}, step {step}, {operation.__name__}: {error!r}")

    def _store(self, tokens: Sequence[int]) -> None:
        rows = self._rows[: len(tokens)]
        self._write(rows, shards_of(self._layout, tokens))
        self._check(self._cluster.store(tokens, rows) <= len(tokens) // C * C, "stored more than there is")

    def _retrieve(self, tokens: Sequence[int]) -> None:
        rows, start = self._rows[: len(tokens)], self._random.randrange(len(tokens))
        mask = [False] * start + [True] * (len(tokens) - start)
        good = np.flatnonzero(self._cluster.retrieve(tokens, rows, mask=mask).numpy())
        if not len(good):
            return
        self._check(good.tolist() == list(range(start, start + len(good))), "a hole in what was retrieved")
        found = self._cluster.run_on_ranks(rank_functions.read_rows, rows[good])
        self._compare(found, tokens, good)

    def _put(self, tokens: Sequence[int]) -> None:
        self._cluster.put(tokens, shards_of(self._layout, tokens))

    def _get(self, tokens: Sequence[int]) -> None:
        start = self._random.randrange(len(tokens))
        num_tokens, shards = self._cluster.get(tokens, start)
        self._compare(shard_bytes(shards), tokens, np.arange(start, max(start, num_tokens)))

    def _pin(self, tokens: Sequence[int]) -> None:
        """What is pinned is there until it is unpinned, whatever others store and clear."""
        lookup_id = f"{self._number}/{self._random.random()}"
        num_tokens = self._cluster.lookup(tokens, lookup_id=lookup_id, pin=True)
        try:
            for _ in range(2):
                found, shards = self._cluster.get(tokens)
                self._check(found >= num_tokens, f"{num_tokens} tokens were pinned, {found} are there")
                self._compare(shard_bytes(shards), tokens, np.arange(found))
        finally:
            self._cluster.lookup_unpin(lookup_id)

    def _clear(self, tokens: Sequence[int]) -> None:
        self._cluster.clear(None if self._random.random() < 0.3 else tokens)

    def _write(self, rows: np.ndarray, shards: Sequence[Sequence[torch.Tensor]]) -> None:
        self._cluster.run_on_ranks(rank_functions.write_rows, rows, shard_bytes(shards))

    def _compare(self, found: Sequence[GroupBytes], tokens: Sequence[int], positions: np.ndarray) -> None:
        self.num_hit_tokens += len(positions)
        for rank, (have, want) in enumerate(zip(found, shard_bytes(shards_of(self._layout, tokens)), strict=True)):
            for group, (left, right) in enumerate(zip(have, want, strict=True)):
                same = np.array_equal(left, right[:, :, positions])
                self._check(same, f"rank {rank}, group {group}: bytes of {tokens} differ")

    def _check_capacity(self) -> None:
        memory = self._cluster.status().tiers["cpu"]
        used = memory.ready + memory.writing + memory.quarantined
        self._check(used + memory.free == memory.capacity == CAPACITY, f"{used} + {memory.free} of {CAPACITY} chunks")

    def _check(self, is_right: bool, failure: str) -> None:
        if not is_right:
            self.failures.append(f"driver {self._number}: {failure}")


def main(name: str, namespace: str, num_operations: int) -> int:
    """The second driver: threads numbered after those of the first."""
    with CacheCluster.connect(name, namespace=namespace) as cluster:
        rank_functions.ship_by_value()
        print("ready", flush=True)
        sys.stdin.readline()
        drivers = [RandomDriver(cluster, NUM_THREADS + number, num_operations) for number in range(NUM_THREADS)]
        threads = [threading.Thread(target=driver.run) for driver in drivers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    failures = [failure for driver in drivers for failure in driver.failures]
    print("\n".join(failures) or "no failure", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
