"""What outlives a coordinator: an epoch that only rises, who was where, and clears that somebody has missed."""

from cluster.record import ClusterRecord, MissedClear
from cluster.topology import RankPlace
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.tiers.spec import Tier

HERE = RankPlace(1, 0, 2, "here")


def ref(key: bytes, generation: int, slot: int = 0) -> ChunkRef:
    return ChunkRef(key, slot, generation)


def test_the_epoch_rises_with_every_start_and_every_life_and_only_a_life_remembers() -> None:
    record = ClusterRecord().next_start().with_start(1, HERE, 7).with_clear(MissedClear(5, None))
    assert record.next_life().epoch == 2 and record.next_life().places == {1: HERE}
    assert record.next_life().clears == record.clears
    assert record.next_start() == ClusterRecord(epoch=2)


def test_starts_of_a_rank_are_counted_by_process() -> None:
    record = ClusterRecord().with_start(1, HERE, 7)
    assert record.with_start(1, HERE, 7) is record
    assert record.with_start(1, HERE, 8).starts[1].number == 2
    assert record.with_start(1, RankPlace(1, 0, 1, "there"), 7).starts[1].number == 2, "pids of two nodes may be equal"


def test_a_missed_clear_covers_its_keys_in_what_was_there_before_it() -> None:
    record = ClusterRecord().with_clear(MissedClear(10, frozenset((b"a",)), frozenset(((3, 9),))))
    assert record.is_cleared(ref(b"a", 9)) and not record.is_cleared(ref(b"b", 9))
    assert not record.is_cleared(ref(b"a", 10)), "stored after the clear"
    assert not record.is_cleared(ref(b"a", 9, slot=3)), "it was leased, and stayed"
    assert record.is_cleared_on_disk(b"a") and not record.is_cleared_on_disk(b"b")


def test_a_clear_of_one_tier_leaves_the_other() -> None:
    of_memory = ClusterRecord().with_clear(MissedClear(10, None, tiers=(Tier.CPU,)))
    of_disk = ClusterRecord().with_clear(MissedClear(10, None, tiers=(Tier.DISK,)))
    assert of_memory.is_cleared(ref(b"a", 9)) and not of_memory.is_cleared_on_disk(b"a")
    assert not of_disk.is_cleared(ref(b"a", 9)) and of_disk.is_cleared_on_disk(b"a")


def test_a_clear_of_everything_stands_for_those_before_it_and_those_done_are_forgotten() -> None:
    one, everything = MissedClear(5, frozenset((b"a",))), MissedClear(9, None)
    record = ClusterRecord().with_clear(one).with_clear(everything)
    assert record.clears == (everything,)
    assert record.without([everything]).clears == () and not record.without([everything]).is_cleared(ref(b"a", 1))
