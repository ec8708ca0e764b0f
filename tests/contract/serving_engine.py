"""A serving engine as the cache sees it: a scheduler that asks and decides, and one worker per rank that copies.

It stands in for engines like vLLM in the life-cycle scenarios. Its KV is a function of (rank, layer, tokens up to the
row's own), so that rows of another prompt, place, layer or rank are noticed.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from lmcache_ray.connector.paged import PagedConnector
from lmcache_ray.index.plans import LoadPlan, StorePlan
from lmcache_ray.index_service import LeaseNames
from lmcache_ray.keys import ChunkHasher
from lmcache_ray.kv_pattern import allocate_kv_caches
from lmcache_ray.layout import RankLayout
from lmcache_ray.prompt import Prompt, read_prompt
from lmcache_ray.shard import ArenaSource, leading, read_chunks
from lmcache_ray.splitmix import fold64, word_streams

if TYPE_CHECKING:
    from tests.contract.lifecycle_suite import LifecycleWorld

CHUNK: Final = 4
HASHER: Final = ChunkHasher("model", chunk_size=CHUNK)


@dataclass
class Request:
    """`rows` are the KV rows it has been given, `num_computed` how many of them hold its KV."""

    req_id: str
    tokens: list[int]
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    num_computed: int = 0
    num_stored: int = 0


class ServingEngine:
    """One engine of a world, with KV memory of its own for each rank."""

    def __init__(self, name: str, world: "LifecycleWorld", num_rows: int = 64) -> None:
        self.name = name
        self.client = world.client(name)
        self._world = world
        self._leases = LeaseNames(name, name)
        self._free_rows = list(range(num_rows))
        self._kvs = [
            allocate_kv_caches(layout, num_blocks=[num_rows // CHUNK] * len(layout.groups), block_size=CHUNK)
            for layout in world.layout.ranks
        ]
        self.connectors = [PagedConnector(layout, kv) for layout, kv in zip(world.layout.ranks, self._kvs, strict=True)]

    # -- the scheduler ------------------------------------------------------------------------------------------------

    def keys(self, request: Request) -> list[bytes]:
        """The keys of the whole prompt."""
        return read_prompt(HASHER, request.tokens).keys

    def num_hits(self, request: Request) -> int:
        """Cached leading tokens, which stay until the request is loaded, finished or forgotten."""
        prompt = read_prompt(HASHER, request.tokens)
        return prompt.tokens_in(self.client.lookup(prompt.keys, self._lease_of(request.req_id)))

    def forget(self, req_id: str) -> None:
        """The request no longer waits for what was found."""
        self.client.release([self._lease_of(req_id)])

    def allocate(self, request: Request) -> bool:
        """Give the request its KV rows; False if there are too few."""
        if len(self._free_rows) < len(request.tokens):
            return False
        # Taken from the end and given back at the start, so that rows wander and blocks mix.
        request.rows = np.array([self._free_rows.pop() for _ in request.tokens], dtype=np.int64)
        return True

    def preempt(self, request: Request) -> None:
        """Take the rows away."""
        self._free_rows[:0] = request.rows.tolist()
        request.rows, request.num_computed, request.num_stored = np.empty(0, dtype=np.int64), 0, 0

    def finish(self, request: Request) -> None:
        """The request has ended, in whatever state it was."""
        self.preempt(request)
        self.forget(request.req_id)

    def run(self, request: Request) -> int:
        """A whole life: look up, load, compute the rest, check, store, finish. Returns the tokens loaded."""
        num_hits = self.num_hits(request)
        assert self.allocate(request), "the test gives this engine too little memory"
        num_loaded = self.load(request)
        assert num_loaded == num_hits
        self.check_kv(request)
        self.compute(request, len(request.tokens))
        self.store(request)
        self.check_kv(request)
        self.finish(request)
        return num_loaded

    # -- loads and stores, each planned by the scheduler and carried out by the workers -------------------------------

    def begin_load(self, request: Request) -> LoadPlan:
        """Pin what is to be read."""
        return self.client.prepare_load(self.keys(request), start=0, lease_ids=[self._leases.for_load()])

    def load(self, request: Request) -> int:
        """Read the cached prefix into the request's rows on every rank; the leading tokens that all of them have."""
        plan = self.begin_load(request)
        prompt = read_prompt(HASHER, request.tokens)
        rows = prompt.rows(request.rows, range(len(plan.refs)))
        num_chunks = len(plan.refs)
        for rank, connector in enumerate(self.connectors):
            source = ArenaSource(self._world.shards[self._world.layout.holder_of(rank)].slots)
            num_chunks = min(num_chunks, leading(read_chunks(source, plan.refs, rows, connector)))
        self.client.release([plan.lease_id, self._lease_of(request.req_id)])
        request.num_computed = request.num_stored = prompt.tokens_in(num_chunks)
        return request.num_computed

    def begin_store(self, request: Request) -> StorePlan:
        """Reserve room for the full chunks computed so far, of which those stored before are masked out."""
        prompt = self._computed(request)
        return self.client.prepare_store(prompt.keys, start=request.num_stored // CHUNK, rank=None)

    def end_store(self, request: Request, plan: StorePlan) -> int:
        """Let the workers write what was planned; the leading tokens that are READY then."""
        prompt = self._computed(request)
        rows = prompt.rows(request.rows, plan.positions)
        acks = {
            rank: self._world.shards[rank].store(plan.refs, rows, self.connectors[rank])
            for rank in self._world.layout.holders
        }
        request.num_stored = prompt.tokens_in(self.client.complete_store(plan, prompt.keys, acks))
        return request.num_stored

    def store(self, request: Request) -> int:
        """Store the full chunks computed so far; the leading tokens that are READY then."""
        plan = self.begin_store(request)
        if plan.refs:
            return self.end_store(request, plan)
        request.num_stored = self._computed(request).tokens_in(plan.num_ready)
        return request.num_stored

    def abort_store(self, plan: StorePlan, done: Mapping[int, Sequence[bool]]) -> None:
        """The workers stop: they have written what `done` says, per rank, and nothing else."""
        nothing = [False] * len(plan.refs)
        acks = {rank: done.get(rank, nothing) for rank in self._world.layout.holders}
        if len(self._world.layout.holders) == 1:
            acks = dict.fromkeys(acks, nothing)  # the only copy would be a whole chunk
        self.client.complete_store(plan, [], acks)

    # -- KV memory ----------------------------------------------------------------------------------------------------

    def compute(self, request: Request, end: int) -> None:
        """Run the model up to token `end`: the KV of the rows not computed yet is written."""
        for rank, kv in enumerate(self._kvs):
            for position, expected in enumerate(self._expected(request, rank)):
                raw = _raw(kv[position])
                raw[:, request.rows[request.num_computed : end]] = expected[:, request.num_computed : end]
        request.num_computed = end

    def check_kv(self, request: Request) -> None:
        """Every computed row of every layer of every rank holds what the model would have computed."""
        end = request.num_computed
        for rank, kv in enumerate(self._kvs):
            for position, expected in enumerate(self._expected(request, rank)):
                raw = _raw(kv[position])[:, request.rows[:end]]
                assert np.array_equal(raw, expected[:, :end]), (
                    f"request {request.req_id}, rank {rank}, layer {position}"
                )

    def overwrite_free_rows(self) -> None:
        """Others have used the memory meanwhile."""
        for kv in self._kvs:
            for tensor in kv:
                _raw(tensor)[:, self._free_rows] = 0xEE

    def _computed(self, request: Request) -> Prompt:
        return read_prompt(HASHER, request.tokens[: request.num_computed])

    def _expected(self, request: Request, rank: int) -> list[np.ndarray]:
        """Per layer of the rank, uint8 ``[kv_size, num_tokens, row_nbytes]``; equal on all ranks of an MLA world."""
        owner = self._world.layout.holder_of(rank)
        return [
            kv_of(request.tokens, owner, position, group_of(self._world.layout.ranks[rank], position))
            for position in range(self._world.layout.ranks[rank].num_layers)
        ]

    def _lease_of(self, req_id: str) -> str:
        return self._leases.for_lookup(req_id)


@cache
def prefix_seeds(tokens: tuple[int, ...]) -> np.ndarray:
    """For each token, uint64 that depends on it and all before it."""
    digest, seeds = b"", []
    for token in tokens:
        digest = hashlib.sha256(digest + token.to_bytes(8, "little")).digest()
        seeds.append(int.from_bytes(digest[:8], "little"))
    return np.array(seeds, dtype=np.uint64)


def kv_of(tokens: Sequence[int], rank: int, position: int, shape: tuple[int, int]) -> np.ndarray:
    """The KV of one layer: every row depends on the tokens up to its own. `shape` is (kv_size, row_nbytes)."""
    seeds, (kv_size, row_nbytes) = prefix_seeds(tuple(tokens)), shape
    planes = [word_streams(fold64(seeds, rank, position, kv), -(-row_nbytes // 8)) for kv in range(kv_size)]
    return np.stack(planes).view(np.uint8)[:, :, :row_nbytes]


def group_of(layout: RankLayout, position: int) -> tuple[int, int]:
    """(kv_size, row_nbytes) of the layer at this place in the rank's KV list."""
    for group, positions in zip(layout.groups, layout.layer_positions(), strict=True):
        if position in positions:
            return group.kv_size, group.row_nbytes
    raise AssertionError(f"no group has the layer at {position}")


def _raw(tensor: torch.Tensor) -> np.ndarray:
    """A layer's bytes ``[kv_size, num_rows, row_nbytes]``, not copied."""
    raw: np.ndarray = tensor.view(torch.uint8).numpy().reshape(tensor.shape[0], tensor.shape[1] * tensor.shape[2], -1)
    return raw
