"""`put` and `get`: the driver's own bytes, against memory copies of the same size in the driver.

A `get` that copies answers with new memory, whose pages the kernel has to hand out first; so a copy into new memory is
measured beside the copy between warm buffers.
"""

import inspect
import time

import torch

from benchmarks.claims import Claim, Part, at_least, at_most, samples_json
from benchmarks.cluster_parts.worlds import expect, no_op
from benchmarks.measure import Case, Json, Samples, TimedElsewhere, interleaved, progress, ratio
from benchmarks.memory_copy import LIBC_COPY, TORCH_COPY, memory_copies
from benchmarks.workload import WIDE, tokens
from cluster.client import CacheCluster

NEW_MEMORY_COPY = "memory_copy_new"
_VIEWS = "views"
_MIB = 2**20
_COPIES = {
    TORCH_COPY: "torch copy_ between warm buffers",
    LIBC_COPY: "memmove between warm buffers",
    NEW_MEMORY_COPY: "torch copy_ into new memory",
}


def measure_direct(cluster: CacheCluster, *, nbytes: int, rounds: int) -> Part:
    """Put and get of `nbytes` per rank by copies, and of views of them; all ranks are on this node."""
    progress(f"put and get: {nbytes // _MIB} MiB per rank")
    direct = _Direct(cluster, nbytes)
    total = nbytes * cluster.link.world.layout.world_size
    cases: dict[str, Case] = {
        "no_op": no_op(cluster),
        **memory_copies(total),
        NEW_MEMORY_COPY: _copy_into_new_memory(total),
        "put": direct.put,
        "get": direct.get,
    }
    before: dict[str, Case] = {"put": direct.begin_new_prompt, "get": direct.put_if_missing}
    if _VIEWS in inspect.signature(CacheCluster.get).parameters:
        for name, case in (("get_views", direct.get_views), ("get_views_and_close", direct.get_views_and_close)):
            cases[name], before[name] = case, direct.put_if_missing
    samples = interleaved(cases, rounds=rounds, before=before)
    direct.check()
    facts: dict[str, Json] = {
        "nbytes_per_rank": nbytes,
        "torch_threads": torch.get_num_threads(),
        "ratios": {
            f"{name}_speed_of_{copy}": ratio(samples[copy], samples[name]).to_json()
            for name in ("put", "get")
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
        shape = (2, WIDE.num_layers, self._num_tokens, WIDE.num_heads * WIDE.head_size)
        generator = torch.Generator().manual_seed(0)
        self._shards = [
            [torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)]
            for _ in range(cluster.link.world.layout.world_size)
        ]

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
        _, shards = self._cluster.get(self._tokens)
        for rank, (wanted, found) in enumerate(zip(self._shards, shards, strict=True)):
            if not torch.equal(wanted[0].view(torch.int16), found[0].view(torch.int16)):
                raise RuntimeError(f"the driver got other bytes of rank {rank} back than it had put")


def _copy_into_new_memory(nbytes: int) -> Case:
    source = torch.ones(nbytes, dtype=torch.uint8)
    return lambda: torch.empty_like(source).copy_(source)


def _claims(samples: dict[str, Samples], nbytes: int) -> list[Claim]:
    size = f"{nbytes // _MIB} MiB per rank"
    claims = [
        at_least(f"{name} as copies, {size}", 0.8, note=f"speed, of {shown}").of_speed(samples[name], samples[copy])
        for name in ("get", "put")
        for copy, shown in _COPIES.items()
        if not (name == "put" and copy == NEW_MEMORY_COPY)  # a put writes into memory that is there
    ]
    for case, name in (("get_views", "get as views"), ("get_views_and_close", "get as views, and close")):
        if case in samples:
            promise = at_most(f"{name}, {size}", 3.0, note="over a no-op call")
            claims.append(promise.of_excess(samples[case], samples["no_op"]))
    return claims
