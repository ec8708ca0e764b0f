"""LMCache's local disk backend in process: the peer's half of `benchmarks/disk.py`, beside plain Python here too.

Its writes go to its own threads, and a round ends with the last of them; its reads are made one by one. Answers rounds
by the names of the sizes (`answers.py`). By hand:

    printf '8 MiB\\n' | /path/to/peer/python benchmarks/peers/lmcache_disk.py --directory DIR '8 MiB=8388608x16'
"""

import argparse
import asyncio
import os
import sys
import threading
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # both are read when LMCache is imported
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"  # else every call formats and prints a line

import torch
from lmcache.utils import CacheEngineKey  # type: ignore[import-not-found]
from lmcache.v1.config import LMCacheEngineConfig  # type: ignore[import-not-found]
from lmcache.v1.memory_management import MemoryFormat  # type: ignore[import-not-found]
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # type: ignore[import-not-found]
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # type: ignore[import-not-found]

from benchmarks.disk_parts import plain
from benchmarks.measure import Samples, interleaved
from benchmarks.peers.answers import answer_rounds
from benchmarks.peers.lmcache_parts import metadata_of
from benchmarks.workload import CHUNK_SIZE, MODEL_NAME, NARROW

_ROUNDS_PER_TURN = 2
_END_S = 60.0  # to files that are written in the background
_LIMIT_GIB = 1000.0  # what was given back stays counted, so a limit would be reached


@dataclass(frozen=True, slots=True)
class Size:
    """Chunks of `nbytes` bytes, `count` of them in a round, as ``NAME=NBYTESxCOUNT`` says."""

    name: str
    nbytes: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Size":
        """ValueError for another text."""
        name, _, numbers = text.rpartition("=")
        nbytes, _, count = numbers.partition("x")
        return cls(name, int(nbytes), int(count))


class DiskCases:
    """One backend with chunks to write and as many to read."""

    def __init__(self, size: Size, folder: Path) -> None:
        self._size = size
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_SIZE,
            local_cpu=False,
            max_local_cpu_size=(3 * size.count * size.nbytes + 64 * 2**20) / 2**30,
            local_disk=f"file://{folder}/",
            max_local_disk_size=_LIMIT_GIB,
            lmcache_instance_id=size.name,
        )
        known = metadata_of(size.name, NARROW, world_size=1, worker_id=0)
        self._memory = LocalCPUBackend(config, known, "cpu")
        self._disk = LocalDiskBackend(config, self._loop, self._memory, "cpu", metadata=known)
        self._kept, self._written = self._keys(0), list[CacheEngineKey]()
        self._num_writes = 0
        self._slots = [self._allocate() for _ in range(size.count)]
        names = [f"{key.chunk_hash:064x}.pt" for key in self._kept]
        self._plain = plain.PlainFiles(folder / "plain", names, list(plain.slots(size.count, size.nbytes)))
        self._plain.make()
        self._write(self._kept)

    def rounds(self) -> dict[str, Samples]:
        """The rounds of one turn."""
        return interleaved(
            {
                plain.WRITE: self._plain.write,
                "store": self._store,
                plain.READ: self._plain.read,
                "retrieve": self._retrieve,
            },
            rounds=_ROUNDS_PER_TURN,
            warmup=0,
            before={plain.WRITE: self._plain.clear, "store": self._clear},
        )

    def close(self) -> None:
        """End its threads."""
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _keys(self, first: int) -> list[CacheEngineKey]:
        numbers = range(first + 1, first + 1 + self._size.count)
        return [CacheEngineKey(MODEL_NAME, 1, 0, number, torch.bfloat16) for number in numbers]

    def _allocate(self) -> object:
        shape = torch.Size([2, 1, CHUNK_SIZE, self._size.nbytes // (4 * CHUNK_SIZE)])
        return self._memory.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)

    def _write(self, keys: list[CacheEngineKey]) -> None:
        written = threading.Semaphore(0)
        for key, slot in zip(keys, self._slots, strict=True):
            self._disk.submit_put_task(key, slot, on_complete_callback=lambda _: written.release())
        for _ in keys:
            if not written.acquire(timeout=_END_S):
                raise RuntimeError(f"a chunk was not written within {_END_S} s")

    def _store(self) -> None:
        self._num_writes += 1
        self._written = self._keys(self._num_writes * self._size.count)
        self._write(self._written)

    def _clear(self) -> None:
        plain.give_back(self._disk.dict[key].path for key in self._written)

    def _retrieve(self) -> None:
        for key in self._kept:
            slot = self._disk.get_blocking(key)
            if slot is None:
                raise RuntimeError("a chunk was not read")
            slot.ref_count_down()


def main() -> None:
    arguments = _parse_arguments()
    cases = {size.name: DiskCases(size, Path(arguments.directory) / size.name) for size in arguments.sizes}
    facts = {"lmcache": metadata.version("lmcache"), "torch": torch.__version__}
    answer_rounds(facts, {name: of_size.rounds for name, of_size in cases.items()})
    for of_size in cases.values():
        of_size.close()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LMCache's local disk, as benchmarks/disk.py asks for it.")
    parser.add_argument("--directory", required=True, metavar="DIR", help="for the files")
    parser.add_argument("sizes", nargs="+", type=Size.parse, metavar="NAME=NBYTESxCOUNT", help="chunks of a round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
