"""How long it takes until a local cluster of 4 ranks serves, and which processes load torch for it.

By hand, one start: ``python benchmarks/cluster_parts/start.py``.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent.parent
if not __package__:
    sys.path[0] = str(_ROOT)

from benchmarks.claims import Bar, Claim, Part, Promise, at_most, beside  # noqa: E402
from benchmarks.measure import Json, Spread, progress  # noqa: E402

_WORLD_SIZE = 4
_IMPORTS_TORCH = "import sys, lmcache_ray; sys.exit('torch' in sys.modules)"


def measure_start(*, starts: int) -> Part:
    """Seconds from the start of a driver's process until its cluster has answered a store, with torch in every rank."""
    answers: list[dict[str, Json]] = []
    ready_s: list[float] = []
    for number in range(starts):
        progress(f"start {number + 1} of {starts}: {_WORLD_SIZE} ranks")
        found_s, answer = _start_once()
        ready_s.append(found_s)
        answers.append(answer)
    imports_torch = subprocess.run([sys.executable, "-c", _IMPORTS_TORCH], cwd=_ROOT).returncode
    note = "from the start of the driver's process, imports of torch and Ray and a local Ray included"
    claims = [
        at_most(f"a local cluster of {_WORLD_SIZE} ranks is ready", 20.0, "s", note).of_spread(Spread.of(ready_s)),
        beside("of which a local Ray and the cluster took", "s", "without the imports").of_spread(
            Spread.of([float(str(answer["ray_s"])) + float(str(answer["cluster_s"])) for answer in answers])
        ),
        _no_torch("coordinators that load torch", sum(bool(answer["coordinator_has_torch"]) for answer in answers)),
        _no_torch("`import lmcache_ray` loads torch", imports_torch),
    ]
    return Part(claims, {"ready_s": ready_s, "starts": answers})


def _no_torch(name: str, count: int) -> Claim:
    return Promise(name, Bar.AT_MOST, 0.0, "", "0 is no").claim(count, count, count)


def _start_once() -> tuple[float, dict[str, Json]]:
    begin = time.perf_counter()
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True, cwd=_ROOT) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        ready_s = time.perf_counter() - begin
    if not line or child.returncode:
        raise RuntimeError(f"the cluster did not start: status {child.returncode}; its message stands above")
    answer: dict[str, Json] = json.loads(line)
    return ready_s, answer


def _has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def main() -> None:
    """In a driver of its own: start a cluster, use it once, answer a line of JSON, end it."""
    begin = time.perf_counter()
    import numpy as np

    from benchmarks.cluster_parts.lookups import SMALL
    from benchmarks.cluster_parts.worlds import expect, local_ray, per_rank_world, running
    from benchmarks.workload import CHUNK_SIZE

    imported = time.perf_counter()
    with local_ray():
        connected = time.perf_counter()
        world = per_rank_world(_WORLD_SIZE, SMALL, kv_tokens=CHUNK_SIZE, capacity_tokens=CHUNK_SIZE)
        with running(world) as cluster:
            expect(cluster.store(list(range(CHUNK_SIZE)), np.arange(CHUNK_SIZE)), CHUNK_SIZE, "stored")
            status = cluster.status()
            answer: dict[str, Json] = {
                "import_s": imported - begin,
                "ray_s": connected - imported,
                "cluster_s": time.perf_counter() - connected,
                "coordinator_has_torch": _has_torch(status.coordinator_pid),
                "ranks_with_torch": sum(_has_torch(rank.pid) for rank in status.ranks if rank.pid is not None),
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
