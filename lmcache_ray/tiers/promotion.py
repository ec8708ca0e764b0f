"""Bringing chunks up into memory: which to read, from which tier, into which slots. Pure.

A promotion is a store whose writers are the ranks' disks, or their remote store, in place of an engine's KV. It is
planned whole for every prompt but the first of a call, so that prompts that are promoted together are pinned together.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Generic, TypeVar

from lmcache_ray.index.plans import ChunkRef, Deferred, StorePlan
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import EVERYWHERE, TieredIndex

TIERS_CLIENT: Final = "tiers"
"""The client name under which chunks are moved between tiers."""

Remote = TypeVar("Remote")
"""What names a chunk in a remote store: nothing here looks into it."""


@dataclass(frozen=True, slots=True)
class Promotion(Generic[Remote]):
    """Chunks to fill memory's `refs` with: number i is read from the disk's ``disk[i]`` or the remote's ``remote[i]``.

    `keys` are the leading keys of the prompt that are, or will be, in memory; they are pinned under `lease_id`.
    """

    plan_id: int
    keys: Sequence[bytes]
    refs: tuple[ChunkRef, ...]
    disk: Mapping[int, ChunkRef]
    remote: Mapping[int, Remote]
    lease_id: str
    client: str

    @property
    def disk_lease_id(self) -> str:
        """The lease under which the disk's chunks are read."""
        return f"promotion/{self.plan_id}"


def plan_promotion(
    index: TieredIndex,
    keys: Sequence[bytes],
    found: Mapping[bytes, Remote],
    *,
    lease_id: str,
    client: str,
    now: float,
    timeout_s: float,
    whole: bool,
) -> Promotion[Remote] | Deferred:
    """Pin the leading cached chunks of `keys` in memory, and reserve slots there for those that lie below.

    `found` are chunks of the remote store. Without `whole` the leading part that fits is promoted; with it all of the
    run or nothing: Deferred, and no lease. Whoever carries it out reports by `complete_promotion`, in any case. Of
    chunks that others are bringing up it waits for no longer than until `stop_waiting`; as they come, they are pinned.
    """
    table = index.memory.table
    run = []
    for key in keys[: table.capacity]:
        if key not in table.slot_of and not index.is_on_disk(key) and key not in found:
            break
        run.append(key)
    index.memory.hold(run, lease_id, client, now, timeout_s=timeout_s)

    def store(all_of_it: bool) -> StorePlan | Deferred:
        return index.memory.try_store(run, client=TIERS_CLIENT, now=now, whole=whole or all_of_it, copy_up=True)

    plan = index.with_room(store, waits_for=EVERYWHERE if whole else ())
    if isinstance(plan, Deferred):
        index.release(lease_id)
        return plan
    readable = None if index.is_disk_away else index.disk
    on_disk = {} if readable is None else {ref.key: ref for ref in map(readable.table.ready_ref, run) if ref}
    disk = {at: on_disk[ref.key] for at, ref in enumerate(plan.refs) if ref.key in on_disk}
    remote = {at: found[ref.key] for at, ref in enumerate(plan.refs) if at not in disk}
    promotion = Promotion(plan.plan_id, run, plan.refs, disk, remote, lease_id, client)
    if index.disk is not None:
        read = [ref.key for ref in disk.values()]
        index.disk.hold(read, promotion.disk_lease_id, TIERS_CLIENT, now, timeout_s=timeout_s)
    index.trim()
    if is_coming_up(index, run):
        index.awaiting[lease_id] = (run, client)
    index.coming_up.update({ref.generation: Tier.DISK for at, ref in enumerate(plan.refs) if at in disk})
    index.coming_up.update({ref.generation: Tier.REMOTE for at, ref in enumerate(plan.refs) if at in remote})
    return promotion


def complete_promotion(
    index: TieredIndex,
    promotion: Promotion[Remote],
    flags: Mapping[int, Sequence[bool]],
    *,
    gone: Collection[int],
    now: float,
    timeout_s: float,
) -> list[ChunkRef]:
    """Take in which chunks each rank has filled, and which are `gone` from the disk: the disk refs that are forgotten.

    The leading chunks that are in memory now stay pinned, also for those who wait for them. Ranks without flags have
    still to answer.
    """
    for rank, filled in flags.items():
        done = [at for at, flag in enumerate(filled) if flag]
        failed = [at for at, flag in enumerate(filled) if not flag]
        index.complete_store(promotion.plan_id, [rank], done=done, failed=failed)
    lost: list[ChunkRef] = []
    if index.disk is not None:
        index.disk.release(promotion.disk_lease_id)
        lost = index.disk.evict([promotion.disk[at] for at in gone if at in promotion.disk], even_leased=True)
    _pin(index, promotion.keys, promotion.lease_id, promotion.client, now, timeout_s)
    for lease_id, (keys, client) in index.awaiting.items():
        _pin(index, keys, lease_id, client, now, timeout_s)
    for ref in promotion.refs:
        index.coming_up.pop(ref.generation, None)
    index.trim()
    return lost


def is_coming_up(index: TieredIndex, keys: Sequence[bytes]) -> bool:
    """Whether some of `keys` are being brought into memory from below."""
    table = index.memory.table
    return any(table.generation_of[table.slot_of[key]] in index.coming_up for key in keys if table.is_writing(key))


def stop_waiting(index: TieredIndex, promotion: Promotion[Remote]) -> None:
    """Nobody waits any more for what others were bringing up of this prompt."""
    index.awaiting.pop(promotion.lease_id, None)


def _pin(
    index: TieredIndex, keys: Sequence[bytes], lease_id: str, client: str, now: float, timeout_s: float
) -> None:
    """Pin those of `keys` that are in memory, up to the first that is neither there nor on its way."""
    run = takewhile(index.memory.table.slot_of.__contains__, keys)
    index.memory.hold(run, lease_id, client, now, timeout_s=timeout_s)
