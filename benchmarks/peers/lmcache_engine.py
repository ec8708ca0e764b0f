"""LMCache's engine in process, on the CPU: the peer's half of `benchmarks/engine.py`, case by case.

Answers rounds by name (`answers.py`). By hand:

    printf 'copies\\ncalls\\n' | /path/to/peer/python benchmarks/peers/lmcache_engine.py
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import torch

from benchmarks.measure import Case, Samples, interleaved
from benchmarks.memory_copy import memory_copies
from benchmarks.peers.answers import answer_rounds
from benchmarks.peers.lmcache_parts import build_engine, close_engine
from benchmarks.workload import NARROW, WIDE, KVShape, Prompt, paged_kv, tokens

_SPARE_NBYTES = 64 * 2**20  # of a pool, for alignment


def main() -> None:
    arguments = _parse_arguments()
    torch.set_num_threads(arguments.threads)
    wide = CopyCases("wide", WIDE, arguments.prompt_tokens)
    narrow = CopyCases("narrow", NARROW, arguments.prompt_tokens)
    for copies in (wide, narrow):
        copies.check()
    calls = CallCases("calls", arguments.prompt_tokens, arguments.lookup_tokens)
    answer_rounds(
        {"lmcache": metadata.version("lmcache"), "torch": torch.__version__, "torch_threads": torch.get_num_threads()},
        {
            "copies": partial(_copies, wide, narrow, arguments.copies_per_turn),
            "calls": partial(calls.rounds, arguments.calls_per_turn),
        },
    )
    for name in ("wide", "narrow", "calls"):
        close_engine(name)


def _copies(wide: "CopyCases", narrow: "CopyCases", count: int) -> Mapping[str, Samples]:
    found = wide.rounds(("random", "contiguous"), count)
    return found | {f"{case}_narrow": samples for case, samples in narrow.rounds(("random",), count).items()}


class CopyCases:
    """Storing and loading one prompt. The pool has room for two: storing a cached one again takes as much again."""

    def __init__(self, name: str, shape: KVShape, num_tokens: int) -> None:
        nbytes = num_tokens * shape.token_nbytes
        self._prompt = Prompt.of(num_tokens)
        self._kvcaches = paged_kv(shape, num_tokens)
        self._engine = build_engine(name, shape, pool_nbytes=2 * nbytes + _SPARE_NBYTES)
        self._copies = memory_copies(nbytes)

    def rounds(self, orders: Sequence[str], count: int) -> dict[str, Samples]:
        """`count` rounds of the memory copies, ``store_<order>``, ``retrieve_<order>`` and ``store_again``."""
        cases: dict[str, Case] = dict(self._copies)
        before: dict[str, Case] = {}
        for order in orders:
            cases[f"store_{order}"] = partial(self._store, order)
            before[f"store_{order}"] = self._engine.clear
            cases[f"retrieve_{order}"] = partial(self._retrieve, order)
            before[f"retrieve_{order}"] = self._store_if_missing
        cases["store_again"] = partial(self._store, "random")
        before["store_again"] = self._store_if_missing
        return interleaved(cases, rounds=count, warmup=0, before=before)

    def check(self) -> None:
        """Every order brings the very bytes that were stored. RuntimeError if not."""
        for order, source in self._prompt.sources.items():
            layers = [cache.view(2, -1, cache.shape[3] * cache.shape[4]) for cache in self._kvcaches]
            target = self._prompt.targets[order]
            self._engine.clear()
            for rows in layers:
                rows[:, target] = 0
            self._store(order)
            self._retrieve(order)
            if not all(
                torch.equal(rows[:, source].view(torch.int16), rows[:, target].view(torch.int16)) for rows in layers
            ):
                raise RuntimeError(f"{order} blocks: other bytes were loaded than had been stored")

    def _store(self, order: str) -> None:
        self._engine.store(self._prompt.tokens, kvcaches=self._kvcaches, slot_mapping=self._prompt.sources[order])

    def _store_if_missing(self) -> None:
        if self._engine.lookup(self._prompt.tokens) < len(self._prompt.tokens):
            self._store("contiguous")

    def _retrieve(self, order: str) -> None:
        rows = self._prompt.targets[order]
        loaded = self._engine.retrieve(self._prompt.tokens, kvcaches=self._kvcaches, slot_mapping=rows)
        if not bool(loaded.all()):
            raise RuntimeError(f"only {int(loaded.sum())} of {len(loaded)} tokens were loaded")


class CallCases:
    """Calls that move no bytes: lookups of a long cached prompt, hashing it, and the bookkeeping around a copy."""

    def __init__(self, name: str, prompt_tokens: int, lookup_tokens: int) -> None:
        pool_nbytes = (2 * prompt_tokens + lookup_tokens) * WIDE.token_nbytes + _SPARE_NBYTES
        self._engine = build_engine(name, WIDE, pool_nbytes=pool_nbytes, moves_bytes=False)
        self._cached = tokens(lookup_tokens, seed=1)
        self._cached_tensor = torch.tensor(self._cached)
        self._prompt = Prompt.of(prompt_tokens)
        spans = list(self._hash(self._cached))
        self._hashes = [key for _, _, key in spans]
        self._lengths = [end - start for start, end, _ in spans]
        self._engine.store(self._cached, slot_mapping=torch.arange(lookup_tokens))

    def rounds(self, count: int) -> dict[str, Samples]:
        """`count` rounds of every case."""
        cases: dict[str, Case] = {
            "lookup_list": lambda: self._lookup(tokens=self._cached),
            "lookup_tensor": lambda: self._lookup(tokens=self._cached_tensor),
            "lookup_keys": lambda: self._lookup(hashes=self._hashes, offsets=self._lengths),
            "lookup_pinned": self._lookup_pinned,
            "hash_list": lambda: list(self._hash(self._cached)),
            "hash_tensor": lambda: list(self._hash(self._cached_tensor)),
            "store_bookkeeping": self._store,
            "retrieve_bookkeeping": self._retrieve,
        }
        before: dict[str, Case] = {
            "store_bookkeeping": lambda: self._engine.clear(self._prompt.tokens),
            "retrieve_bookkeeping": self._store_if_missing,
        }
        return interleaved(cases, rounds=count, before=before)

    def _lookup(self, **call: object) -> None:
        found = self._engine.lookup(**call)
        if found != len(self._cached):
            raise RuntimeError(f"a lookup found {found} of {len(self._cached)} cached tokens")

    def _lookup_pinned(self) -> None:
        self._lookup(tokens=self._cached, lookup_id="pinned", pin=True)
        self._engine.lookup_unpin("pinned")

    def _hash(self, tokens_or_tensor: list[int] | torch.Tensor) -> Sequence[tuple[int, int, int]]:
        spans: Sequence[tuple[int, int, int]] = list(
            self._engine.token_database.process_tokens(tokens_or_tensor, make_key=False)
        )
        return spans

    def _store(self) -> None:
        self._engine.store(self._prompt.tokens, slot_mapping=self._prompt.sources["random"])

    def _store_if_missing(self) -> None:
        if self._engine.lookup(self._prompt.tokens) < len(self._prompt.tokens):
            self._store()

    def _retrieve(self) -> None:
        loaded = self._engine.retrieve(self._prompt.tokens, slot_mapping=self._prompt.targets["random"])
        if not bool(loaded.all()):
            raise RuntimeError(f"only {int(loaded.sum())} of {len(loaded)} tokens were loaded")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LMCache's engine, case by case, as benchmarks/engine.py asks for it.")
    parser.add_argument("--prompt-tokens", type=int, default=8192, metavar="N", help="stored and loaded (8192)")
    parser.add_argument("--lookup-tokens", type=int, default=32768, metavar="N", help="looked up (32768)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch (1)")
    parser.add_argument("--copies-per-turn", type=int, default=2, metavar="N", help="rounds of a turn (2)")
    parser.add_argument("--calls-per-turn", type=int, default=10, metavar="N", help="the same without bytes (10)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
