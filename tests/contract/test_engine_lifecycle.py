"""The life-cycle scenarios against the in-process index."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from lmcache_ray.arena.arena import Arena
from lmcache_ray.arena.spec import ArenaGeometry, ArenaSpec
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.policy import make_policy
from lmcache_ray.index_service import IndexService
from lmcache_ray.layout import WorldLayout
from lmcache_ray.shard import EngineShard
from lmcache_ray.tiers.local_index import LocalIndex
from lmcache_ray.tiers.tier_service import TierService
from lmcache_ray.tiers.tiered_index import TieredIndex
from tests.contract.lifecycle_suite import LifecycleSuite, MakeWorld


class InProcessWorld:
    """An index in this process over real arenas."""

    def __init__(self, layout: WorldLayout, num_slots: int, arenas: Mapping[int, Arena]) -> None:
        self.layout = layout
        self.shards = {rank: EngineShard(arena.slots) for rank, arena in arenas.items()}
        index = CacheIndex(
            num_slots, layout.holders, make_policy("LRU"), epoch=1, call_timeout_s=600, lease_timeout_s=600
        )
        tiers = TieredIndex.of_memory(index)
        self._service = IndexService(tiers, clock=time.monotonic, free_slots=self._free_slots)
        self._tiers = TierService(self._service, disk=None, remote=None, call_timeout_s=600, clock=time.monotonic)

    def _free_slots(self, ranks: Sequence[int], refs: Sequence[ChunkRef]) -> Sequence[int]:
        for rank in ranks:
            self.shards[rank].free(refs)
        return ranks

    def client(self, name: str) -> LocalIndex:
        return LocalIndex(self._service, self._tiers, name, timeout_s=600)

    def check_idle(self) -> None:
        with self._service.at_now() as (index, _):
            index.check_integrity()
            counts = index.memory.counts()
            cached = {(ref.key, ref.slot, ref.generation) for ref, _ in index.memory.entries()}
        assert (counts.leases, counts.plans, counts.writing, counts.quarantined) == (0, 0, 0, 0)
        for shard in self.shards.values():
            shard.slots.check_integrity()
            held = {(chunk.key, chunk.slot, chunk.generation) for chunk in shard.slots.committed()}
            assert cached == held, "every READY chunk lies where the index says, on every holder"


class TestInProcess(LifecycleSuite):
    @pytest.fixture
    def make_world(self, tmp_path: Path) -> Iterator[MakeWorld]:
        with ExitStack() as opened:

            def make(layout: WorldLayout, num_slots: int) -> InProcessWorld:
                arenas = {}
                for rank in layout.holders:
                    geometry = ArenaGeometry(num_slots, layout.ranks[rank].slot_nbytes)
                    spec = ArenaSpec("test", "life", rank, layout.world_size, layout.fingerprint, geometry)
                    arenas[rank] = opened.enter_context(Arena.create(spec, tmp_path, node_id="n", now=time.time()))
                return InProcessWorld(layout, num_slots, arenas)

            yield make
