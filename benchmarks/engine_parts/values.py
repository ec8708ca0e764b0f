"""One chunk through stores that run as servers, and through this engine: each as a share of a memory copy beside it.

Not a comparison of equals: a server's value is there for other machines as well. It shows what a chunk costs that has
to leave the process, where shared memory would have served.
"""

from collections.abc import Mapping
from functools import partial

from benchmarks.claims import Claim, Part, beside, samples_json
from benchmarks.engine_parts.engines import engine_of
from benchmarks.engine_parts.turns import BothSides, in_turns
from benchmarks.measure import Case, Json, Samples, interleaved, progress, ratio
from benchmarks.memory_copy import LIBC_COPY, TORCH_COPY, memory_copies
from benchmarks.peers.child import PeerProcess
from benchmarks.workload import CHUNK_SIZE, WIDE, Prompt, paged_kv

VALUE_NBYTES = CHUNK_SIZE * WIDE.token_nbytes
_COPIES = (TORCH_COPY, LIBC_COPY)


def measure_values(*, turns: int, peer: PeerProcess) -> Part:
    """Store and retrieve of one chunk here, put and get of as many bytes there."""
    progress(f"values: {VALUE_NBYTES // 2**20} MiB, {turns} turns")
    both = in_turns(partial(_ChunkCases().rounds, 1), peer, "values", turns=turns)
    speeds: dict[str, Json] = {"lmcache_ray": _speeds(both.own)} | _speeds(both.peer)
    times: dict[str, Json] = {"lmcache_ray": samples_json(both.own), "peers": samples_json(both.peer)}
    return Part(_claims(both), {"stores": peer.facts, "speeds": speeds, "times": times})


class _ChunkCases:
    """A prompt of one chunk, in blocks in random order."""

    def __init__(self) -> None:
        self._prompt = Prompt.of(CHUNK_SIZE)
        self._kvcaches = paged_kv(WIDE, CHUNK_SIZE)
        self._engine = engine_of(WIDE, capacity_tokens=CHUNK_SIZE)
        self._copies = memory_copies(VALUE_NBYTES)
        self._store()  # the first round may begin with a retrieve

    def rounds(self, count: int) -> dict[str, Samples]:
        """`count` rounds of the memory copies, "store" and "retrieve"."""
        cases: dict[str, Case] = {**self._copies, "store": self._store, "retrieve": self._retrieve}
        return interleaved(cases, rounds=count, before={"store": self._engine.clear})

    def _store(self) -> None:
        rows = self._prompt.sources["random"]
        self._engine.store(self._prompt.tokens, kvcaches=self._kvcaches, slot_mapping=rows)

    def _retrieve(self) -> None:
        rows = self._prompt.targets["random"]
        loaded = self._engine.retrieve(self._prompt.tokens, kvcaches=self._kvcaches, slot_mapping=rows)
        if not bool(loaded.all()):
            raise RuntimeError("the chunk was not loaded")


def _claims(both: BothSides) -> list[Claim]:
    """Each share is of the memmove in the process that was timed."""
    return [
        beside(f"{side}{case.replace('_', ' ')}, 8 MiB", "x", "of memmove of as many bytes").of_speed(
            of_case, samples[LIBC_COPY]
        )
        for side, samples in (("engine ", both.own), ("", both.peer))
        for case, of_case in samples.items()
        if case not in _COPIES
    ]


def _speeds(samples: Mapping[str, Samples]) -> dict[str, Json]:
    """Each case in GB/s and as a share of the two memory copies of the same process."""
    return {
        case: {"gb_per_s": VALUE_NBYTES / of_case.median_s / 1e9}
        | {f"over_{copy}": ratio(samples[copy], of_case).to_json() for copy in _COPIES}
        for case, of_case in samples.items()
        if case not in _COPIES
    }
