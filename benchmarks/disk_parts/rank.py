"""Writing and reading chunk files as a rank does it: a call for many chunks, out of its arena and into it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.disk_parts.plain import give_back
from benchmarks.disk_parts.single import OWNER, chunks_of
from benchmarks.workload import CHUNK_SIZE
from lmcache_ray.arena.private import PrivateArena
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.layout import WorldLayout
from lmcache_ray.shard import EngineShard
from lmcache_ray.storage.disk_names import StoredChunk, chunk_path
from lmcache_ray.tiers.calls import TierCall
from lmcache_ray.tiers.rank_tiers import RankTiers
from lmcache_ray.tiers.spec import DiskSpec

_PATIENCE_S = 3600.0


class RankChunks:
    """A rank's arena, full of chunks that are on its disk too. `retrieve` reads these, `store` writes further ones."""

    def __init__(self, root: Path, layout: WorldLayout, count: int) -> None:
        self._keys = [chunk.key for chunk in chunks_of(count)]
        self._arena = PrivateArena(ArenaGeometry(count, layout.ranks[0].slot_nbytes))
        shard = EngineShard(self._arena.slots)
        content = np.random.default_rng(0).integers(0, 256, layout.ranks[0].slot_nbytes, dtype=np.uint8)

        def fill(position: int, data: np.ndarray) -> int:
            data[:] = np.roll(content, position)
            return CHUNK_SIZE

        self._in_memory = self._chunks(generation=1)
        if not all(shard.fill(self._in_memory, fill)):
            raise RuntimeError("the arena refused a chunk")
        disk = DiskSpec(str(root.resolve()), 2**40)
        self._tiers = RankTiers(shard, layout, 0, disk=disk, owner=OWNER, remote=None)
        self._directory = Path(self._tiers.run(TierCall("open_disk")).found.directory)
        self._kept = self._written = self._chunks(generation=1)
        self._copy("write_disk", self._in_memory, self._kept, ())

    @property
    def slots(self) -> Sequence[np.ndarray]:
        """The arena's slots, one a chunk."""
        return [self._arena.slots.data(ref.slot) for ref in self._in_memory]

    def store(self) -> None:
        """Every chunk of the arena to a new file."""
        self._written = self._chunks(self._written[0].generation + 1)
        self._copy("write_disk", self._in_memory, self._written, ())

    def clear(self) -> None:
        """Give back the space of what was stored last."""
        if self._written is not self._kept:
            give_back(self._directory / chunk_path(StoredChunk(ref.key, ref.generation)) for ref in self._written)

    def retrieve(self) -> None:
        """Every chunk from its file into its slot."""
        self._in_memory = self._chunks(self._in_memory[0].generation + 1)
        self._copy("read_disk", self._in_memory, self._kept, _PATIENCE_S)

    def close(self) -> None:
        """Let directory and memory go."""
        self._tiers.close()
        self._arena.close()

    def _chunks(self, generation: int) -> list[ChunkRef]:
        return [ChunkRef(key, slot, generation) for slot, key in enumerate(self._keys)]

    def _copy(self, call: str, *arguments: object) -> None:
        answer = self._tiers.run(TierCall(call, arguments))
        if not all(answer.done):
            raise RuntimeError(f"{call}: {answer.done.count(False)} chunks were not copied ({answer.problem})")
