"""Storing and loading a prompt in process, as a share of a memory copy of as many bytes."""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.claims import Claim, Part, at_least, beside
from benchmarks.engine_parts.engines import engine_of, numpy_connector
from benchmarks.engine_parts.turns import BothSides, in_turns
from benchmarks.measure import Case, Json, Samples, interleaved, progress, ratio
from benchmarks.memory_copy import LIBC_COPY, TORCH_COPY, memory_copies
from benchmarks.peers.child import PeerProcess
from benchmarks.workload import CHUNK_SIZE, NARROW, WIDE, KVShape, Prompt, paged_kv
from lmcache_ray.connector.row_copy import compiled_copy

_NARROW_SUFFIX = "_narrow"
_NUMPY_SUFFIX = "_numpy"
_CALLS = ("store", "retrieve")
_BARS = {"random": 0.7, "contiguous": 0.95}
_OF = {TORCH_COPY: "of torch's copy_ of as many bytes", LIBC_COPY: "of memmove of as many bytes"}
_AGAIN_BAR = 20.0


def measure_copies(*, num_tokens: int, turns: int, rounds_per_turn: int, peer: PeerProcess | None) -> Part:
    """Wide KV in random and contiguous blocks, narrow KV in random ones; each also as NumPy alone would copy it."""
    wide, narrow = _CopyCases(WIDE, num_tokens), _CopyCases(NARROW, num_tokens)
    progress(f"copies: {wide.nbytes // 2**20} MiB, {turns} turns")
    for cases in (wide, narrow):
        cases.check()

    def own_turn() -> dict[str, Samples]:
        found = wide.rounds(("random", "contiguous"), rounds_per_turn)
        in_narrow = narrow.rounds(("random",), rounds_per_turn)
        return found | {case + _NARROW_SUFFIX: samples for case, samples in in_narrow.items()}

    both = in_turns(own_turn, peer, "copies", turns=turns)
    measured: dict[str, Json] = {
        "num_tokens": num_tokens,
        "torch_threads": torch.get_num_threads(),
        "row_copy": "numpy" if compiled_copy() is None else "compiled",
        "wide": _shape_json(WIDE, wide.nbytes),
        "narrow": _shape_json(NARROW, narrow.nbytes),
        "speeds": _speeds(both, wide.nbytes, narrow.nbytes),
        "store_over_store_again": ratio(both.own["store_random"], both.own["store_again"]).to_json(),
        "times": both.to_json(),
    }
    return Part(_claims(both), measured)


class _CopyCases:
    """One prompt of one shape. The arena has room for just this prompt: a store always writes the same, warm slots."""

    def __init__(self, shape: KVShape, num_tokens: int) -> None:
        self.nbytes = num_tokens * shape.token_nbytes
        self._prompt = Prompt.of(num_tokens)
        self._kvcaches = paged_kv(shape, num_tokens)
        by_numpy = numpy_connector(shape, self._kvcaches)
        self._engine = engine_of(shape, capacity_tokens=num_tokens, connector=by_numpy)
        self._copies = memory_copies(self.nbytes)

    def rounds(self, orders: Sequence[str], count: int) -> dict[str, Samples]:
        """`count` rounds of memory copies, ``store_<order>``, ``retrieve_<order>``, both by NumPy, ``store_again``."""
        cases: dict[str, Case] = dict(self._copies)
        before: dict[str, Case] = {}
        for order in orders:
            for suffix, kvcaches in (("", self._kvcaches), (_NUMPY_SUFFIX, None)):
                cases[f"store_{order}{suffix}"] = partial(self._store, order, kvcaches)
                before[f"store_{order}{suffix}"] = self._engine.clear
                cases[f"retrieve_{order}{suffix}"] = partial(self._retrieve, order, kvcaches)
                before[f"retrieve_{order}{suffix}"] = partial(self._store, "contiguous", self._kvcaches)
        cases["store_again"] = partial(self._store, "random", self._kvcaches)
        before["store_again"] = partial(self._store, "random", self._kvcaches)
        return interleaved(cases, rounds=count, warmup=0, before=before)

    def check(self) -> None:
        """Every order and means brings the very bytes that were stored. RuntimeError if not."""
        for order in self._prompt.sources:
            for kvcaches in (self._kvcaches, None):
                source, target = self._prompt.sources[order], self._prompt.targets[order]
                self._engine.clear()
                for rows in map(_rows, self._kvcaches):
                    rows[:, target] = 0
                self._store(order, kvcaches)
                self._retrieve(order, kvcaches)
                if not all(torch.equal(rows[:, source], rows[:, target]) for rows in map(_rows, self._kvcaches)):
                    raise RuntimeError(f"{order} blocks: other bytes were loaded than had been stored")

    def _store(self, order: str, kvcaches: list[torch.Tensor] | None) -> None:
        rows = self._prompt.sources[order]
        stored = self._engine.store(self._prompt.tokens, kvcaches=kvcaches, slot_mapping=rows)
        if stored != len(self._prompt.tokens):
            raise RuntimeError(f"only {stored} of {len(self._prompt.tokens)} tokens are stored")

    def _retrieve(self, order: str, kvcaches: list[torch.Tensor] | None) -> None:
        rows = self._prompt.targets[order]
        loaded = self._engine.retrieve(self._prompt.tokens, kvcaches=kvcaches, slot_mapping=rows)
        if not bool(loaded.all()):
            raise RuntimeError(f"only {int(loaded.sum())} of {len(loaded)} tokens were loaded")


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """The bytes of a layer's rows, ``[2, num_rows, row_nbytes]``."""
    return cache.view(torch.uint8).view(2, cache.shape[1] * cache.shape[2], -1)


def _shape_json(shape: KVShape, nbytes: int) -> dict[str, Json]:
    chunk_nbytes = CHUNK_SIZE * shape.token_nbytes
    return {"nbytes": nbytes, "chunk_nbytes": chunk_nbytes, "piece_nbytes": shape.piece_nbytes}


def _speeds(both: BothSides, wide_nbytes: int, narrow_nbytes: int) -> dict[str, Json]:
    speeds: dict[str, Json] = {}
    for case in both.own:
        if case.startswith(("store_", "retrieve_")) and not case.startswith("store_again"):
            is_narrow = case.endswith(_NARROW_SUFFIX)
            nbytes, suffix = (narrow_nbytes, _NARROW_SUFFIX) if is_narrow else (wide_nbytes, "")
            speeds[case] = both.speeds(case, nbytes, suffix)
    return speeds


def _claims(both: BothSides) -> list[Claim]:
    claims = [_claim(both, f"{call}_{order}", TORCH_COPY) for order in _BARS for call in _CALLS]
    again = at_least("engine store over storing again what is cached", _AGAIN_BAR, note="time over time")
    claims.append(again.of_ratio(ratio(both.own["store_random"], both.own["store_again"])))
    claims += [_claim(both, f"{call}_{order}", LIBC_COPY) for order in _BARS for call in _CALLS]
    others = [f"{call}_random{suffix}" for suffix in (_NARROW_SUFFIX, _NUMPY_SUFFIX) for call in _CALLS]
    claims += [_claim(both, case, TORCH_COPY) for case in others]
    for case in [f"{call}_{order}" for order in _BARS for call in _CALLS] if both.peer else []:
        speed = beside(f"LMCache's engine {_in_words(case)}", "x", note=_OF[TORCH_COPY])
        claims.append(speed.of_speed(both.peer[case], both.peer[TORCH_COPY]))
    return claims


def _claim(both: BothSides, case: str, copy: str) -> Claim:
    """The speed of a case; what is promised is a share of torch's copy, of wide KV, by the compiled means."""
    call, order, *_ = case.split("_")
    has_bar = copy == TORCH_COPY and case == f"{call}_{order}"
    name, note = f"engine {_in_words(case)}", _OF[copy]
    promise = at_least(name, _BARS[order], note=note) if has_bar else beside(name, "x", note=note)
    suffix = _NARROW_SUFFIX if case.endswith(_NARROW_SUFFIX) else ""
    return promise.of_speed(both.own[case], both.own[copy + suffix])


def _in_words(case: str) -> str:
    call, order, *suffix = case.split("_")
    shape = NARROW if suffix == ["narrow"] else WIDE
    by_numpy = ", copied by NumPy" if suffix == ["numpy"] else ""
    return f"{call}, {order} blocks of {shape.piece_nbytes // 1024} KiB{by_numpy}"
