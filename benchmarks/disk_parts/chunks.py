"""Writing and reading chunk files, as a share of plain Python's speed with as many bytes in files of the same names."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.claims import Claim, Part, at_least, beside
from benchmarks.disk_parts import plain
from benchmarks.disk_parts.rank import RankChunks
from benchmarks.disk_parts.single import DirectoryChunks, chunks_of
from benchmarks.engine_parts.turns import BothSides, in_turns
from benchmarks.measure import Json, Samples, interleaved, progress, ratio
from benchmarks.peers.child import PeerProcess
from benchmarks.workload import CHUNK_SIZE
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.layout import Placement, ShardSpec, WorldLayout, uniform_world
from lmcache_ray.storage.disk_names import chunk_path

_ROUNDS_PER_TURN = 2  # one forwards and one backwards


@dataclass(frozen=True, slots=True)
class ChunkKind:
    """Chunks of one size, so many of them in one round, and the share of plain Python's speed that is promised."""

    name: str
    num_layers: int
    num_heads: int
    head_size: int
    count: int
    bar: float | None

    @property
    def layout(self) -> WorldLayout:
        """Of one rank with bfloat16 KV."""
        group = ShardSpec(tuple(range(self.num_layers)), range(self.num_heads), self.head_size, KVDtype.BFLOAT16)
        return uniform_world((group,), chunk_size=CHUNK_SIZE, world_size=1, placement=Placement.PER_RANK)


@dataclass(frozen=True, slots=True)
class _Way:
    """One direction: what the cases of plain Python, of the rank (and the peer) and of one thread are called."""

    title: str
    plain: str
    rank: str
    single: str
    note: str


_WAYS = (
    _Way("store", plain.WRITE, "store", "write", "of open().write() and rename, same bytes"),
    _Way("retrieve", plain.READ, "retrieve", "read", "of open().readinto(), same bytes"),
)


def measure_chunks(kind: ChunkKind, folder: Path, *, turns: int, peer: PeerProcess | None) -> Part:
    """Both ways, with the peer's rounds `kind.name` in turn."""
    cases = _ChunkCases(kind, folder / kind.name)
    progress(f"{kind.name} chunks: {cases.nbytes // 2**20} MiB a round, {turns} turns")
    cases.check()
    both = in_turns(cases.rounds, peer, kind.name, turns=turns)
    cases.close()
    measured: dict[str, Json] = {
        "chunk_nbytes": cases.nbytes // kind.count,
        "num_chunks": kind.count,
        "gb_per_s": {case: cases.nbytes / samples.median_s / 1e9 for case, samples in both.own.items()},
        "times": both.to_json(),
    }
    return Part([claim for way in _WAYS for claim in _claims(kind, way, both)], measured)


class _ChunkCases:
    """The slots of one arena, each with a file to read in each of three directories, and with others to write."""

    def __init__(self, kind: ChunkKind, folder: Path) -> None:
        self._rank = RankChunks(folder / "rank", kind.layout, kind.count)
        self._slots = self._rank.slots
        self._single = DirectoryChunks(folder / "single", kind.layout, self._slots)
        names = [chunk_path(chunk) for chunk in chunks_of(kind.count)]
        self._plain = plain.PlainFiles(folder / "plain", names, self._slots)
        self._plain.make()
        self.nbytes = sum(slot.nbytes for slot in self._slots)

    def check(self) -> None:
        """Every chunk comes back as it was. RuntimeError if not."""
        before = np.stack(self._slots)
        readers: tuple[Callable[[], None], ...] = (self._rank.retrieve, self._single.read, self._plain.read)
        for read in readers:
            for slot in self._slots:
                slot[:] = 0
            read()
            if not np.array_equal(before, np.stack(self._slots)):
                raise RuntimeError("other bytes were read than had been written")

    def rounds(self) -> dict[str, Samples]:
        """The rounds of one turn."""
        return interleaved(
            {
                plain.WRITE: self._plain.write,
                "store": self._rank.store,
                "write": self._single.write,
                plain.READ: self._plain.read,
                "retrieve": self._rank.retrieve,
                "read": self._single.read,
            },
            rounds=_ROUNDS_PER_TURN,
            warmup=0,
            before={plain.WRITE: self._plain.clear, "store": self._rank.clear, "write": self._single.clear},
        )

    def close(self) -> None:
        """Let the directories go."""
        self._rank.close()
        self._single.close()


def _claims(kind: ChunkKind, way: _Way, both: BothSides) -> list[Claim]:
    name, alone = f"disk {way.title}, {kind.name} chunks", f"disk {way.title} by one thread, {kind.name} chunks"
    promise = beside(name, "x", way.note) if kind.bar is None else at_least(name, kind.bar, "x", way.note)
    claims = [promise.of_ratio(ratio(both.own[way.plain], both.own[way.rank]))]
    if both.peer:
        found = ratio(both.peer[way.plain], both.peer[way.rank])
        claims.append(beside(f"LMCache's {name}", "x", way.note).of_ratio(found))
    claims.append(beside(alone, "x", way.note).of_ratio(ratio(both.own[way.plain], both.own[way.single])))
    return claims
