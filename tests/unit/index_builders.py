"""Short ways to build and drive a `CacheIndex` in tests."""

from collections.abc import Iterable, Sequence

from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import ChunkRef, StorePlan
from lmcache_ray.index.policy import make_policy
from lmcache_ray.index.slot_table import SlotState
from lmcache_ray.index.store_planning import TiersBelow


def make_index(
    num_slots: int,
    holders: Sequence[int] = (0, 1),
    policy: str = "LRU",
    epoch: int = 1,
    below: TiersBelow | None = None,
) -> CacheIndex:
    """An empty index whose calls (stores and loads) last 10 seconds and other leases 100."""
    return CacheIndex(
        num_slots,
        holders,
        make_policy(policy),
        epoch=epoch,
        call_timeout_s=10.0,
        lease_timeout_s=100.0,
        below=below,
    )


def keys_of(text: str) -> list[bytes]:
    """One key a letter."""
    return [letter.encode() for letter in text]


def names(refs: Iterable[ChunkRef]) -> str:
    """The letters that refs stand for."""
    return b"".join(ref.key for ref in refs).decode()


def finish(index: CacheIndex, plan: StorePlan) -> StorePlan:
    """Every holder commits every chunk."""
    index.complete_store(plan.plan_id, index.holders, done=range(len(plan.refs)))
    return plan


def store(index: CacheIndex, text: str, now: float = 0.0) -> StorePlan:
    """Plan a store and carry it out."""
    return finish(index, index.prepare_store(keys_of(text), client="writer", now=now))


def contents(index: CacheIndex, state: SlotState = SlotState.READY) -> str:
    """The letters in one state, next victim first."""
    return names(ref for ref, its_state in index.entries() if its_state is state)
