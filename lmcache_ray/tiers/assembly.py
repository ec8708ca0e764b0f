"""Putting the tiers of a world together from their values: the same parts in one process and in a cluster.

The index side of it runs where the index is, the rank side in each rank's process; both open the remote store.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from lmcache_ray.errors import CapacityError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.policy import make_policy
from lmcache_ray.index.store_planning import TiersBelow
from lmcache_ray.index_service import IndexService
from lmcache_ray.layout import WorldLayout
from lmcache_ray.storage.backends import open_backend
from lmcache_ray.storage.disk_space import chunk_file_nbytes, disk_capacity
from lmcache_ray.storage.guarded import GuardedBackend
from lmcache_ray.storage.remote import RemoteChunks, RemoteStore
from lmcache_ray.storage.serde import make_serde
from lmcache_ray.tiers.backlog import Backlog
from lmcache_ray.tiers.calls import TierRanks
from lmcache_ray.tiers.disk_tier import DiskTier
from lmcache_ray.tiers.remote_tier import RemoteTier
from lmcache_ray.tiers.spec import RemoteSpec, Tier, TierSpec, masked
from lmcache_ray.tiers.tier_service import TierService
from lmcache_ray.tiers.tiered_index import TieredIndex

_DISK_NBYTES_AT_ONCE: Final = 64 * 2**20
_REMOTE_NBYTES_AT_ONCE: Final = 16 * 2**20
_OBJECT_NBYTES: Final = 2048  # more than an object's head takes, or a manifest
_MOST_AT_ONCE: Final = 512  # chunks of one call to a rank: its message stays small


class MakeIndex(Protocol):
    """Makes an index of one tier of a world, empty."""

    def __call__(self, num_slots: int, epoch: int, below: TiersBelow | None = None) -> CacheIndex:
        """With so many slots; `below` is what memory's must know of the tiers below it."""
        ...


def index_maker(
    holders: Sequence[int], cache_policy: str, *, call_timeout_s: float, lease_timeout_s: float
) -> MakeIndex:
    """Makes the indexes of a world whose chunks the ranks `holders` hold; every tier evicts by the same policy."""

    def make(num_slots: int, epoch: int, below: TiersBelow | None = None) -> CacheIndex:
        return CacheIndex(
            num_slots,
            holders,
            make_policy(cache_policy),
            epoch=epoch,
            call_timeout_s=call_timeout_s,
            lease_timeout_s=lease_timeout_s,
            below=below,
        )

    return make


def check_disk_limit(spec: TierSpec, layout: WorldLayout) -> None:
    """Raises `CapacityError` if the disk's limit has no room for one chunk of some rank."""
    if spec.disk is None:
        return
    for rank in layout.holders:
        if disk_capacity(spec.disk.max_nbytes, layout, rank) < 1:
            raise CapacityError(
                f"max_local_disk_size comes to {spec.disk.max_nbytes} bytes, which is too small for one chunk of rank "
                f"{rank}: its file takes {chunk_file_nbytes(layout, rank)} bytes, beside the directories"
            )


def check_remote(spec: RemoteSpec | None) -> None:
    """Raises `ConfigError` if this process cannot use a remote store of that URL or serde. Connects to nothing."""
    if spec is not None:
        open_backend(spec.url, timeout_s=spec.timeout_s).close()
        make_serde(spec.serde)


def tiered_index(spec: TierSpec, make_memory: Callable[[TiersBelow | None], CacheIndex]) -> TieredIndex:
    """The index of a world with these tiers. Its disk is empty until it has been opened."""
    lower = {Tier.DISK: spec.disk, Tier.REMOTE: spec.remote}
    backlogs = {tier: Backlog() for tier, chosen in lower.items() if chosen is not None}
    return TieredIndex(make_memory, backlogs=backlogs, keeps_in_memory=spec.keeps_in_memory)


def open_remote(spec: RemoteSpec | None, layout: WorldLayout, *, scope: bytes, origin: str) -> RemoteStore | None:
    """The world's chunks in its remote store, if it has one.

    `scope` names the model, and `origin` this life of the cluster. Raises `ConfigError` for a URL or serde that cannot
    be used here; a store that is absent is no error.
    """
    if spec is None:
        return None
    backend = GuardedBackend(
        open_backend(spec.url, timeout_s=spec.timeout_s),
        timeout_s=spec.timeout_s,
        clock=time.monotonic,
        place=f"the remote store {masked(spec.url)}",
    )
    chunks = RemoteChunks(
        backend,
        prefix=spec.prefix,
        scope=f"{scope.hex()[:32]}-{layout.fingerprint.hex()[:32]}",
        serde=make_serde(spec.serde),
        layout=layout,
        origin=origin,
    )
    return RemoteStore(chunks, backend)


def tier_service(
    spec: TierSpec,
    service: IndexService,
    ranks: TierRanks,
    layout: WorldLayout,
    *,
    make_index: MakeIndex,
    remote: RemoteStore | None,
    call_timeout_s: float,
    settle: Callable[[], None] = lambda: None,
) -> TierService:
    """What moves the chunks of a world between its tiers. Without tiers below memory it does nothing, for nobody.

    `settle`: see `TierService`.
    """
    slot_nbytes = max((layout.ranks[rank].slot_nbytes for rank in layout.holders), default=1)
    disk_tier: DiskTier | None = None
    remote_tier: RemoteTier | None = None
    if spec.disk is not None:
        disk_tier = DiskTier(
            service,
            ranks,
            make_index,
            chunks_at_once=min(_MOST_AT_ONCE, max(1, _DISK_NBYTES_AT_ONCE // slot_nbytes)),
            timeout_s=call_timeout_s,
            clock=time.monotonic,
        )
    if spec.remote is not None and remote is not None:
        remote_tier = RemoteTier(
            service,
            ranks,
            remote,
            max_nbytes=spec.remote.max_nbytes,
            chunk_nbytes=_most_remote_nbytes(layout),
            chunks_at_once=min(_MOST_AT_ONCE, max(1, _REMOTE_NBYTES_AT_ONCE // slot_nbytes)),
            timeout_s=call_timeout_s,
            clock=time.monotonic,
        )
    return TierService(
        service,
        disk=disk_tier,
        remote=remote_tier,
        call_timeout_s=call_timeout_s,
        clock=time.monotonic,
        settle=settle,
    )


def _most_remote_nbytes(layout: WorldLayout) -> int:
    """What the objects of one chunk take in a store at most: some round lengths up, by a quarter or so."""
    sizes = [layout.ranks[rank].slot_nbytes for rank in layout.holders]
    return sum(nbytes + nbytes // 4 + _OBJECT_NBYTES for nbytes in sizes) + _OBJECT_NBYTES
