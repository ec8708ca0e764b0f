"""Writing and reading chunk files, as a share of plain Python's speed with as many bytes in files of the same names."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.claims import Claim, Part, at_least, beside
from benchmarks.disk_parts import plain
from benchmarks.engine_parts.turns import BothSides, in_turns
from benchmarks.measure import Json, Samples, interleaved, progress, ratio
from benchmarks.peers.child import PeerProcess
from benchmarks.workload import CHUNK_SIZE
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.layout import Placement, ShardSpec, WorldLayout, uniform_world
from lmcache_ray.storage.directory_lock import DirectoryOwner
from lmcache_ray.storage.disk import RankDisk
from lmcache_ray.storage.disk_names import StoredChunk, chunk_path

_OWNER = DirectoryOwner("benchmarks", "disk", "one life")
_ROUNDS_PER_TURN = 2  # one forwards and one backwards
_PLAIN = {"write": plain.WRITE, "read": plain.READ}
_NOTES = {"write": "of open().write() and rename, same bytes", "read": "of open().readinto(), same bytes"}


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


def open_disk(root: Path, layout: WorldLayout) -> RankDisk:
    """The directory of the one rank."""
    return RankDisk.open(root, owner=_OWNER, layout=layout, rank=0, max_nbytes=2**40)


def chunks_of(count: int, first: int = 0) -> list[StoredChunk]:
    """Chunks with keys of their own."""
    return [StoredChunk(hashlib.sha256(b"%d" % number).digest(), number) for number in range(first, first + count)]


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
    return Part(_claims(kind, both), measured)


class _ChunkCases:
    """One arena's worth of slots, each with a chunk of its own to write and one to read."""

    def __init__(self, kind: ChunkKind, folder: Path) -> None:
        layout = kind.layout
        self._memory = plain.slots(kind.count, layout.ranks[0].slot_nbytes)
        self.nbytes = self._memory.nbytes
        self._disk = open_disk(folder / "ours", layout)
        self._disk.inventory()
        self._kept = chunks_of(kind.count)
        self._written = chunks_of(kind.count, first=kind.count)
        self._plain = plain.PlainFiles(folder / "plain", [chunk_path(chunk) for chunk in self._kept], self._memory)
        self._plain.make()
        self._write_all(self._kept)

    def check(self) -> None:
        """Every chunk comes back as it was. RuntimeError if not."""
        before = self._memory.copy()
        self._memory[:] = 0
        self._read()
        if not np.array_equal(before, self._memory):
            raise RuntimeError("other bytes were read than had been written")

    def rounds(self) -> dict[str, Samples]:
        """The rounds of one turn."""
        return interleaved(
            {
                plain.WRITE: self._plain.write,
                "write": lambda: self._write_all(self._written),
                plain.READ: self._plain.read,
                "read": self._read,
            },
            rounds=_ROUNDS_PER_TURN,
            warmup=0,
            before={plain.WRITE: self._plain.remove, "write": lambda: self._disk.delete(self._written)},
        )

    def close(self) -> None:
        """Let the directory go."""
        self._disk.close()

    def _write_all(self, chunks: list[StoredChunk]) -> None:
        for chunk, slot in zip(chunks, self._memory, strict=True):
            if not self._disk.write(chunk, CHUNK_SIZE, slot, lambda: True):
                raise RuntimeError("a chunk was refused")

    def _read(self) -> None:
        for chunk, slot in zip(self._kept, self._memory, strict=True):
            result = self._disk.read_into(chunk, slot)
            if result.fault is not None:
                raise RuntimeError(f"a chunk was not read: {result.fault}")


def _claims(kind: ChunkKind, both: BothSides) -> list[Claim]:
    claims = []
    for case, of_plain in _PLAIN.items():
        name = f"disk {case}, {kind.name} chunks"
        promise = beside(name, "x", _NOTES[case]) if kind.bar is None else at_least(name, kind.bar, "x", _NOTES[case])
        claims.append(promise.of_ratio(ratio(both.own[of_plain], both.own[case])))
        if case in both.peer:
            found = ratio(both.peer[of_plain], both.peer[case])
            claims.append(beside(f"LMCache's {name}", "x", _NOTES[case]).of_ratio(found))
    return claims
