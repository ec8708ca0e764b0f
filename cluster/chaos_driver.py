"""One driver process of a chaos run: every kind of call, every byte compared, one line of JSON about each call.

Run as ``python -m cluster.chaos_driver``; it ends by SIGTERM, or is killed. The lines go to a file that outlives it.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from random import Random
from types import FrameType
from typing import TextIO

import numpy as np
import torch

from lmcache_ray.connector.dense import DenseConnector, empty_shard
from lmcache_ray.errors import LMCacheRayError
from lmcache_ray.layout import Placement
from lmcache_ray.prompt import Prompt

from .chaos_plan import Call
from .client import CacheCluster
from .expected_bytes import count_mismatches, expected_chunks
from .replay import replay
from .workload import BLOCK_SIZE, TraceRequest, prompt_tokens

NUM_PROMPTS = 12
"""Prompts of each driver."""
PROMPT_BLOCKS = 6
_PROBE_ID = 1_000_000_000
_CALLS_OF_A_REPLAY = 3
_PAUSE_S = 0.05


def own_prompt(driver: int, number: int) -> TraceRequest:
    """A prompt of one driver; those of even numbers share their first blocks with all drivers."""
    shared = tuple(range(100, 100 + PROMPT_BLOCKS // 2)) if number % 2 == 0 else ()
    first = 10_000 * (driver + 1) + 100 * number
    return TraceRequest((*shared, *range(first, first + PROMPT_BLOCKS - len(shared))))


def probe_prompt() -> TraceRequest:
    """A prompt that nobody else uses."""
    return TraceRequest(tuple(range(_PROBE_ID, _PROBE_ID + PROMPT_BLOCKS)))


class VerifiedCalls:
    """The calls of one connection, each of which says how many chunks were hit and how many bytes were wrong."""

    def __init__(self, cluster: CacheCluster) -> None:
        self._cluster = cluster
        self._layout = cluster.link.world.layout

    def replay(self, request: TraceRequest) -> tuple[int, int]:
        """Load what there is and store the rest, through the ranks' KV, on all ranks."""
        report = replay(self._cluster, [request], window=1, verify=True)
        return report.hit_blocks, report.byte_mismatches

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
        self._cluster.put(prompt, shards)
        return 0, 0

    def get(self, request: TraceRequest) -> tuple[int, int]:
        """Into this process, as copies."""
        prompt = self._prompt(request)
        num_tokens, shards = self._cluster.get(prompt)
        return num_tokens // BLOCK_SIZE, self._count_wrong(prompt, num_tokens, shards)

    def view(self, request: TraceRequest) -> tuple[int, int]:
        """As views, which are looked at again a little later."""
        prompt = self._prompt(request)
        with self._cluster.get(prompt, views=True) as found:
            joined = [[torch.cat(chunks, dim=2) if chunks else None for chunks in shard] for shard in found.shards]
            if not found.num_tokens:
                return 0, 0
            time.sleep(_PAUSE_S)
            again = [[torch.cat(chunks, dim=2) for chunks in shard] for shard in found.shards]
            wrong = self._count_wrong(prompt, found.num_tokens, again) if found.is_intact() else 0
            changed = sum(
                int((one.view(torch.uint8) != other.view(torch.uint8)).sum())
                for before, after in zip(joined, again, strict=True)
                for one, other in zip(before, after, strict=True)
                if one is not None
            )
            return found.num_tokens // BLOCK_SIZE, wrong + changed

    def lookup(self, request: TraceRequest) -> tuple[int, int]:
        """How much is cached."""
        return self._cluster.lookup(self._prompt(request)) // BLOCK_SIZE, 0

    def clear(self, request: TraceRequest) -> tuple[int, int]:
        """Forget it."""
        self._cluster.clear(self._prompt(request))
        return 0, 0

    def status(self, request: TraceRequest) -> tuple[int, int]:
        """How the cluster stands."""
        self._cluster.status()
        return 0, 0

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


def timed(kind: str, allowed_s: float, call: Callable[[], tuple[int, int]]) -> Call:
    """Make a call; whatever it raises is what came of it."""
    begun = time.monotonic()
    try:
        hits, mismatches = call()
    except LMCacheRayError as error:
        return Call(kind, time.monotonic() - begun, allowed_s, error=type(error).__name__)
    except Exception as error:  # a fault of the product, which the report is to name
        what = f"{type(error).__name__}: {error}"
        return Call(kind, time.monotonic() - begun, allowed_s, error=what, is_named=False)
    return Call(kind, time.monotonic() - begun, allowed_s, hits, mismatches)


def main(name: str, namespace: str, driver: int, seed: int, path: str) -> None:
    """Work until the process ends."""
    random = Random(f"{seed}/{driver}")
    with CacheCluster.connect(name, namespace=namespace) as cluster, open(path, "a", encoding="utf-8") as lines:
        calls, timeout_s = VerifiedCalls(cluster), cluster.link.world.call_timeout_s
        kinds = {"replay": 4, "put": 3, "get": 3, "view": 2, "lookup": 2, "clear": 1, "status": 1}
        while True:
            (kind,) = random.choices(list(kinds), list(kinds.values()))
            request = own_prompt(driver, random.randrange(NUM_PROMPTS))
            allowed_s = timeout_s * (_CALLS_OF_A_REPLAY if kind == "replay" else 1)
            _write(lines, timed(kind, allowed_s, lambda: getattr(calls, kind)(request)))  # noqa: B023
            time.sleep(random.uniform(0, _PAUSE_S))


def _write(lines: TextIO, call: Call) -> None:
    lines.write(json.dumps(asdict(call)) + "\n")
    lines.flush()


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
