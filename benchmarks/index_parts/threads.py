"""The `IndexService` under many threads of one process, as the coordinator's calls use it: its lock and Python's own.

A request is what a prompt costs the index: a lookup of 128 chunks, a load of them, and a store of 16 new ones.
"""

import threading
import time
from collections.abc import Callable, Sequence

from benchmarks.claims import Claim, Part, beside
from benchmarks.index_parts.latency import Latency
from benchmarks.index_parts.prompts import NUM_CHUNKS, drawn, keys_of
from benchmarks.measure import Json, progress
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import StorePlan
from lmcache_ray.index.policy import make_policy
from lmcache_ray.index_service import IndexService
from lmcache_ray.tiers.tiered_index import TieredIndex

_NUM_NEW = 16
_HOLDERS = (0, 1)
_TIMEOUT_S = 3600.0
_CLIENT = "benchmark"
_MIN_CALLS = 8  # of each thread, however slow the machine is
_FIRST_NEW = 1 << 40  # numbers of new prompts begin far above those of the ones that are there


def measure_threads(*, num_entries: int, thread_counts: Sequence[int], seconds: float) -> Part:
    """Calls a second and their latency, by number of threads, for lookups alone and for whole requests."""
    num_prompts = num_entries // NUM_CHUNKS
    service = _filled(num_prompts)
    claims: list[Claim] = []
    measured: dict[str, Json] = {"entries": num_prompts * NUM_CHUNKS, "seconds": seconds}
    works = {"lookup": _lookups, "request": _requests}
    for name, work in works.items():
        of_counts: dict[str, Json] = {}
        for count in thread_counts:
            progress(f"index service: {name}s from {count} threads")
            latency, per_second = _run([work(service, num_prompts, number) for number in range(count)], seconds)
            of_counts[str(count)] = {"per_second": per_second, **latency.to_json()}
            claims += _claims(name, count, latency, per_second)
        measured[name] = of_counts
    return Part(claims, measured)


def _claims(name: str, count: int, latency: Latency, per_second: float) -> list[Claim]:
    threads = f"{count} threads" if count > 1 else "1 thread"
    what = "of 128 chunks" if name == "lookup" else "lookup and load of 128 chunks, store of 16"
    speed = beside(f"index service, {name}s from {threads}", "a second", what)
    return [
        speed.claim(per_second, per_second, per_second),
        beside(f"index service, p99 of a {name}, {threads}", note=what).of_spread(latency.p99_ms),
    ]


def _filled(num_prompts: int) -> IndexService:
    index = CacheIndex(
        num_prompts * NUM_CHUNKS,
        _HOLDERS,
        make_policy("LRU"),
        epoch=1,
        call_timeout_s=_TIMEOUT_S,
        lease_timeout_s=_TIMEOUT_S,
    )
    service = IndexService(TieredIndex.of_memory(index), clock=time.monotonic, free_slots=lambda ranks, refs: ranks)
    for prompt in range(num_prompts):
        _store(service, keys_of(prompt))
    return service


def _store(service: IndexService, keys: Sequence[bytes]) -> None:
    plan = service.prepare_store(keys, client=_CLIENT, start=0, rank=None)
    assert isinstance(plan, StorePlan)  # memory alone has nothing to wait for
    service.acknowledge(plan.plan_id, {rank: [True] * len(plan.refs) for rank in _HOLDERS})


def _lookups(service: IndexService, num_prompts: int, number: int) -> Callable[[], None]:
    """One thread's call: of a prompt that nothing has evicted yet."""
    prompts = drawn(range(num_prompts), seed=number)

    def look_up() -> None:
        service.lookup(keys_of(next(prompts)), client=_CLIENT, lease_id=None)

    return look_up


def _requests(service: IndexService, num_prompts: int, number: int) -> Callable[[], None]:
    """One thread's call: a turn of a conversation. Whatever is evicted meanwhile is a shorter hit."""
    prompts = drawn(range(num_prompts), seed=number)
    lease_id = f"load-{number}"
    turn = 0

    def request() -> None:
        nonlocal turn
        turn += 1
        keys = keys_of(next(prompts))
        service.lookup(keys, client=_CLIENT, lease_id=None)
        service.prepare_load(keys, client=_CLIENT, start=0, lease_ids=[lease_id])
        service.release([lease_id])
        _store(service, keys_of(_FIRST_NEW * (number + 1) + turn, _NUM_NEW))

    return request


def _run(calls: Sequence[Callable[[], None]], seconds: float) -> tuple[Latency, float]:
    """Every call again and again in a thread of its own; how long each took, and how many ended in a second."""
    gate = threading.Barrier(len(calls) + 1)
    times_s: list[list[float]] = [[] for _ in calls]

    def work(call: Callable[[], None], own_times_s: list[float]) -> None:
        gate.wait()
        end = time.perf_counter() + seconds
        now = time.perf_counter()
        while now < end or len(own_times_s) < _MIN_CALLS:
            call()
            before, now = now, time.perf_counter()
            own_times_s.append(now - before)

    threads = [
        threading.Thread(target=work, args=(call, own), daemon=True) for call, own in zip(calls, times_s, strict=True)
    ]
    for thread in threads:
        thread.start()
    gate.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - begin
    together = [time_s for turn in zip(*times_s, strict=False) for time_s in turn]  # in order, as far as all went
    return Latency(together), sum(map(len, times_s)) / elapsed_s
