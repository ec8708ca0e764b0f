"""Short ways to build and drive a `TieredIndex` in tests."""

from collections.abc import Collection, Sequence

from lmcache_ray.index.plans import ChunkRef, Deferred, StorePlan
from lmcache_ray.tiers.backlog import Backlog
from lmcache_ray.tiers.promotion import Promotion, complete_promotion, plan_promotion
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import EVERYWHERE, TieredIndex
from lmcache_ray.tiers.write_behind import DiskWrites, complete_disk_writes, next_disk_writes
from tests.unit.index_builders import contents, keys_of, make_index, names

DISK_EPOCH = 5
MUCH = 1000
PIN_S = 10.0


def make_tiers(
    num_slots: int,
    disk_slots: int | None = None,
    *,
    has_remote: bool = False,
    keeps: bool = True,
    holders: Sequence[int] = (0, 1),
    policy: str = "LRU",
) -> TieredIndex:
    """Memory above a disk that has been opened and is empty, and above a remote store, if they are asked for."""
    lower = {Tier.DISK: disk_slots is not None, Tier.REMOTE: has_remote}
    backlogs = {tier: Backlog() for tier, is_there in lower.items() if is_there}
    tiers = TieredIndex(
        lambda below: make_index(num_slots, holders, policy, below=below), backlogs=backlogs, keeps_in_memory=keeps
    )
    if disk_slots is not None:
        tiers.disk = make_index(disk_slots, holders, policy, epoch=DISK_EPOCH)
    return tiers


def store(tiers: TieredIndex, text: str, *, now: float = 0.0, start: int = 0) -> StorePlan:
    """Store one key a letter: every rank writes what is planned."""
    plan = tiers.prepare_store(keys_of(text), client="writer", now=now, start=start, rank=None, patient=False)
    assert isinstance(plan, StorePlan)
    tiers.complete_store(plan.plan_id, tiers.memory.holders, done=range(len(plan.refs)))
    tiers.check_integrity()
    return plan


def all_good(tiers: TieredIndex, refs: Sequence[ChunkRef]) -> dict[int, list[bool]]:
    """Every rank has done every chunk."""
    return {rank: [True] * len(refs) for rank in tiers.memory.holders}


def write_down(tiers: TieredIndex, *, now: float = 0.0) -> DiskWrites | None:
    """Everything that waits for the disk is written there by every rank."""
    writes = next_disk_writes(tiers, most=MUCH, now=now)
    if writes is not None:
        assert complete_disk_writes(tiers, writes, all_good(tiers, writes.targets)) == ()
    tiers.check_integrity()
    return writes


def plan_up(
    tiers: TieredIndex,
    text: str,
    found: str = "",
    *,
    lease_id: str = "load",
    client: str = "reader",
    now: float = 0.0,
    whole: bool = False,
) -> Promotion[str] | Deferred:
    """Plan bringing a prompt up; the letters of `found` are in the remote store."""
    remote = {key: f"remote {key.decode()}" for key in keys_of(found)}
    return plan_promotion(
        tiers, keys_of(text), remote, lease_id=lease_id, client=client, now=now, timeout_s=PIN_S, whole=whole
    )


def planned_up(tiers: TieredIndex, text: str, found: str = "", *, lease_id: str = "load") -> Promotion[str]:
    """The same, where it is known to succeed."""
    promotion = plan_up(tiers, text, found, lease_id=lease_id)
    assert not isinstance(promotion, Deferred)
    tiers.check_integrity()
    return promotion


def complete(
    tiers: TieredIndex,
    promotion: Promotion[str],
    flags: dict[int, list[bool]] | None = None,
    *,
    gone: Collection[int] = (),
    now: float = 0.0,
) -> list[ChunkRef]:
    """Report a promotion, by default that every rank has filled every chunk."""
    if flags is None:
        flags = all_good(tiers, promotion.refs)
    lost = complete_promotion(tiers, promotion, flags, gone=gone, now=now, timeout_s=PIN_S)
    tiers.check_integrity()
    return lost


def bring_up(tiers: TieredIndex, text: str, *, lease_id: str = "load") -> str:
    """Promote a prompt: the letters that were read."""
    promotion = planned_up(tiers, text, lease_id=lease_id)
    complete(tiers, promotion)
    return names(promotion.refs)


def load(tiers: TieredIndex, text: str, *, lease_id: str = "load", start: int = 0, now: float = 0.0) -> str:
    """Plan a load: the letters that are read."""
    plan = tiers.prepare_load(keys_of(text), lease_id=lease_id, client="reader", now=now, start=start)
    tiers.check_integrity()
    return names(plan.refs)


def lookup(
    tiers: TieredIndex, text: str, lease_id: str | None = None, within: Collection[Tier] = EVERYWHERE
) -> int:
    """Look a prompt up."""
    num_cached = tiers.lookup(keys_of(text), lease_id, client="reader", now=0.0, tiers=within)
    tiers.check_integrity()
    return num_cached


def where(tiers: TieredIndex, text: str, within: Collection[Tier] = EVERYWHERE) -> str:
    """The tiers of the leading keys, a letter each."""
    return "".join(tier.value[0] for tier in tiers.run(keys_of(text), within))


def in_memory(tiers: TieredIndex) -> str:
    """The letters that are READY in memory, next victim first."""
    return contents(tiers.memory)


def on_disk(tiers: TieredIndex) -> str:
    """The letters that every rank has on its disk, next victim first."""
    assert tiers.disk is not None
    return contents(tiers.disk)


def waiting(tiers: TieredIndex, tier: Tier = Tier.DISK) -> str:
    """The letters that wait for a tier below, or are on their way to it, in slot order."""
    table = tiers.memory.table
    return names(table.refs([slot for slot in range(table.capacity) if slot in tiers.backlogs[tier]]))


def below_only(text: str, num_slots: int = 4, disk_slots: int = 8) -> TieredIndex:
    """These are on the disk, and nothing is in memory."""
    tiers = make_tiers(num_slots, disk_slots)
    for begin in range(0, len(text), num_slots):
        store(tiers, text[: begin + num_slots])
        write_down(tiers)
        clear_memory(tiers)
    assert (in_memory(tiers), sorted(on_disk(tiers))) == ("", sorted(text))
    return tiers


def clear_memory(tiers: TieredIndex, text: str | None = None) -> str:
    """Clear memory on every rank: the letters that went."""
    plan = tiers.clear_memory(None if text is None else keys_of(text))
    for rank in tiers.memory.holders:
        tiers.memory.complete_clear(plan.plan_id, rank)
    tiers.check_integrity()
    return names(plan.refs)
