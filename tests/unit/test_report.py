import json
from dataclasses import fields

import pytest

from cluster.report import Latencies, ReplayReport, percentiles_ms


def test_percentiles_are_values_that_were_measured() -> None:
    assert percentiles_ms([0.001 * number for number in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles_ms([0.004, 0.001, 0.003, 0.002]) == {"p50": 2.0, "p95": 4.0, "p99": 4.0}


@pytest.mark.parametrize("seconds", [0.0, 0.25])
def test_one_value_is_every_percentile(seconds: float) -> None:
    assert set(percentiles_ms([seconds]).values()) == {seconds * 1000}


def test_nothing_measured_is_none_not_zero() -> None:
    assert percentiles_ms([]) == {"p50": None, "p95": None, "p99": None}
    latencies = Latencies(lookup=[0.002])
    assert latencies.in_ms()["lookup"]["p50"] == 2.0
    assert latencies.in_ms()["store"]["p99"] is None


def test_the_report_is_json_with_the_promised_keys() -> None:
    of_tiers = {"cpu": 4, "disk": 0, "remote": 0}
    report = ReplayReport(2, 10, 4, 0.4, of_tiers, 2, 1, False, "lru", 0, 64, [80, 80], 0, 0, 1.5, Latencies().in_ms())
    as_json = json.loads(json.dumps(report.to_json()))
    assert set(as_json) == {field.name for field in fields(ReplayReport)}
    assert list(as_json)[:4] == ["requests", "lookup_blocks", "hit_blocks", "hit_rate"]
    assert as_json["latency_ms"]["retrieve"] == {"p50": None, "p95": None, "p99": None}
