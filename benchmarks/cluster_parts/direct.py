"""`put` and `get`: the driver's own bytes, against memory copies of the same size in the driver.

A `get` that copies takes the memory of an earlier result that is gone, or else new memory, whose pages the kernel has
to hand out first. Both are measured, with each result dropped before the next call and with all of them kept, so a copy
into new memory stands beside the copies between warm buffers. Put and get copy on all processors, which the plain
copies do not; so a plain copy on all of them is measured too.
"""

import ctypes
import os
import time
from concurrent.futures import Executor, ThreadPoolExecutor

import torch

from benchmarks.claims import Claim, Part, at_least, at_most, beside, samples_json
from benchmarks.cluster_parts.worlds import expect, no_op, per_rank_world, running
from benchmarks.measure import Case, Json, Samples, TimedElsewhere, interleaved, progress, ratio
from benchmarks.memory_copy import LIBC_COPY, TORCH_COPY, memory_copies
from benchmarks.workload import CHUNK_SIZE, WIDE, tokens
from cluster.client import CacheCluster

NEW_MEMORY_COPY = "memory_copy_new"
THREADS_COPY = "memory_copy_threads"
_NUM_RANKS = 2
_MIB = 2**20
_COPIES = {
    TORCH_COPY: "torch copy_ between warm buffers",
    LIBC_COPY: "memmove between warm buffers",
    NEW_MEMORY_COPY: "torch copy_ into new memory",
    THREADS_COPY: "memmove on all processors between warm buffers",
}


def measure_direct(*, nbytes: int, rounds: int) -> Part:
    """Put and get of `nbytes` per rank by copies, and of views of them, on 2 ranks of the driver's node."""
    progress(f"put and get: {nbytes // _MIB} MiB per rank")
    # Twice the room: of an arena that is full of viewed chunks, views would be copies (`CachedViews.copied_ranks`).
    capacity_tokens = 2 * nbytes // WIDE.token_nbytes
    world = per_rank_world(_NUM_RANKS, WIDE, kv_tokens=CHUNK_SIZE, capacity_tokens=capacity_tokens)
    with running(world) as cluster, ThreadPoolExecutor() as executor:
        direct = _Direct(cluster, nbytes)
        direct.fill_all_slots()
        samples = interleaved(
            {
                "no_op": no_op(cluster),
                **memory_copies(_NUM_RANKS * nbytes),
                NEW_MEMORY_COPY: _copy_into_new_memory(_NUM_RANKS * nbytes),
                THREADS_COPY: _copy_by_threads(_NUM_RANKS * nbytes, executor),
                "put": direct.put,
                "get": direct.get,
                "get_kept": direct.get_and_keep,
                "get_views": direct.get_views,
                "get_views_and_close": direct.get_views_and_close,
            },
            rounds=rounds,
            before={"put": direct.begin_new_prompt}
            | dict.fromkeys(("get", "get_kept", "get_views", "get_views_and_close"), direct.put_if_missing),
        )
        direct.check()
    facts: dict[str, Json] = {
        "nbytes_per_rank": nbytes,
        "torch_threads": torch.get_num_threads(),
        "ratios": {
            f"{name}_speed_of_{copy}": ratio(samples[copy], samples[name]).to_json()
            for name in ("put", "get", "get_kept")
            for copy in _COPIES
        },
    }
    return Part(_claims(samples, nbytes), samples_json(samples) | facts)


class _Direct:
    """One prompt at a time, of new content for every put."""

    def __init__(self, cluster: CacheCluster, nbytes: int) -> None:
        self._cluster = cluster
        self._num_tokens = nbytes // WIDE.token_nbytes
        self._tokens = tokens(self._num_tokens)
        self._number = 0
        self._kept: list[object] = []
        shape = (2, WIDE.num_layers, self._num_tokens, WIDE.num_heads * WIDE.head_size)
        generator = torch.Generator().manual_seed(0)
        self._shards = [
            [torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)]
            for _ in range(_NUM_RANKS)
        ]

    def fill_all_slots(self) -> None:
        """Write every slot once, so that none is fresh; there are twice as many as a prompt needs."""
        for _ in range(2):
            self._number += 1
            self._tokens = [self._number, *self._tokens[1:]]
            self.put()

    def begin_new_prompt(self) -> None:
        self._cluster.clear()
        self._number += 1
        self._tokens = [self._number, *self._tokens[1:]]

    def put_if_missing(self) -> None:
        if self._cluster.lookup(self._tokens) < self._num_tokens:
            self.put()

    def put(self) -> None:
        expect(self._cluster.put(self._tokens, self._shards), self._num_tokens, "put")

    def get(self) -> None:
        expect(self._cluster.get(self._tokens)[0], self._num_tokens, "got")

    def get_and_keep(self) -> None:
        num_tokens, shards = self._cluster.get(self._tokens)
        expect(num_tokens, self._num_tokens, "got")
        self._kept.append(shards)

    def get_views(self) -> TimedElsewhere:
        begin = time.perf_counter()
        found = self._cluster.get(self._tokens, views=True)
        time_s = time.perf_counter() - begin
        found.close()
        expect(found[0], self._num_tokens, "got as views")
        return TimedElsewhere(time_s)

    def get_views_and_close(self) -> None:
        with self._cluster.get(self._tokens, views=True) as found:
            expect(found[0], self._num_tokens, "got as views")

    def check(self) -> None:
        """What comes back is what was put; compared as bytes, for which every bit pattern is equal to itself."""
        self.put_if_missing()
        _, copies = self._cluster.get(self._tokens)
        with self._cluster.get(self._tokens, views=True) as views:
            if views.copied_ranks:
                raise RuntimeError(f"of ranks {views.copied_ranks} there were copies instead of views")
            for rank, (wanted, copied, viewed) in enumerate(zip(self._shards, copies, views[1], strict=True)):
                joined = torch.cat(viewed[0], dim=2)
                if not (_equal(wanted[0], copied[0]) and _equal(wanted[0], joined)):
                    raise RuntimeError(f"the driver got other bytes of rank {rank} back than it had put")


def _equal(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    return torch.equal(wanted.view(torch.int16), found.view(torch.int16))


def _copy_into_new_memory(nbytes: int) -> Case:
    source = torch.ones(nbytes, dtype=torch.uint8)
    return lambda: torch.empty_like(source).copy_(source)


def _copy_by_threads(nbytes: int, executor: Executor) -> Case:
    """One plain copy, in as many parts as there are processors."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    num_parts = len(os.sched_getaffinity(0))
    bounds = [nbytes * number // num_parts for number in range(num_parts + 1)]

    def copy(first: int, end: int) -> None:
        ctypes.memmove(target.data_ptr() + first, source.data_ptr() + first, end - first)

    return lambda: list(executor.map(copy, bounds[:-1], bounds[1:]))


def _claims(samples: dict[str, Samples], nbytes: int) -> list[Claim]:
    size = f"{nbytes // _MIB} MiB per rank"
    claims = []
    for call in ("get", "put"):
        for copy, what in _COPIES.items():
            if call == "put" and copy == NEW_MEMORY_COPY:
                continue  # it writes into memory that is there
            kind = "get as copies, results dropped" if call == "get" else "put as copies"
            name, note = f"{kind}, {size}", f"speed, of {what}"
            # The bar is about torch's copy between warm buffers.
            promise = at_least(name, 0.8, note=note) if copy == TORCH_COPY else beside(name, "x", note)
            claims.append(promise.of_speed(samples[call], samples[copy]))
    kept = beside(f"get as copies, all results kept, {size}", "x", f"speed, of {_COPIES[NEW_MEMORY_COPY]}")
    claims.append(kept.of_speed(samples["get_kept"], samples[NEW_MEMORY_COPY]))
    views, note = f"get as views, {size}", "over a no-op call"
    claims.append(at_most(views, 3.0, note=note).of_excess(samples["get_views"], samples["no_op"]))
    closed = beside(f"{views}, and close", note=f"{note}; close included, which is sent and not waited for")
    claims.append(closed.of_excess(samples["get_views_and_close"], samples["no_op"]))
    return claims
