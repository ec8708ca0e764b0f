"""The benchmark of the cluster as a process: it ends, prints one document, and in it every number that was promised."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent.parent / "benchmarks" / "cluster.py"
PROMISED = [
    *(f"cluster lookup by {form}, {ranks}" for form in ("keys", "array", "list") for ranks in ("1 rank", "4 ranks")),
    *(f"{call}_many" for call in ("store", "retrieve", "lookup")),
    *(
        f"cluster {call}, {order} blocks, {size} MiB per rank"
        for call in ("store", "retrieve")
        for order in ("random", "contiguous")
        for size in (8, 64)
    ),
    "get as copies, results dropped, 64 MiB per rank",
    "put as copies, 64 MiB per rank",
    "get as views, 64 MiB per rank",
]


@pytest.mark.slow
def test_a_quick_run_has_every_promised_number(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    parts = "lookups,batches,rows,direct"  # a start measured would only be one more
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--lookup-tokens", "2048", "--parts", parts],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)  # and nothing else on stdout
    assert document["benchmark"] == "cluster"
    assert {"date", "commit", "num_cores", "load_average"} <= document["run"].keys()
    claims = document["results"]["claims"]
    assert set(PROMISED) - {claim["name"] for claim in claims} == set()
    for claim in claims:
        assert claim["low"] <= claim["high"], claim["name"]
        if claim["bar"] is None:
            assert claim["holds"] is None, claim["name"]
            continue
        reaches = claim["value"] >= claim["bar"] if claim["side"] == ">=" else claim["value"] <= claim["bar"]
        assert claim["holds"] is reaches, claim["name"]
