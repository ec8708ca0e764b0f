"""One index of a given size and policy, in a process of its own: what an entry costs, and how fast it decides.

The index is filled, then kept full for half its size more, so that its tables have the size that they keep. Then it is
timed with prompts of 128 chunks. Every case gets its keys as new objects; keys of loads and lookups belong to prompts
that are READY, drawn at random, so that they are as cold as they would be. Each call is timed by the clock and in time
on the processor: on a machine that does other things too, the slowest in a hundred calls tells of those by the clock.
"""

import gc
import itertools
import multiprocessing
import os
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.index_parts.latency import Latency
from benchmarks.index_parts.prompts import NUM_CHUNKS, drawn, keys_of
from benchmarks.measure import Json, Samples, TimedElsewhere, interleaved, progress
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.policy import make_policy

_CLIENT = "benchmark"
_TIMEOUT_S = 3600.0
_WARMUP = 20
_HOLDERS = (0, 1)


@dataclass(frozen=True, slots=True)
class Setting:
    """An index of `num_prompts` prompts of 128 chunks, and how often each case is timed."""

    num_prompts: int
    policy: str
    rounds: int

    @property
    def num_entries(self) -> int:
        """Chunks in the index."""
        return self.num_prompts * NUM_CHUNKS

    @classmethod
    def of(cls, num_entries: int, policy: str, rounds: int) -> "Setting":
        """`num_entries` is rounded up to whole prompts. ValueError for fewer than the rounds use up."""
        num_prompts = -(-num_entries // NUM_CHUNKS)
        if num_prompts < 4 * (rounds + _WARMUP):
            raise ValueError(f"{num_entries} entries are too few for {rounds} rounds of {NUM_CHUNKS} new chunks")
        return cls(num_prompts, policy, rounds)


@dataclass(frozen=True, slots=True)
class Found:
    """What the process found. `nbytes` are of one entry, key included: what the process grew by, filled and kept full;
    `longest_plan_s` is the longest of all plans made until then."""

    setting: Setting
    nbytes: Mapping[str, float]
    fill_s: float
    longest_plan_s: float
    collection_s: float
    samples: Mapping[str, Samples]
    on_processor: Mapping[str, Latency]

    def to_json(self) -> dict[str, Json]:
        """All of it, without the single times."""
        return {
            "entries": self.setting.num_entries,
            "policy": self.setting.policy,
            "bytes_per_entry": dict(self.nbytes),
            "fill_s": self.fill_s,
            "longest_plan_s": self.longest_plan_s,
            "full_garbage_collection_s": self.collection_s,
            "cases": {case: Latency(times.times_s).to_json() for case, times in self.samples.items()},
            "cases_on_processor": {case: latency.to_json() for case, latency in self.on_processor.items()},
        }


def measure_alone(setting: Setting) -> Found:
    """`measure` in a new process, whose memory grows by nothing but the index."""
    progress(f"{setting.policy}: {setting.num_entries:,} entries")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (setting,))


def allocated_alone(setting: Setting) -> float:
    """Bytes of one entry by the count of Python's own allocator, in a new process; slow."""
    progress(f"{setting.policy}: {setting.num_entries:,} entries, every allocation counted")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_allocated, (setting,))


def measure(setting: Setting) -> Found:
    """Fill, keep full, time."""
    gc.collect()
    empty = _resident_nbytes()
    begin = time.perf_counter()
    index = _new_index(setting)
    longest_s = max(_store(index, range(setting.num_prompts)))
    fill_s = time.perf_counter() - begin
    filled = _resident_nbytes()
    num_stored = setting.num_prompts + setting.num_prompts // 2
    longest_s = max(longest_s, *_store(index, range(setting.num_prompts, num_stored)))
    gc.collect()
    kept_full = _resident_nbytes()
    begin = time.perf_counter()
    gc.collect()
    collection_s = time.perf_counter() - begin
    cases = _Cases(index, range(num_stored - setting.num_prompts, num_stored), setting.rounds)
    samples = cases.timed()
    index.check_integrity()
    nbytes = {"filled": filled - empty, "kept_full": kept_full - empty}
    return Found(
        setting,
        {name: each / setting.num_entries for name, each in nbytes.items()},
        fill_s,
        longest_s,
        collection_s,
        samples,
        cases.on_processor(),
    )


class _Cases:
    """What is timed on a full index. Of the prompts that are READY, the first ones are the next to be evicted."""

    def __init__(self, index: CacheIndex, ready: range, rounds: int) -> None:
        self._index = index
        self._rounds = rounds
        self._staying = drawn(ready[2 * (rounds + _WARMUP) :])
        self._new = itertools.count(ready.stop)
        self._keys: list[bytes] = []
        self._plain = {key: 0 for prompt in ready for key in keys_of(prompt)}
        self._on_processor_s: dict[str, list[float]] = defaultdict(list)

    def timed(self) -> dict[str, Samples]:
        """A plain dict of as many keys stands beside, to be asked for one key after the other."""
        calls = {
            "plain_dict": self._find_in_dict,
            "lookup": self._look_up,
            "lookup_of_strangers": self._look_up,
            "prepare_store": self._prepare_store,
            "prepare_and_complete_store": self._store,
            "prepare_load_and_release": self._load,
        }
        cases = {name: partial(self._timed, name, call) for name, call in calls.items()}
        before = dict.fromkeys(cases, self._take_ready_prompt)
        before["lookup_of_strangers"] = self._take_strangers
        before |= dict.fromkeys(("prepare_store", "prepare_and_complete_store"), self._take_new_prompt)
        return interleaved(cases, rounds=self._rounds, warmup=_WARMUP, before=before)

    def on_processor(self) -> dict[str, Latency]:
        """Seconds on the processor of the same calls."""
        return {name: Latency(times_s[_WARMUP:]) for name, times_s in self._on_processor_s.items()}

    def _timed(self, name: str, call: Callable[[], Callable[[], None]]) -> TimedElsewhere:
        """Time one call; what it returns comes after."""
        begin, begin_on_processor = time.perf_counter(), time.thread_time()
        finish = call()
        on_processor_s, time_s = time.thread_time() - begin_on_processor, time.perf_counter() - begin
        finish()
        self._on_processor_s[name].append(on_processor_s)
        return TimedElsewhere(time_s)

    def _take_ready_prompt(self) -> None:
        self._keys = keys_of(next(self._staying))

    def _take_new_prompt(self) -> None:
        self._keys = keys_of(next(self._new))

    def _take_strangers(self) -> None:
        """The first chunks of as many prompts: no two were stored or used together."""
        self._keys = [keys_of(next(self._staying), 1)[0] for _ in range(NUM_CHUNKS)]

    def _find_in_dict(self) -> Callable[[], None]:
        find = self._plain.get
        found = [find(key) for key in self._keys]
        return lambda: _expect(len(found) - found.count(None))

    def _look_up(self) -> Callable[[], None]:
        found = self._index.lookup(self._keys)
        return lambda: _expect(found)

    def _prepare_store(self) -> Callable[[], None]:
        plan = self._index.prepare_store(self._keys, client=_CLIENT, now=0.0)

        def complete() -> None:
            _expect(len(plan.refs))
            _expect(len(plan.evicted))
            self._index.complete_store(plan.plan_id, _HOLDERS, done=range(NUM_CHUNKS))

        return complete

    def _store(self) -> Callable[[], None]:
        plan = self._index.prepare_store(self._keys, client=_CLIENT, now=0.0)
        self._index.complete_store(plan.plan_id, _HOLDERS, done=range(NUM_CHUNKS))
        return lambda: _expect(len(plan.evicted))

    def _load(self) -> Callable[[], None]:
        plan = self._index.prepare_load(self._keys, lease_id="load", client=_CLIENT, now=0.0)
        self._index.release("load")
        return lambda: _expect(len(plan.refs))


def _new_index(setting: Setting) -> CacheIndex:
    return CacheIndex(
        setting.num_entries,
        _HOLDERS,
        make_policy(setting.policy),
        epoch=1,
        call_timeout_s=_TIMEOUT_S,
        lease_timeout_s=_TIMEOUT_S,
    )


def _store(index: CacheIndex, prompts: range) -> Iterator[float]:
    """Store prompts; how long each plan took."""
    for prompt in prompts:
        keys = keys_of(prompt)
        begin = time.perf_counter()
        plan = index.prepare_store(keys, client=_CLIENT, now=0.0)
        yield time.perf_counter() - begin
        index.complete_store(plan.plan_id, _HOLDERS, done=range(NUM_CHUNKS))


def _allocated(setting: Setting) -> float:
    tracemalloc.start()
    index = _new_index(setting)
    longest_s = max(_store(index, range(setting.num_prompts + setting.num_prompts // 2)))
    assert longest_s > 0
    return tracemalloc.get_traced_memory()[0] / setting.num_entries


def _resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _expect(found: int) -> None:
    if found != NUM_CHUNKS:
        raise RuntimeError(f"the index answered for {found} chunks, not for {NUM_CHUNKS}: what was timed is void")
