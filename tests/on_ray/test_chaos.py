"""A short chaos run as a command: every kind of call and of blow, and no promise broken."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_a_short_run_keeps_every_promise(tmp_path: Path, arena_dir: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_NAMESPACE")}
    disk = ["--local-disk", str(tmp_path / "kv"), "--max-local-disk-size", "0.05"]
    options = ["--minutes", "0.4", "--seed", "5", "--arena-dir", str(arena_dir), *disk, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "cluster", "chaos", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    broken = {promise: told[promise] for promise in ("mismatches", "hangs", "faults", "leftovers") if told[promise]}
    assert not broken, (broken, done.stderr)
    assert told["num_kills"] >= 2 and told["recoveries"] == told["num_kills"] + sum(told["stops"].values())
    assert set(told["calls"]) >= {"replay", "store", "retrieve", "put", "get", "view", "lookup", "spmd_retrieve"}
    assert told["hit_chunks"] > 50
    assert list(tmp_path.rglob("*.tmp")) == []
