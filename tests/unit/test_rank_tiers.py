"""One rank's part in the tiers, called directly: what it answers when something comes between."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lmcache_ray.arena.slots import ArenaSlots
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.shard import EngineShard
from lmcache_ray.storage.directory_lock import DirectoryOwner
from lmcache_ray.tiers.calls import ChunkOutcome, RankAnswer, TierCall
from lmcache_ray.tiers.rank_tiers import RankTiers
from lmcache_ray.tiers.spec import DiskSpec
from tests.unit.stored_chunks import CHUNK_SIZE, chunk_of, layout_of, slot_of

LAYOUT = layout_of()
SOURCES = [ChunkRef(chunk_of(number).key, slot, 1 + slot) for slot, number in enumerate((1, 2))]
TARGETS = [ChunkRef(ref.key, 0, 100 + ref.generation) for ref in SOURCES]


class InterruptedSlots(ArenaSlots):
    """Slots in which `interrupt` happens once, when a chunk has just been looked at."""

    interrupt: Callable[[], None] | None = None

    def chunk(self, slot: int, generation: int, key: bytes) -> npt.NDArray[np.uint8] | None:
        data = super().chunk(slot, generation, key)
        interrupt, self.interrupt = self.interrupt, None
        if interrupt is not None:
            interrupt()
        return data


def write_down(root: Path, interrupt: Callable[[EngineShard], None]) -> tuple[RankAnswer, list[str]]:
    """Store two chunks and write them to disk: the answer, and the keys that have files then."""
    geometry = ArenaGeometry(2, LAYOUT.ranks[0].slot_nbytes)
    slots = InterruptedSlots(memoryview(bytearray(geometry.file_nbytes)), geometry)
    shard = EngineShard(slots)
    disk = DiskSpec(str(root), 2**20)
    tiers = RankTiers(shard, LAYOUT, 0, disk=disk, owner=DirectoryOwner("tests", "rank", "life"), remote=None)
    try:
        tiers.run(TierCall("open_disk"))
        payload = np.array([slot_of(number, LAYOUT, 0) for number in (1, 2)])
        assert shard.take_in(SOURCES, payload, [CHUNK_SIZE] * 2) == [True, True]
        slots.interrupt = lambda: interrupt(shard)
        answer = tiers.run(TierCall("write_disk", (SOURCES, TARGETS, ())))
    finally:
        tiers.close()
    return answer, sorted(path.name.partition(".")[0] for path in root.glob("**/*.kv"))


def test_a_slot_that_is_cleared_and_used_again_as_it_is_read_is_left_out(tmp_path: Path) -> None:
    """Between the look at a slot and the look at its record the chunk is cleared, and another one stored there."""

    def use_both_again(shard: EngineShard) -> None:
        shard.free(SOURCES)
        others = [ChunkRef(chunk_of(number).key, slot, 50 + slot) for slot, number in enumerate((3, 4))]
        shard.take_in(others, np.array([slot_of(number, LAYOUT, 0) for number in (3, 4)]), [1, 1])

    answer, files = write_down(tmp_path, use_both_again)
    assert answer == RankAnswer(bytes([ChunkOutcome.NOT_DONE] * 2)), "nothing is wrong with the disk"
    assert files == []


def test_an_error_that_nobody_foresaw_is_an_answer(tmp_path: Path) -> None:
    """Else the rank would count as silent, and whoever asked would wait for it."""

    def fail(shard: EngineShard) -> None:
        raise ZeroDivisionError("a fault of the program")

    answer, _ = write_down(tmp_path, fail)
    assert answer == RankAnswer(problem="ZeroDivisionError: a fault of the program")
