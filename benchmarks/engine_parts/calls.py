"""Calls that move no bytes: lookups of a long cached prompt, hashing it, and the bookkeeping around a copy."""

from array import array
from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np
import torch

from benchmarks.claims import Claim, Part, at_most, beside
from benchmarks.engine_parts.engines import NoCopyConnector, engine_of
from benchmarks.engine_parts.turns import BothSides, in_turns
from benchmarks.measure import Case, Json, Samples, interleaved, progress
from benchmarks.peers.child import PeerProcess
from benchmarks.workload import CHUNK_SIZE, MODEL_NAME, WIDE, Prompt, tokens
from lmcache_ray.keys import ChunkHasher

_BARS: Final[Mapping[str, float | None]] = {
    "lookup_list": 1.0,
    "lookup_tensor": 0.25,
    "store_bookkeeping": 0.5,
    "retrieve_bookkeeping": 0.5,
    "lookup_keys": None,
    "lookup_pinned": None,
    "hash_list": None,
    "hash_tensor": None,
}
_NOTE = "time over time"
_WORDS = {
    "list": "{} of a list",
    "array": "{} of an array",
    "numpy": "{} of a NumPy array",
    "tensor": "{} of a tensor",
    "keys": "{} by keys",
    "pinned": "{} of a list, pinned and unpinned",
    "grown": "{} of two more chunks of a list",
    "bookkeeping": "{}, no bytes moved",
}
_NEW_CHUNKS = 2  # of a prompt that has grown by a turn


def measure_calls(
    *, prompt_tokens: int, lookup_tokens: int, turns: int, rounds_per_turn: int, peer: PeerProcess | None
) -> Part:
    """Each call beside the peer's."""
    progress(f"calls: {lookup_tokens} tokens looked up, {turns} turns")
    cases = _CallCases(prompt_tokens, lookup_tokens)
    both = in_turns(partial(cases.rounds, rounds_per_turn), peer, "calls", turns=turns)
    measured: dict[str, Json] = {
        "prompt_tokens": prompt_tokens,
        "lookup_tokens": lookup_tokens,
        "hash_mtok_per_s": _hash_speeds(both.own, lookup_tokens),
        "lmcache_hash_mtok_per_s": _hash_speeds(both.peer, lookup_tokens) or None,
        "time_over_lmcache": {case: both.time_ratio(case).to_json() for case in both.own if case in both.peer},
        "times": both.to_json(),
    }
    return Part(_claims(both), measured)


class _CallCases:
    """One long prompt that is cached, and a shorter one that is stored anew each time."""

    def __init__(self, prompt_tokens: int, lookup_tokens: int) -> None:
        capacity, num_slots = prompt_tokens + lookup_tokens, max(2 * prompt_tokens, lookup_tokens)
        self._engine = engine_of(WIDE, capacity_tokens=capacity, connector=NoCopyConnector(num_slots))
        self._hasher = ChunkHasher(MODEL_NAME, chunk_size=CHUNK_SIZE)
        self._cached = tokens(lookup_tokens, seed=1)
        self._prompt = Prompt.of(prompt_tokens)
        self._engine.store(self._cached, slot_mapping=torch.arange(lookup_tokens))

    def rounds(self, count: int) -> dict[str, Samples]:
        """`count` rounds of every case."""
        cases = self._lookups() | self._hashes()
        cases |= {"store_bookkeeping": self._store, "retrieve_bookkeeping": self._retrieve}
        before: dict[str, Case] = {
            "store_bookkeeping": lambda: self._engine.clear(self._prompt.tokens),
            "retrieve_bookkeeping": self._store,
        }
        return interleaved(cases, rounds=count, before=before)

    def _lookups(self) -> dict[str, Case]:
        keys = self._hasher.keys(self._cached)
        lengths = [CHUNK_SIZE] * len(keys)
        packed, numbers, tensor = array("I", self._cached), np.array(self._cached), torch.tensor(self._cached)
        return {
            "lookup_list": lambda: self._expect_all(self._engine.lookup(self._cached)),
            "lookup_array": lambda: self._expect_all(self._engine.lookup(packed)),
            "lookup_numpy": lambda: self._expect_all(self._engine.lookup(numbers)),
            "lookup_tensor": lambda: self._expect_all(self._engine.lookup(tensor)),
            "lookup_keys": lambda: self._expect_all(self._engine.lookup(hashes=keys, offsets=lengths)),
            "lookup_pinned": self._lookup_pinned,
        }

    def _hashes(self) -> dict[str, Case]:
        keys, tensor = self._hasher.keys(self._cached), torch.tensor(self._cached)
        earlier, added = keys[:-_NEW_CHUNKS], self._cached[-_NEW_CHUNKS * CHUNK_SIZE :]
        return {
            "hash_list": lambda: self._hasher.keys(self._cached),
            "hash_tensor": lambda: self._hasher.keys(tensor),
            "hash_grown": lambda: self._hasher.keys(added, after=earlier),
        }

    def _lookup_pinned(self) -> None:
        self._expect_all(self._engine.lookup(self._cached, lookup_id="pinned", pin=True))
        self._engine.lookup_unpin("pinned")

    def _store(self) -> None:
        self._engine.store(self._prompt.tokens, slot_mapping=self._prompt.sources["random"])

    def _retrieve(self) -> None:
        loaded = self._engine.retrieve(self._prompt.tokens, slot_mapping=self._prompt.targets["random"])
        if not bool(loaded.all()):
            raise RuntimeError(f"only {int(loaded.sum())} of {len(loaded)} tokens were loaded")

    def _expect_all(self, found: int) -> None:
        if found != len(self._cached):
            raise RuntimeError(f"a lookup found {found} of {len(self._cached)} cached tokens")


def _hash_speeds(samples: Mapping[str, Samples], num_tokens: int) -> dict[str, Json]:
    """Million tokens a second."""
    whole = ("hash_list", "hash_tensor")
    return {case: num_tokens / samples[case].median_s / 1e6 for case in whole if case in samples}


def _claims(both: BothSides) -> list[Claim]:
    """What is promised is a share of LMCache's time; without LMCache there are only times."""
    claims = []
    for case, bar in _BARS.items() if both.peer else []:
        name = f"engine {_in_words(case)} over LMCache's"
        promise = beside(name, "x", _NOTE) if bar is None else at_most(name, bar, "x", _NOTE)
        claims.append(promise.of_ratio(both.time_ratio(case)))
    for case, samples in both.own.items():
        claims.append(beside(f"engine {_in_words(case)}", "ms", "a time, as the machine was").of_milliseconds(samples))
    return claims


def _in_words(case: str) -> str:
    call, _, form = case.partition("_")
    return _WORDS[form].format(call)
