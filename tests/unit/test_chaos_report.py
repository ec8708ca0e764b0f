"""What a chaos run reports as good is what was promised."""

import json

import pytest

from cluster.chaos_report import GRACE_S, RECOVERY_BAR_S, Call, ChaosReport


def test_a_run_without_a_broken_promise_is_good_and_is_one_json_object() -> None:
    report = ChaosReport(seed=1, minutes=1.0, world_size=3, use_mla=False)
    report.count(Call("get", 0.5, 6.0, hits=6))
    report.count(Call("get", 6.0 + GRACE_S, 6.0, error="DeadlineError"))
    report.kills["rank"] += 2
    report.stops["stopped rank"] += 1
    report.recoveries_s += [1.0, 8.0, RECOVERY_BAR_S]
    told = json.loads(json.dumps(report.to_json()))
    assert told["is_good"] is True and told["operations"] == 2
    assert (told["num_kills"], told["recoveries"], told["stops"]) == (2, 3, {"stopped rank": 1})
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
