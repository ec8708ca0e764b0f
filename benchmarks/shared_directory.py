"""A prototype: lookups answered from shared memory, without a call to the coordinator. Not part of the product.

The directory is one file of 8-byte words, an open-addressing hash table of the chunks that are READY. A word is the
first 8 bytes of a chunk's key; a SHA-256 digest needs no other hash. One process writes, any other on the node reads,
without a lock: every store and load is one aligned word, so a reader sees a chunk or does not. That is enough for a
lookup without a pin, which is only ever true of the moment, and `retrieve` looks at whole keys and generations again.

This script measures what it would bring (`lookup` of 128 keys here against one through a running cluster) and what it
would cost (words written by whoever keeps it, per chunk). `docs/scaling.md` says what came of it.
"""

import argparse
import hashlib
import mmap
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measure import Json, Samples, begin_run, emit, interleaved, progress, ratio

_EMPTY: Final = 0
_REMOVED: Final = 1  # keeps later entries of a probe sequence reachable; no key begins with it but by a 2**-64 chance
_WORD_NBYTES: Final = 8
_MAX_PROBES: Final = 64


class DirectoryWriter:
    """The one writer of a directory with room for `capacity` chunks. Not thread-safe."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.num_words = 1 << (2 * capacity - 1).bit_length()
        with path.open("w+b") as file:
            file.truncate(self.num_words * _WORD_NBYTES)
            self._mapping = mmap.mmap(file.fileno(), 0)
        self._words = memoryview(self._mapping).cast("Q")

    def add(self, key: bytes) -> None:
        """Enter a chunk that is READY now and was not. Raises RuntimeError when there is no room near its place."""
        word, words, mask = _word(key), self._words, self.num_words - 1
        for probe in range(_MAX_PROBES):
            place = (word + probe) & mask
            if words[place] <= _REMOVED:
                words[place] = word
                return
        raise RuntimeError(f"no room within {_MAX_PROBES} words: too many were removed, make the table anew")

    def remove(self, key: bytes) -> None:
        """Strike out a chunk that was entered and is READY no more."""
        word, words, mask = _word(key), self._words, self.num_words - 1
        for probe in range(_MAX_PROBES):
            place = (word + probe) & mask
            if words[place] == word:
                next_is_empty = words[(place + 1) & mask] == _EMPTY
                words[place] = _EMPTY if next_is_empty else _REMOVED
                return
        raise KeyError(key.hex())


class DirectoryReader:
    """Lookups in a directory that another process writes."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._words = np.frombuffer(self._mapping, dtype=np.uint64)
        self._mask = np.uint64(len(self._words) - 1)

    def lookup(self, keys: bytes) -> int:
        """How many of the packed 32-byte keys, from the first on, are there now."""
        wanted = np.frombuffer(keys, dtype="<u8")[::4]
        wanted = np.maximum(wanted, _REMOVED + 1)
        places = wanted & self._mask
        found = self._words[places]
        open_ones = np.flatnonzero((found != wanted) & (found != _EMPTY))  # met another chunk: go on behind it
        for probe in range(1, _MAX_PROBES):
            if not open_ones.size:
                break
            found[open_ones] = self._words[(places[open_ones] + np.uint64(probe)) & self._mask]
            seen = found[open_ones]
            open_ones = open_ones[(seen != wanted[open_ones]) & (seen != _EMPTY)]
        missing = np.flatnonzero(found != wanted)
        return int(missing[0]) if missing.size else len(wanted)


def _word(key: bytes) -> int:
    return max(int.from_bytes(key[:_WORD_NBYTES], "little"), _REMOVED + 1)


def keys_of(prompt: int, num_chunks: int) -> list[bytes]:
    """Keys of a prompt's chunks; no two prompts share one."""
    return [hashlib.sha256(b"%d/%d" % (prompt, chunk)).digest() for chunk in range(num_chunks)]


def _churn(path: Path, num_chunks: int, num_prompts: int, ready: Event, stop: Event) -> None:
    """The writing process: it keeps the directory full, drops one prompt and enters another all the time.

    Prompt 0 stays. Runs until `stop`.
    """
    writer = DirectoryWriter(path, num_chunks * num_prompts)
    for prompt in range(num_prompts):
        for key in keys_of(prompt, num_chunks):
            writer.add(key)
    ready.set()
    oldest, newest = 1, num_prompts
    while not stop.is_set():
        for old, new in zip(keys_of(oldest, num_chunks), keys_of(newest, num_chunks), strict=True):
            writer.remove(old)
            writer.add(new)
        oldest, newest = oldest + 1, newest + 1


def _write_cost(folder: Path, num_chunks: int, rounds: int) -> Samples:
    """Seconds per round to strike out and enter `num_chunks` chunks."""
    writer = DirectoryWriter(folder / "cost", 1 << 16)
    old, new = keys_of(1, num_chunks), keys_of(2, num_chunks)
    for key in old:
        writer.add(key)

    def turn() -> None:
        nonlocal old, new
        for before, after in zip(old, new, strict=True):
            writer.remove(before)
            writer.add(after)
        old, new = new, old

    return interleaved({"write": turn}, rounds=rounds)["write"]


def _measure(num_chunks: int, num_prompts: int, rounds: int) -> dict[str, Json]:
    import torch  # the writing process, which imports this file too, needs none of these

    from cluster.client import CacheCluster
    from lmcache_ray import LMCacheEngineConfig

    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "directory")
        child = context.Process(target=_churn, args=(path, num_chunks, num_prompts, ready, stop), daemon=True)
        child.start()
        if not ready.wait(60):
            raise RuntimeError("the writing process was not ready within 60 s")
        reader, stays = DirectoryReader(path), b"".join(keys_of(0, num_chunks))
        never = b"".join(keys_of(-1, num_chunks))
        config = LMCacheEngineConfig.from_dict({"chunk_size": 16, "capacity_chunks": 2 * num_chunks})
        with CacheCluster.start(config, model_name="m", kv_shape=(1, 2, 16, 1, 8), kv_dtype=torch.float16) as cache:
            tokens = np.arange(16 * num_chunks)
            cache.put(tokens, [[torch.zeros(2, 1, 16 * num_chunks, 8, dtype=torch.float16)]])
            hashes, lengths = cache.link.hasher.keys(tokens), [16] * num_chunks
            wrong = 0

            def read() -> None:
                nonlocal wrong
                wrong += reader.lookup(stays) != num_chunks

            def read_what_is_not_there() -> None:
                nonlocal wrong
                wrong += reader.lookup(never) != 0

            samples = interleaved(
                {
                    "directory_hit": read,
                    "directory_miss": read_what_is_not_there,
                    "cluster_lookup": lambda: cache.lookup(hashes=hashes, offsets=lengths),
                },
                rounds=rounds,
                warmup=20,
            )
        stop.set()
        child.join(10)
        cost = _write_cost(Path(folder), num_chunks, rounds)
    return {
        "num_chunks": num_chunks,
        "num_entries": num_chunks * num_prompts,
        "wrong_answers": wrong,
        **{name: each.spread.to_json("_s") for name, each in samples.items()},
        "cluster_lookup_over_directory_hit": ratio(samples["cluster_lookup"], samples["directory_hit"]).to_json(),
        "write_per_chunk_median_s": cost.median_s / num_chunks,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description="lookups from a shared-memory directory against those by a call")
    parser.add_argument("--chunks", type=int, default=128, help="chunks of a prompt")
    parser.add_argument("--prompts", type=int, default=1000, help="prompts in the directory")
    parser.add_argument("--rounds", type=int, default=500)
    given = parser.parse_args(arguments)
    run = begin_run("shared_directory", vars(given))
    progress("directory and cluster, interleaved, while another process rewrites the directory")
    emit(run, _measure(given.chunks, given.prompts, given.rounds))


if __name__ == "__main__":
    main()
