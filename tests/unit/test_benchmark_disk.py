"""The disk benchmark says what it promises to say, and compares what it says that it compares."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.disk_parts.plain import PlainFiles, slots

_SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "disk.py"


def test_plain_files_hold_what_lies_in_the_slots(tmp_path: Path) -> None:
    memory = slots(2, 4096)
    assert memory.ctypes.data % 4096 == 0 and memory.any(axis=1).all()
    memory[1] = 7
    files = PlainFiles(tmp_path, ["a/b/x", "y"], list(memory))
    files.make()
    files.clear()
    files.write()
    files.write()
    first, second = (tmp_path / "written" / "a" / "b" / f"x.{number}" for number in (1, 2))
    assert first.read_bytes() == second.read_bytes() == memory[0].tobytes()
    files.clear()
    assert (first.stat().st_size, second.stat().st_size) == (4096, 0)
    before = memory.copy()
    memory[:] = 0
    files.read()
    assert np.array_equal(memory, before)
    os.truncate(tmp_path / "kept" / "y", 5)
    with pytest.raises(RuntimeError, match="too short"):
        files.read()


@pytest.mark.slow
def test_the_disk_benchmark_puts_its_claims_first_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, str(_SCRIPT), "--quick", "--directory", str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    document = json.loads(run.stdout)
    assert (document["benchmark"], document["results"]["lmcache"]) == ("disk", None)
    bars = {claim["name"]: claim["bar"] for claim in document["results"]["claims"]}
    assert bars == {
        "disk store, 8 MiB chunks": 0.8,
        "disk store by one thread, 8 MiB chunks": None,
        "disk retrieve, 8 MiB chunks": 0.8,
        "disk retrieve by one thread, 8 MiB chunks": None,
        "disk store, 64 KiB chunks": None,
        "disk store by one thread, 64 KiB chunks": None,
        "disk retrieve, 64 KiB chunks": None,
        "disk retrieve by one thread, 64 KiB chunks": None,
        "disk scan, 100 chunk files": 0.02,
    }
    assert document["results"]["measured"]["64 KiB"]["chunk_nbytes"] == 64 * 1024
    assert list(tmp_path.iterdir()) == []
