"""Many small requests in one call."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from benchmarks.claims import Part, at_most, samples_json
from benchmarks.cluster_parts.worlds import check_rows, expect, no_op, per_rank_world, running
from benchmarks.measure import Case, Json, interleaved, progress
from benchmarks.workload import CHUNK_SIZE, KVShape, tokens
from cluster.client import CacheCluster, Request

_SHAPE = KVShape(num_layers=2, num_heads=1, head_size=64)
_NUM_TOKENS = 2 * CHUNK_SIZE
_BAR_MS = 1.5

Result = TypeVar("Result")


def measure_batches(*, num_requests: int, rounds: int) -> Part:
    """Store, retrieve and look up `num_requests` prompts of 2 chunks (256 KiB a rank) on 2 ranks, per request."""
    progress(f"batches: {num_requests} requests")
    total = num_requests * _NUM_TOKENS
    with running(per_rank_world(2, _SHAPE, kv_tokens=2 * total, capacity_tokens=total)) as cluster:
        batch = _Batch(cluster, num_requests)
        cases: dict[str, Case] = {
            "no_op": no_op(cluster),
            "store": batch.store,
            "retrieve": batch.retrieve,
            "lookup": batch.lookup,
        }
        before = {
            "store": batch.begin_new_prompts,
            "retrieve": batch.store_if_missing,
            "lookup": batch.store_if_missing,
        }
        samples = interleaved(cases, rounds=rounds, warmup=2, before=before)
        batch.check()
    note = f"per request, in a batch of {num_requests} of {_NUM_TOKENS} tokens on 2 ranks"
    claims = [
        at_most(f"{name}_many", _BAR_MS, note=note).of_milliseconds(samples[name], shares=num_requests)
        for name in ("store", "retrieve", "lookup")
    ]
    facts: dict[str, Json] = {"num_requests": num_requests, "tokens_per_request": _NUM_TOKENS}
    return Part(claims, facts | samples_json(samples))


class _Batch:
    """Prompts that share nothing, stored from one half of the paged KV and loaded into the other."""

    def __init__(self, cluster: CacheCluster, num_requests: int) -> None:
        self._cluster = cluster
        self._rows = np.arange(2 * num_requests * _NUM_TOKENS).reshape(2, num_requests, _NUM_TOKENS)
        self._tail = tokens(_NUM_TOKENS - 1)
        self._number = 0
        self.begin_new_prompts()

    def begin_new_prompts(self) -> None:
        self._cluster.clear()
        first = range(self._number, self._number + self._rows.shape[1])
        self._number = first.stop
        prompts = [[number, *self._tail] for number in first]
        sources, targets = self._rows
        self._stores = [Request(prompt, rows) for prompt, rows in zip(prompts, sources, strict=True)]
        self._loads = [Request(prompt, rows) for prompt, rows in zip(prompts, targets, strict=True)]

    def store_if_missing(self) -> None:
        if sum(_good(self._cluster.lookup_many(self._stores))) < self._rows[0].size:
            self.store()

    def store(self) -> None:
        expect(sum(_good(self._cluster.store_many(self._stores))), self._rows[0].size, "stored")

    def retrieve(self) -> None:
        loaded = sum(int(mask.sum()) for mask in _good(self._cluster.retrieve_many(self._loads)))
        expect(loaded, self._rows[0].size, "retrieved")

    def lookup(self) -> None:
        expect(sum(_good(self._cluster.lookup_many(self._stores))), self._rows[0].size, "looked up")

    def check(self) -> None:
        self.begin_new_prompts()
        self.store()
        self.retrieve()
        check_rows(self._cluster, self._rows[0].reshape(-1), self._rows[1].reshape(-1))


def _good(answers: Sequence[Result | Exception]) -> list[Result]:
    """The answers; the first failed one is raised."""
    results: list[Result] = []
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        results.append(answer)
    return results
