"""The calls of a chaos run's traffic, each of which compares every byte that it is given.

A step is one use of the cluster and what it takes to check it; the longest call in it is what must end in time.
"""

import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import numpy as np
import torch

from lmcache_ray.connector.dense import DenseConnector, empty_shard
from lmcache_ray.errors import LMCacheRayError
from lmcache_ray.layout import Placement
from lmcache_ray.prompt import Prompt

from . import chaos_rank
from .chaos_plan import prompt_rows
from .chaos_report import Call
from .client import CacheCluster
from .expected_bytes import count_mismatches, expected_chunks
from .replay import replay
from .workload import BLOCK_SIZE, TraceRequest, prompt_tokens

Step = Callable[[TraceRequest], tuple[int, int]]
"""Chunks that were hit, and bytes that were wrong. Raises what the cluster's calls raise."""

_VIEW_S = 0.05
_CALLS_OF_A_REPLAY = 3
_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class VerifiedCalls:
    """The steps of process number `process`, over one connection; not for several threads."""

    def __init__(self, cluster: CacheCluster, process: int, *, turn: int = 0) -> None:
        self._cluster = cluster
        self._layout = cluster.link.world.layout
        self._process = process
        self._turn = turn
        self._longest_s = 0.0

    def timed(self, kind: str, request: TraceRequest) -> Call:
        """Take the step of this name; whatever it raises is what came of it."""
        step: Step = getattr(self, kind)
        world = self._cluster.link.world
        allowed_s = world.lookup_timeout_s if kind == "lookup" else world.call_timeout_s
        if kind == "replay":
            allowed_s *= _CALLS_OF_A_REPLAY
        self._longest_s = 0.0
        try:
            hits, mismatches = step(request)
        except LMCacheRayError as error:
            return Call(kind, self._longest_s, allowed_s, error=type(error).__name__)
        except Exception as error:  # a fault of the product, which the report is to name
            what = f"{type(error).__name__}: {error}"
            return Call(kind, self._longest_s, allowed_s, error=what, is_named=False)
        return Call(kind, self._longest_s, allowed_s, hits, mismatches)

    # -- the ranks' rows ----------------------------------------------------------------------------------------------

    def replay(self, request: TraceRequest) -> tuple[int, int]:
        """Load what there is and store the rest, on all ranks, as a replay does."""
        report = self._call(replay, self._cluster, [request], window=1, verify=True)
        return report.hit_blocks, report.byte_mismatches

    def store(self, request: TraceRequest) -> tuple[int, int]:
        """From the ranks' KV."""
        first_row, rows = self._next_rows(request)
        self._call(self._cluster.run_on_ranks, chaos_rank.fill, request, first_row)
        self._call(self._cluster.store, self._prompt(request), rows)
        return 0, 0

    def retrieve(self, request: TraceRequest) -> tuple[int, int]:
        """Into the ranks' KV."""
        first_row, rows = self._next_rows(request)
        self._call(self._cluster.run_on_ranks, chaos_rank.poison, request, first_row)
        mask = self._call(self._cluster.retrieve, self._prompt(request), rows)
        num_chunks = int(mask.sum()) // BLOCK_SIZE
        if not num_chunks:
            return 0, 0
        wrong = self._call(self._cluster.run_on_ranks, chaos_rank.count_wrong, request, num_chunks, first_row)
        return num_chunks, sum(wrong)

    # -- every rank by itself, all at once ----------------------------------------------------------------------------

    def spmd_store(self, request: TraceRequest) -> tuple[int, int]:
        """By the ranks' engines."""
        self._call(self._cluster.run_on_ranks, chaos_rank.store, request, self._next_rows(request)[0])
        return 0, 0

    def spmd_retrieve(self, request: TraceRequest) -> tuple[int, int]:
        """By the ranks' engines."""
        found = self._call(self._cluster.run_on_ranks, chaos_rank.retrieve, request, self._next_rows(request)[0])
        return min(hits for hits, _ in found), sum(wrong for _, wrong in found)

    def broadcast(self, request: TraceRequest) -> tuple[int, int]:
        """Through the ranks' broadcast functions; a rank that gets another object than was sent is a wrong byte."""
        self._turn += 1
        src = self._turn % self._layout.world_size
        words = [f"{self._process}/{self._turn}/{rank}" for rank in range(self._layout.world_size)]
        found = self._call(self._cluster.run_on_ranks, chaos_rank.broadcast, words, src)
        return 0, sum(word != words[src] for word in found)

    # -- this process's own bytes -------------------------------------------------------------------------------------

    def put(self, request: TraceRequest) -> tuple[int, int]:
        """From this process."""
        prompt = self._prompt(request)
        rows = np.arange(prompt.num_tokens).reshape(-1, BLOCK_SIZE)
        shards: list[list[torch.Tensor]] = []
        for rank, expected in self._expected(prompt, len(prompt.keys)):
            shards.append(empty_shard(self._layout.ranks[rank], prompt.num_tokens))
            connector = DenseConnector(self._layout.ranks[rank], shards[-1], prompt.num_tokens, name="shard")
            for chunk, chunk_rows in zip(expected, rows, strict=True):
                connector.scatter(chunk, chunk_rows, 0)
        self._call(self._cluster.put, prompt, shards)
        return 0, 0

    def get(self, request: TraceRequest) -> tuple[int, int]:
        """Into this process, as copies."""
        prompt = self._prompt(request)
        num_tokens, shards = self._call(self._cluster.get, prompt)
        return num_tokens // BLOCK_SIZE, self._count_wrong(prompt, num_tokens, shards)

    def view(self, request: TraceRequest) -> tuple[int, int]:
        """As views, which are looked at again a little later."""
        prompt = self._prompt(request)
        with self._call(self._cluster.get, prompt, views=True) as found:
            if not found.num_tokens:
                return 0, 0
            before = [[torch.cat(chunks, dim=2) for chunks in shard] for shard in found.shards]
            time.sleep(_VIEW_S)
            after = [[torch.cat(chunks, dim=2) for chunks in shard] for shard in found.shards]
            if not found.is_intact():
                raise AssertionError("a view's chunks were given to others while it was open")
            wrong = sum(self._count_wrong(prompt, found.num_tokens, shards) for shards in (before, after))
            return found.num_tokens // BLOCK_SIZE, wrong

    # -- the index ----------------------------------------------------------------------------------------------------

    def lookup(self, request: TraceRequest) -> tuple[int, int]:
        """How much is cached."""
        return self._call(self._cluster.lookup, self._prompt(request)) // BLOCK_SIZE, 0

    def clear(self, request: TraceRequest) -> tuple[int, int]:
        """Forget it."""
        self._call(self._cluster.clear, self._prompt(request))
        return 0, 0

    def status(self, request: TraceRequest) -> tuple[int, int]:
        """How the cluster stands."""
        self._call(self._cluster.status)
        return 0, 0

    # -- parts --------------------------------------------------------------------------------------------------------

    def _call(self, call: Callable[_P, _Result], *arguments: _P.args, **options: _P.kwargs) -> _Result:
        begun = time.monotonic()
        try:
            return call(*arguments, **options)
        finally:
            self._longest_s = max(self._longest_s, time.monotonic() - begun)

    def _next_rows(self, request: TraceRequest) -> tuple[int, np.ndarray]:
        self._turn += 1
        first = prompt_rows(self._process, self._turn)
        return first, np.arange(first, first + len(request.hash_ids) * BLOCK_SIZE)

    def _prompt(self, request: TraceRequest) -> Prompt:
        return self._cluster.prompt(prompt_tokens(request))

    def _expected(self, prompt: Prompt, num_chunks: int) -> list[tuple[int, np.ndarray]]:
        is_shared = self._layout.placement is Placement.FIRST_RANK
        return [
            (rank, expected_chunks(prompt.keys[:num_chunks], self._layout.ranks[rank], None if is_shared else rank))
            for rank in self._layout.holders
        ]

    def _count_wrong(self, prompt: Prompt, num_tokens: int, shards: Sequence[Sequence[torch.Tensor]]) -> int:
        if not num_tokens:
            return 0
        wrong = 0
        rows = np.arange(num_tokens).reshape(-1, BLOCK_SIZE)
        for shard, (rank, expected) in zip(shards, self._expected(prompt, len(rows)), strict=True):
            connector = DenseConnector(self._layout.ranks[rank], list(shard), num_tokens, name="shard")
            found = np.zeros_like(expected)
            for chunk, chunk_rows in zip(found, rows, strict=True):
                connector.gather(chunk, chunk_rows)
            wrong += count_mismatches(found, expected)
        return wrong
