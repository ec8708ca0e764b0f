"""The standalone mode as its users run it: a process of its own, ended by signals.

Loading torch takes a process seconds, so most processes here are started together and each shows several things.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 60.0
STOP_S = 2.0

_DIGEST = """
import hashlib, sys, torch
from lmcache_ray.standalone.__main__ import LMCacheStandaloneStarter, parse_kvcache_shape_spec
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.metadata import LMCacheMetadata
groups = parse_kvcache_shape_spec("(2,2,8,4,16):float16:2;(1,2,8,1,3):uint8:1")
metadata = LMCacheMetadata("m", world_size=1, worker_id=0, kv_dtype=torch.float16, kv_shape=(3, 2, 8, 4, 16))
config = LMCacheEngineConfig(capacity_chunks=1, chunk_size=4, arena_dir=sys.argv[1])
starter = LMCacheStandaloneStarter(config, metadata, groups)
starter.start()
digest = hashlib.sha256()
for cache in starter.kv_caches[0]:
    digest.update(cache.view(torch.uint8).numpy().tobytes())
starter.stop()
print(digest.hexdigest())
"""


@pytest.fixture
def memory_dir() -> Iterator[Path]:
    """A directory of shared memory that nobody else uses."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="standalone-") as directory:
        yield Path(directory)


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    return kept | {"PYTHONPATH": str(ROOT)} | variables


def python(*words: str, **variables: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *words], stdout=pipe, stderr=pipe, text=True, cwd=ROOT, env=environment(**variables)
    )


def standalone(memory_dir: Path, *words: str) -> "subprocess.Popen[str]":
    small = ("--arena-dir", str(memory_dir), "--capacity-chunks", "4", "--chunk-size", "64")
    return python("-m", "lmcache_ray.standalone", *small, *words)


def lines_until_ready(process: "subprocess.Popen[str]") -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if lines[-1] == "ready":
            return lines
    pytest.fail(f"it ended before it was ready: {process.communicate()[1]}")


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str, float]:
    """Exit code, stdout, stderr, and the seconds that it took to end from now."""
    start = time.monotonic()
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err, time.monotonic() - start


def test_signals_end_it_with_0_at_once_and_leave_nothing(memory_dir: Path) -> None:
    """SIGTERM, SIGINT, and an impatient user's three of both."""
    orders = [[signal.SIGTERM], [signal.SIGINT], [signal.SIGINT, signal.SIGTERM, signal.SIGINT]]
    processes = [standalone(memory_dir, "--world-size", "2", "--model-name", "demo") for _ in orders]
    for process, numbers in zip(processes, orders, strict=True):
        lines = lines_until_ready(process)
        assert lines[0] == "model demo"
        assert any(line.endswith("32768 bytes (32 KiB) per chunk and rank") for line in lines)
        assert "  chunk_size = 64 (command line --chunk-size)" in lines
        assert list(memory_dir.iterdir()) == [], "arenas have no name"
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.01)
        code, out, err, seconds = ended(process)
        assert (code, out, err) == (0, "", "")
        assert seconds < STOP_S
    assert list(memory_dir.iterdir()) == []


def test_a_kill_leaves_nothing_either(memory_dir: Path) -> None:
    process = standalone(memory_dir)
    lines_until_ready(process)
    process.kill()
    assert ended(process)[0] == -signal.SIGKILL
    assert list(memory_dir.iterdir()) == []


def test_a_signal_while_it_starts_ends_it_with_0(memory_dir: Path) -> None:
    """While torch loads, and while a world is built that would take longer than we wait for its end."""
    loading = standalone(memory_dir)
    while "libtorch" not in Path(f"/proc/{loading.pid}/maps").read_text():
        time.sleep(0.01)
    loading.send_signal(signal.SIGTERM)
    code, _, err, seconds = ended(loading)
    assert (code, err) == (0, "")
    assert seconds < STOP_S

    building = standalone(memory_dir, "--world-size", "8", "--kvcache-shape-spec", "(8,2,512,8,64):float16:8")
    assert building.stdout is not None
    while not building.stdout.readline().startswith("configuration"):
        pass
    building.send_signal(signal.SIGINT)
    code, out, err, seconds = ended(building)
    assert (code, err) == (0, "")
    assert "ready" not in out
    assert seconds < STOP_S
    assert list(memory_dir.iterdir()) == []


def test_a_reader_that_leaves_is_no_traceback(memory_dir: Path) -> None:
    process = standalone(memory_dir)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(TIMEOUT_S) == 1


def test_bad_flags_are_told_in_a_sentence_without_torch_being_loaded() -> None:
    code, out, err, _ = ended(python("-X", "importtime", "-m", "lmcache_ray.standalone", "--model-name"))
    assert (code, out) == (2, "")
    imports, message = err.rstrip("\n").rsplit("\n", 1)
    assert message == (
        "python -m lmcache_ray.standalone: error: argument --model-name: expected one argument; "
        "--help shows what is accepted"
    )
    assert "lmcache_ray" in imports and "torch" not in imports


def test_every_process_makes_the_same_pattern(memory_dir: Path) -> None:
    processes = [python("-c", _DIGEST, str(memory_dir), PYTHONHASHSEED=seed) for seed in ("0", "random")]
    results = [ended(process)[:3] for process in processes]
    assert results[0] == results[1]
    assert results[0][0] == 0 and len(results[0][1].strip()) == len(hashlib.sha256().hexdigest())
