"""Whom a chaos run hits follows from its seed; what it reports as good is what was promised."""

import json
from itertools import islice

import pytest

from cluster.chaos_plan import GRACE_S, RECOVERY_BAR_S, Call, ChaosReport, blows


def test_a_seed_decides_whom_each_blow_hits() -> None:
    def first(seed: int) -> list[object]:
        return list(islice(blows(seed, world_size=3, num_drivers=2, stop_s=9.0), 24))

    assert first(1) == first(1) != first(2)


def test_every_kind_of_blow_comes_in_each_six_and_hits_somebody() -> None:
    found = list(islice(blows(7, world_size=3, num_drivers=2, stop_s=9.0), 12))
    for six in (found[:6], found[6:]):
        kinds = sorted(blow.kind for blow in six)
        assert kinds == ["coordinator", "driver", "rank", "rank", "rank and coordinator", "stopped rank"]
    for blow in found:
        assert blow.ranks or blow.coordinator or blow.driver is not None
        assert (blow.stop_s == 9.0) == (blow.kind == "stopped rank")
        assert all(0 <= rank < 3 for rank in blow.ranks)


def test_a_run_without_a_broken_promise_is_good_and_is_one_json_object() -> None:
    report = ChaosReport(seed=1, minutes=1.0, world_size=3, use_mla=False)
    report.count(Call("get", 0.5, 6.0, hits=6))
    report.count(Call("get", 6.0 + GRACE_S, 6.0, error="DeadlineError"))
    report.kills["rank"] += 2
    report.recoveries_s += [1.0, RECOVERY_BAR_S]
    told = json.loads(json.dumps(report.to_json()))
    assert told["is_good"] is True and told["operations"] == 2 and told["num_kills"] == told["recoveries"] == 2
    assert told["calls"] == {"get": 2} and told["errors"] == {"DeadlineError": 1} and told["hit_chunks"] == 6
    assert told["recovery_s"] == {"min": 1.0, "p50": 8.0, "max": 15.0} and told["whole_s"] == {}


@pytest.mark.parametrize(
    "call",
    [
        Call("get", 0.5, 6.0, hits=6, mismatches=1),
        Call("put", 6.1 + GRACE_S, 6.0),
        Call("view", 0.1, 6.0, error="KeyError: 'x'", is_named=False),
    ],
)
def test_a_wrong_byte_a_hang_and_an_error_that_nobody_knows_are_told(call: Call) -> None:
    report = ChaosReport(seed=1, minutes=1.0, world_size=3, use_mla=False)
    report.count(call)
    assert not report.is_good


def test_a_late_recovery_and_a_leftover_are_told() -> None:
    late = ChaosReport(seed=1, minutes=1.0, world_size=3, use_mla=False, recoveries_s=[RECOVERY_BAR_S + 0.1])
    left = ChaosReport(seed=1, minutes=1.0, world_size=3, use_mla=False, leftovers=["1 leases"])
    assert not late.is_good and not left.is_good
