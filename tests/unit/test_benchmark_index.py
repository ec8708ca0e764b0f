"""The parts of the index benchmark do what they say they time, at a size that takes no time."""

import pytest

from benchmarks.index_parts.latency import Latency
from benchmarks.index_parts.one_index import Setting, measure
from benchmarks.index_parts.prompts import NUM_CHUNKS, drawn, keys_of, packed_keys
from benchmarks.index_parts.threads import measure_threads
from benchmarks.index_parts.wide_worlds import measure_wide_worlds
from cluster.messages import unpack_keys
from lmcache_ray.index.policy import POLICIES


def test_prompts_have_keys_of_their_own() -> None:
    assert unpack_keys(packed_keys(7)) == keys_of(7)
    assert len({*keys_of(7), *keys_of(8)}) == 2 * NUM_CHUNKS
    assert keys_of(7, 3) == keys_of(7)[:3]
    numbers = drawn(range(5, 9))
    assert {next(numbers) for _ in range(100)} == {5, 6, 7, 8}


def test_the_slowest_in_a_hundred_are_found_quarter_by_quarter() -> None:
    quiet, busy = [0.001] * 100, [0.001] * 95 + [0.009] * 5
    latency = Latency([*quiet, *busy, *quiet, *busy])
    assert latency.p99_ms.min == pytest.approx(1.0) and latency.p99_ms.max == pytest.approx(9.0)
    assert latency.per_second(128).median == pytest.approx(128_000)
    assert latency.to_json()["p99_s"] == pytest.approx(0.009)


def test_entries_are_whole_prompts_and_more_than_the_rounds_use_up() -> None:
    assert Setting.of(20_000, "LRU", 10).num_entries == 157 * NUM_CHUNKS
    with pytest.raises(ValueError, match="too few"):
        Setting.of(20_000, "LRU", 100)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_index_is_filled_kept_full_and_timed(policy: str) -> None:
    found = measure(Setting(140, policy, 10))
    assert {case: samples.count for case, samples in found.samples.items()} == dict.fromkeys(found.on_processor, 10)
    assert found.longest_plan_s > 0


def test_messages_grow_with_the_ranks_only_where_they_must() -> None:
    part = measure_wide_worlds((2, 8), rounds=1)
    few, many = (part.measured[size]["message_nbytes"] for size in ("2", "8"))  # type: ignore[index, call-overload]
    grown = {name for name in few if many[name] > few[name]}
    assert grown == {"to_coordinator_complete", "ranks_in_total"}
    assert many["ranks_in_total"] == 4 * few["ranks_in_total"]


def test_every_thread_gets_its_turn() -> None:
    part = measure_threads(num_entries=20 * NUM_CHUNKS, thread_counts=(1, 3), seconds=0.05)
    assert [claim.name for claim in part.claims if claim.unit == "a second"] == [
        "index service, lookups from 1 thread",
        "index service, lookups from 3 threads",
        "index service, requests from 1 thread",
        "index service, requests from 3 threads",
    ]
    assert all(claim.value > 0 for claim in part.claims)
