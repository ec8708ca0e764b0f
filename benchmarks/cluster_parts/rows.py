"""Store and retrieve of the ranks' paged KV, against memory copies of the same size in as many processes at once."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.claims import Claim, Part, at_least, at_most, beside, samples_json
from benchmarks.cluster_parts.worlds import (
    check_rows,
    concurrent_copy,
    copy_facts,
    expect,
    per_rank_world,
    running,
)
from benchmarks.measure import Case, Json, Samples, interleaved, progress, ratio
from benchmarks.memory_copy import LIBC_COPY, TORCH_COPY
from benchmarks.workload import WIDE, Prompt
from cluster.client import CacheCluster

ORDERS = ("random", "contiguous")
_MIB = 2**20
_LARGE_NBYTES = 64 * _MIB  # from here on speed counts, below it the time that is added
_COPIES = {TORCH_COPY: "torch copy_", LIBC_COPY: "memmove"}


def measure_rows(*, sizes: Sequence[int], rounds: int) -> Part:
    """For each size in bytes per rank: store and retrieve, random and contiguous blocks, and the two plain copies."""
    claims: list[Claim] = []
    num_tokens = max(sizes) // WIDE.token_nbytes
    with running(per_rank_world(2, WIDE, kv_tokens=2 * num_tokens, capacity_tokens=num_tokens)) as cluster:
        measured: dict[str, Json] = copy_facts(cluster)
        for nbytes in sorted(sizes, reverse=True):  # the largest fills all slots: none is fresh after its first round
            progress(f"rows: {nbytes // _MIB} MiB per rank")
            # The time of a large copy hardly varies, and each round moves a lot.
            samples = _RowCases(cluster, nbytes).run(rounds if nbytes >= _LARGE_NBYTES else 2 * rounds)
            claims += _claims(samples, nbytes)
            measured[f"{nbytes // _MIB}_mib"] = samples_json(samples) | {"ratios": _ratios(samples)}
    return Part(claims, measured)


class _RowCases:
    """One size. Every store is of a new prompt, into slots that were all written before."""

    def __init__(self, cluster: CacheCluster, nbytes: int) -> None:
        self._cluster = cluster
        self._nbytes = nbytes
        self._num_tokens = nbytes // WIDE.token_nbytes
        prompt = Prompt.of(self._num_tokens)
        self._tokens = prompt.tokens
        self._number = 0
        self._sources = {order: rows.numpy() for order, rows in prompt.sources.items()}
        self._targets = {order: rows.numpy() for order, rows in prompt.targets.items()}

    def run(self, rounds: int) -> dict[str, Samples]:
        cases: dict[str, Case] = {name: concurrent_copy(self._cluster, name, self._nbytes) for name in _COPIES}
        before: dict[str, Case] = {}
        for order in ORDERS:
            cases[f"store_{order}"] = partial(self._store, order)
            before[f"store_{order}"] = self._begin_new_prompt
            cases[f"retrieve_{order}"] = partial(self._retrieve, order)
            before[f"retrieve_{order}"] = self._store_if_missing
        samples = interleaved(cases, rounds=rounds, warmup=2, before=before)
        self._check()
        return samples

    def _begin_new_prompt(self) -> None:
        self._cluster.clear()
        self._number += 1
        self._tokens = [self._number, *self._tokens[1:]]

    def _store_if_missing(self) -> None:
        if self._cluster.lookup(self._tokens) < self._num_tokens:
            self._store("contiguous")

    def _store(self, order: str) -> None:
        expect(self._cluster.store(self._tokens, self._sources[order]), self._num_tokens, "stored")

    def _retrieve(self, order: str) -> None:
        loaded = self._cluster.retrieve(self._tokens, self._targets[order])
        expect(int(np.count_nonzero(loaded.numpy())), self._num_tokens, "retrieved")

    def _check(self) -> None:
        """The bytes that come back from either order into either are those that went in."""
        for stored, loaded in zip(ORDERS, reversed(ORDERS), strict=True):
            self._begin_new_prompt()
            self._store(stored)
            self._retrieve(loaded)
            check_rows(self._cluster, self._sources[stored], self._targets[loaded])


def _claims(samples: dict[str, Samples], nbytes: int) -> list[Claim]:
    size = f"{nbytes // _MIB} MiB per rank"
    claims = []
    for operation in ("store", "retrieve"):
        for order in ORDERS:
            name, case = f"cluster {operation}, {order} blocks, {size}", samples[f"{operation}_{order}"]
            for copy, shown in _COPIES.items():  # the bars are about torch's copy
                if nbytes >= _LARGE_NBYTES:
                    note = f"speed, of 2 concurrent {shown}"
                    promise = at_least(name, 0.7, note=note) if copy == TORCH_COPY else beside(name, "x", note)
                    claims.append(promise.of_speed(case, samples[copy]))
                else:
                    note = f"over the time of 2 concurrent {shown}"
                    promise = at_most(name, 8.0, note=note) if copy == TORCH_COPY else beside(name, "ms", note)
                    claims.append(promise.of_excess(case, samples[copy]))
    return claims


def _ratios(samples: dict[str, Samples]) -> dict[str, Json]:
    return {
        f"{name}_speed_of_{copy}": ratio(samples[copy], case).to_json()
        for name, case in samples.items()
        if name not in _COPIES
        for copy in _COPIES
    }
