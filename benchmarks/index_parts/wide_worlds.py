"""Plans for worlds of many ranks, which need not be there: how long deciding takes, and what the messages weigh.

One prompt of 128 chunks is stored: planned, carried to every rank, acknowledged by every rank. Everything is done here
that the coordinator and the caller do for it, but for the sending.
"""

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.claims import Claim, Part, beside
from benchmarks.index_parts.prompts import NUM_CHUNKS, packed_keys
from benchmarks.measure import Case, Json, Samples, TimedElsewhere, interleaved, progress
from benchmarks.workload import BLOCK_SIZE, CHUNK_SIZE
from cluster.messages import (
    PackedRefs,
    PackedRows,
    PlannedStore,
    StepResult,
    StoreDone,
    StoreItem,
    StoreTask,
    pack_flags,
    pack_numbers,
    unpack_flags,
    unpack_keys,
)
from cluster.packed_calls import pack, unpack
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import StorePlan
from lmcache_ray.index.policy import make_policy
from lmcache_ray.index_service import IndexService
from lmcache_ray.tiers.tiered_index import TieredIndex

_NUM_PROMPTS = 100
_TIMEOUT_S = 3600.0
_CASES = ("prepare", "complete", "complete_rank_by_rank", "complete_one_failed")


def measure_wide_worlds(world_sizes: Sequence[int], *, rounds: int) -> Part:
    """The coordinator's share of a store, and its messages, by number of ranks."""
    claims: list[Claim] = []
    measured: dict[str, Json] = {}
    for world_size in world_sizes:
        progress(f"plans for {world_size} ranks")
        world = _World(world_size)
        samples = world.timed(rounds)
        claims += _claims(world_size, samples)
        times: dict[str, Json] = {name: of_case.spread.to_json("_s") for name, of_case in samples.items()}
        measured[str(world_size)] = {"message_nbytes": world.message_nbytes(), **times}
    return Part(claims, measured)


def _claims(world_size: int, samples: dict[str, Samples]) -> list[Claim]:
    note = f"{NUM_CHUNKS} chunks, in the coordinator, unpacking included"
    shown = {
        "prepare": "plan of a store",
        "complete": "all acknowledgements of it in one message",
        "complete_rank_by_rank": "all acknowledgements of it, each rank by itself",
    }
    return [
        beside(f"{text}, {world_size} ranks", note=note).of_milliseconds(samples[name]) for name, text in shown.items()
    ]


class _World:
    """The coordinator's index and the packing around it, kept full."""

    def __init__(self, world_size: int) -> None:
        self._ranks = range(world_size)
        index = CacheIndex(
            _NUM_PROMPTS * NUM_CHUNKS,
            self._ranks,
            make_policy("LRU"),
            epoch=1,
            call_timeout_s=_TIMEOUT_S,
            lease_timeout_s=_TIMEOUT_S,
        )
        self._service = IndexService(
            TieredIndex.of_memory(index), clock=time.monotonic, free_slots=lambda ranks, refs: ranks
        )
        self._next_prompt = 0
        for _ in range(_NUM_PROMPTS):
            self._complete(self._prepare())

    def timed(self, rounds: int) -> dict[str, Samples]:
        """Preparing, and each way of completing."""
        cases: dict[str, Case] = {
            "prepare": self._prepare_and_complete,
            "complete": lambda: self._timed_completion([self._acks(self._ranks)]),
            "complete_rank_by_rank": lambda: self._timed_completion([self._acks([rank]) for rank in self._ranks]),
            "complete_one_failed": lambda: self._timed_completion([self._acks(self._ranks, num_failed=1)]),
        }
        return interleaved({name: cases[name] for name in _CASES}, rounds=rounds)

    def message_nbytes(self) -> dict[str, Json]:
        """Of one store: to and from the coordinator, to and from each rank, and in total over the ranks."""
        keys = packed_keys(self._next_prompt)
        plan = self._prepare()
        rows = np.random.default_rng(0).permutation(NUM_CHUNKS * CHUNK_SIZE // BLOCK_SIZE)[:, None] * BLOCK_SIZE
        blocks = (rows + np.arange(BLOCK_SIZE)).reshape(NUM_CHUNKS, CHUNK_SIZE)
        tasks: tuple[list[object], list[StoreTask]] = (
            [],
            [StoreTask(PackedRefs.pack(plan.refs), PackedRows.pack(list(blocks)))],
        )
        step = len(pack(tasks))
        answer = len(pack(StepResult([], [pack_flags([True] * NUM_CHUNKS)])))
        done = self._acks(self._ranks)
        self._complete(plan)
        return {
            "to_coordinator_prepare": len(pack(("prepare_stores", ("client", [StoreItem(keys, 0)], False, False)))),
            "from_coordinator_plan": len(pack([_packed_plan(plan)])),
            "to_each_rank_step": step,
            "from_each_rank_answer": answer,
            "to_coordinator_complete": len(pack(("complete", ([StoreDone(plan.plan_id, done)], ())))),
            "ranks_in_total": (step + answer) * len(self._ranks),
        }

    def _prepare(self) -> StorePlan:
        packed = packed_keys(self._next_prompt)
        self._next_prompt += 1
        return self._planned(unpack_keys(packed))

    def _planned(self, keys: Sequence[bytes]) -> StorePlan:
        plan = self._service.prepare_store(keys, client="benchmark", start=0, rank=None)
        assert isinstance(plan, StorePlan)  # memory alone has nothing to wait for
        return plan

    def _prepare_and_complete(self) -> TimedElsewhere:
        """What `prepare_stores` does: packed keys in, a packed plan out."""
        packed = pack(packed_keys(self._next_prompt))
        self._next_prompt += 1
        begin = time.perf_counter()
        keys = unpack_keys(unpack(packed))
        plan = self._planned(keys)
        pack(_packed_plan(plan))
        time_s = time.perf_counter() - begin
        self._complete(plan)
        return TimedElsewhere(time_s)

    def _complete(self, plan: StorePlan) -> None:
        self._service.acknowledge(plan.plan_id, {rank: [True] * len(plan.refs) for rank in self._ranks})

    def _timed_completion(self, answers: Sequence[dict[int, bytes]]) -> TimedElsewhere:
        """What `complete` does, for each of the messages."""
        plan = self._prepare()
        messages = [pack(StoreDone(plan.plan_id, flags)) for flags in answers]
        begin = time.perf_counter()
        for message in messages:
            done: StoreDone = unpack(message)
            self._service.acknowledge(done.plan_id, {rank: unpack_flags(flags) for rank, flags in done.flags.items()})
        return TimedElsewhere(time.perf_counter() - begin)

    def _acks(self, ranks: Sequence[int], num_failed: int = 0) -> dict[int, bytes]:
        """All chunks good on all of these ranks, but for the last chunk on the first `num_failed`."""
        good = [True] * NUM_CHUNKS
        return {rank: pack_flags([*good[1:], position >= num_failed]) for position, rank in enumerate(ranks)}


def _packed_plan(plan: StorePlan) -> PlannedStore:
    return PlannedStore(plan.plan_id, PackedRefs.pack(plan.refs), pack_numbers(plan.positions), plan.num_ready)
