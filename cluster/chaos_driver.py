"""One driver process of a chaos run: every kind of call, every byte compared, one line of JSON about each step.

Run as ``python -m cluster.chaos_driver``; it ends by SIGTERM, or is killed. The lines go to a file that outlives it.
"""

import json
import signal
import sys
import time
from dataclasses import asdict
from random import Random
from types import FrameType
from typing import Final

from .chaos_calls import VerifiedCalls
from .chaos_plan import NUM_PROMPTS, own_prompt
from .client import CacheCluster

_PAUSE_S: Final = 0.05
_KINDS: Final = {
    "replay": 2,
    "store": 3,
    "retrieve": 3,
    "put": 3,
    "get": 3,
    "view": 2,
    "lookup": 2,
    "clear": 1,
    "status": 1,
}
_KINDS_OF_THE_FIRST: Final = {**_KINDS, "spmd_store": 2, "spmd_retrieve": 3, "broadcast": 2}
"""Engines of all ranks are used in the same order everywhere, so by one driver alone."""


def main(name: str, namespace: str, driver: int, life: int, seed: int, path: str) -> None:
    """Work until the process ends; `life` counts the processes that this driver has had."""
    random = Random(f"{seed}/{driver}/{life}")
    kinds = _KINDS if driver else _KINDS_OF_THE_FIRST
    with CacheCluster.connect(name, namespace=namespace) as cluster, open(path, "a", encoding="utf-8") as lines:
        calls = VerifiedCalls(cluster, driver, turn=8 * life)
        while True:
            (kind,) = random.choices(list(kinds), list(kinds.values()))
            call = calls.timed(kind, own_prompt(driver, random.randrange(NUM_PROMPTS)))
            lines.write(json.dumps(asdict(call)) + "\n")
            lines.flush()
            time.sleep(random.uniform(0, _PAUSE_S))


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _exit)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
