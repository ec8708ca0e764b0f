"""Random operations on memory and disk as one index, carried out by simulated ranks that fail, against what they hold.

Each rank's memory is a dict from slots to what was last committed there, its disk a set of files. The ranks decide
nothing, as the real ones do, and every call to them may fail, for some chunks or all. What the index calls cached must
be there on every rank, and nothing may be held back for ever.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from lmcache_ray.index.plans import ChunkRef, Deferred, StorePlan
from lmcache_ray.index.policy import POLICIES
from lmcache_ray.tiers.promotion import Promotion, complete_promotion, plan_promotion, stop_waiting
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.write_behind import (
    DiskWrites,
    complete_disk_writes,
    complete_remote_writes,
    next_disk_writes,
    next_remote_writes,
)
from tests.unit.tier_builders import PIN_S, make_tiers

HOLDERS = (0, 1)
NUM_SLOTS, NUM_FILES = 8, 12
CLIENTS = ("red", "blue")
LEASES = tuple("xyz")

File = tuple[bytes, int]


@dataclass
class Rank:
    """One rank's bytes. A generation that was dropped here is never committed any more."""

    memory: dict[int, ChunkRef] = field(default_factory=dict)
    files: set[File] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)

    def commit(self, ref: ChunkRef) -> bool:
        """Write the slot, unless the plan is out of date."""
        there = self.memory.get(ref.slot)
        if ref.generation in self.dropped or (there is not None and there.generation > ref.generation):
            return False
        self.memory[ref.slot] = ref
        return True

    def drop(self, refs: Iterable[ChunkRef]) -> None:
        """None of these is here now, or will be."""
        for ref in refs:
            self.dropped.add(ref.generation)
            if self.memory.get(ref.slot) == ref:
                del self.memory[ref.slot]


class Simulation:
    """An index over simulated ranks. What others would do at the same time stands in `storing`, `writing`, `rising`."""

    def __init__(self, policy: str, seed: int, *, keeps: bool) -> None:
        self.rng = random.Random(seed)
        self.keeps = keeps
        self.tiers = make_tiers(NUM_SLOTS, NUM_FILES, has_remote=True, keeps=keeps, holders=HOLDERS, policy=policy)
        assert self.tiers.disk is not None
        self.disk = self.tiers.disk
        self.memory = self.tiers.memory
        self.ranks = {rank: Rank() for rank in HOLDERS}
        self.remote: set[bytes] = set()
        self.now = 0.0
        self.storing: list[StorePlan] = []
        self.writing: DiskWrites | None = None
        self.putting: tuple[ChunkRef, ...] = ()
        self.rising: list[Promotion[bytes]] = []
        self.lost: set[File] = set()
        self.num_seen = dict.fromkeys(Tier, 0)

    # -- chance -------------------------------------------------------------------------------------------------------

    def random_keys(self) -> list[bytes]:
        path = "".join(self.rng.choices("abc", weights=(4, 2, 1), k=self.rng.randint(1, 6)))
        return [path[: end + 1].encode() for end in range(len(path))]

    def some(self) -> bool:
        """Now and then something fails."""
        return self.rng.random() < 0.05

    def answers(self, do: Callable[[int], list[bool]]) -> dict[int, list[bool]]:
        """What the ranks do; one may be silent, before or after it has done it, or answer about no chunk."""
        found = {}
        for rank in HOLDERS:
            fate = self.rng.random()
            flags = do(rank) if fate > 0.05 else []
            if fate > 0.1:
                found[rank] = flags
            elif fate > 0.07:
                found[rank] = []
        return found

    # -- stores and loads ---------------------------------------------------------------------------------------------

    def store(self) -> None:
        keys, patient = self.random_keys(), self.rng.random() < 0.5
        client = self.rng.choice(CLIENTS)
        plan = self.tiers.prepare_store(keys, client=client, now=self.now, start=0, rank=None, patient=patient)
        waits = self.tiers.num_behind({Tier.DISK}) > 0
        if isinstance(plan, Deferred):
            assert patient and waits and plan is Deferred.NOT_WHOLE
            return
        assert not (plan.num_refused and patient and waits)
        assert {ref.key for ref in plan.refs}.isdisjoint(self.on_every_disk())
        if plan.refs:
            self.storing.append(plan)

    def end_store(self) -> None:
        if not self.storing:
            return
        plan = self.storing.pop(self.rng.randrange(len(self.storing)))
        fails = self.some()
        for rank in HOLDERS:
            flags = [not (fails and self.some()) and self.ranks[rank].commit(ref) for ref in plan.refs]
            if not self.some():
                done = [at for at, flag in enumerate(flags) if flag]
                failed = [at for at, flag in enumerate(flags) if not flag]
                self.tiers.complete_store(plan.plan_id, [rank], done=done, failed=failed)

    def load(self) -> None:
        keys, lease_id = self.random_keys(), self.rng.choice(LEASES)
        start = self.rng.choice((0, 0, 1))
        client = self.rng.choice(CLIENTS)
        plan = self.tiers.prepare_load(keys, lease_id=lease_id, client=client, now=self.now, start=start)
        assert [ref.key for ref in plan.refs] == keys[start : start + len(plan.refs)]
        for rank in self.ranks.values():
            assert all(rank.memory.get(ref.slot) == ref for ref in plan.refs), "other bytes than those wanted"

    def look_up(self) -> None:
        keys = self.random_keys()
        tiers = frozenset(tier for tier in Tier if self.rng.random() < 0.7)
        lease_id = self.rng.choice((*LEASES, None))
        num_cached = self.tiers.lookup(keys, lease_id, client=self.rng.choice(CLIENTS), now=self.now, tiers=tiers)
        assert num_cached == len(self.tiers.run(keys, tiers))

    def release(self) -> None:
        self.tiers.release(self.rng.choice(LEASES))

    # -- down ---------------------------------------------------------------------------------------------------------

    def begin_write(self) -> None:
        if self.writing is None:
            self.writing = next_disk_writes(self.tiers, most=self.rng.randint(1, 6), now=self.now)

    def end_write(self) -> None:
        if self.writing is None:
            return
        writes, self.writing = self.writing, None
        written = self.answers(lambda rank: [self.write(self.ranks[rank], *pair) for pair in self.pairs(writes, rank)])
        unwritten = complete_disk_writes(self.tiers, writes, written)
        for rank in self.ranks.values():  # those that were silent have them owed
            self.delete(rank, writes.evicted)
            self.delete(rank, unwritten)

    def pairs(self, writes: DiskWrites, number: int) -> Iterable[tuple[ChunkRef, ChunkRef]]:
        self.delete(self.ranks[number], writes.evicted)
        return zip(writes.sources, writes.targets, strict=True)

    def write(self, rank: Rank, source: ChunkRef, target: ChunkRef) -> bool:
        assert source.key == target.key
        if rank.memory.get(source.slot) != source or self.some():
            return False
        rank.files.add((target.key, target.generation))
        assert len(rank.files) <= NUM_FILES, "the disk's limit"
        return True

    def delete(self, rank: Rank, refs: Iterable[ChunkRef]) -> None:
        rank.files.difference_update((ref.key, ref.generation) for ref in refs)

    def begin_put(self) -> None:
        if not self.putting:
            self.putting = next_remote_writes(self.tiers, most=self.rng.randint(1, 6))

    def end_put(self) -> None:
        there = [ref for ref in self.putting if all(rank.memory.get(ref.slot) == ref for rank in self.ranks.values())]
        self.remote.update(ref.key for ref in there if not self.some())
        complete_remote_writes(self.tiers, self.putting)
        self.putting = ()

    def go_out_of_order(self) -> None:
        tier = self.rng.choice((Tier.DISK, Tier.REMOTE))
        self.tiers.suspended.add(tier)
        self.tiers.backlogs[tier].drop_all()
        self.tiers.trim()

    def come_back(self) -> None:
        self.tiers.suspended.clear()

    # -- up -----------------------------------------------------------------------------------------------------------

    def begin_promotion(self) -> None:
        keys = self.random_keys()
        found = {key: key for key in keys[len(self.tiers.run(keys)) :] if key in self.remote}
        whole = self.rng.random() < 0.3
        planned = plan_promotion(
            self.tiers,
            keys,
            found,
            lease_id=self.rng.choice(LEASES),
            client=self.rng.choice(CLIENTS),
            now=self.now,
            timeout_s=PIN_S,
            whole=whole,
        )
        assert whole or not isinstance(planned, Deferred)
        if not isinstance(planned, Deferred):
            assert set(planned.disk) | set(planned.remote) == set(range(len(planned.refs)))
            self.rising.append(planned)

    def end_promotion(self) -> None:
        if not self.rising:
            return
        promotion = self.rising.pop(self.rng.randrange(len(self.rising)))
        gone: set[int] = set()
        filled = self.answers(
            lambda rank: [self.fill(self.ranks[rank], promotion, at, gone) for at in range(len(promotion.refs))]
        )
        flags = {rank: of_rank for rank, of_rank in filled.items() if of_rank or not promotion.refs}
        lost = complete_promotion(self.tiers, promotion, flags, gone=gone, now=self.now, timeout_s=PIN_S)
        if self.rng.random() < 0.5:
            stop_waiting(self.tiers, promotion)
        for rank in self.ranks.values():
            self.delete(rank, lost)

    def fill(self, rank: Rank, promotion: Promotion[bytes], at: int, gone: set[int]) -> bool:
        source = promotion.disk.get(at)
        if source is not None and (source.key, source.generation) not in rank.files:
            gone.add(at)
            return False
        return not self.some() and rank.commit(promotion.refs[at])

    # -- what befalls it ----------------------------------------------------------------------------------------------

    def lose_a_file(self) -> None:
        rank = self.ranks[self.rng.choice(HOLDERS)]
        if rank.files:
            file = self.rng.choice(sorted(rank.files))
            rank.files.remove(file)
            self.lost.add(file)

    def pass_time(self) -> None:
        self.now += self.rng.choice((0.5, 3.0, 40.0))
        self.tiers.expire(self.now)

    def lose_a_client(self) -> None:
        self.tiers.drop_client(self.rng.choice(CLIENTS))

    def settle(self) -> None:
        for number in HOLDERS:
            owed = self.memory.unsettled(number)
            self.ranks[number].drop(owed)
            self.memory.settle(number, owed)

    def clear(self) -> None:
        keys = None if self.rng.random() < 0.1 else self.random_keys()
        leased = {key for lease in LEASES for key in self.leased_by(lease)}
        if self.rng.random() < 0.7:
            plan = self.tiers.clear_memory(keys)
            for number, rank in self.ranks.items():
                rank.drop((*plan.refs, *plan.aborted))
                self.memory.complete_clear(plan.plan_id, number)
            assert leased.isdisjoint(ref.key for ref in plan.refs)
        if self.rng.random() < 0.7:
            plan = self.tiers.clear_disk(keys)
            for rank in self.ranks.values():
                self.delete(rank, (*plan.refs, *plan.aborted))
            for key in keys if keys is not None else list(self.on_every_disk()):
                assert not self.tiers.is_on_disk(key) or key in {ref.key for ref in plan.kept}

    def leased_by(self, lease_id: str) -> set[bytes]:
        lease = self.memory.leases._leases.get(lease_id)
        return set() if lease is None else {self.memory.table.key_of[slot] for slot in lease.slots}

    # -- checks -------------------------------------------------------------------------------------------------------

    def on_every_disk(self) -> set[bytes]:
        return {ref.key for ref, _ in self.disk.entries() if self.tiers.is_on_disk(ref.key)}

    def check(self) -> None:
        self.tiers.check_integrity()
        for ref, _ in self.memory.entries():
            if self.memory.table.is_ready(ref):
                assert all(rank.memory.get(ref.slot) == ref for rank in self.ranks.values()), f"{ref} is not there"
                self.num_seen[Tier.CPU] += 1
        for ref, _ in self.disk.entries():
            file = (ref.key, ref.generation)
            if self.disk.table.is_ready(ref) and file not in self.lost:
                assert all(file in rank.files for rank in self.ranks.values()), f"{file} is not there"
                self.num_seen[Tier.DISK] += 1
        writing = () if self.writing is None else (*self.writing.targets, *self.writing.evicted)
        known = {(ref.key, ref.generation) for ref in (*(ref for ref, _ in self.disk.entries()), *writing)}
        for rank in self.ranks.values():
            assert rank.files <= known, "a file that nobody will ever read takes room"
        coming = {ref.generation for promotion in self.rising for ref in promotion.refs}
        assert self.tiers.coming_up.keys() <= coming
        if not self.keeps:
            self.check_staging()

    def check_staging(self) -> None:
        """Memory holds what is leased, on its way or being written, and nothing else."""
        pinned = self.memory.leases.pinned
        for ref, _ in self.memory.entries():
            is_held = any(ref.slot in backlog for backlog in self.tiers.backlogs.values())
            assert not self.memory.table.is_ready(ref) or is_held or ref.slot in pinned, f"{ref} is kept for nobody"

    def drain(self) -> None:
        """Whoever was at work ends, the tiers come back, and everything goes down."""
        self.tiers.suspended.clear()
        while self.storing or self.rising or self.writing is not None or self.putting:
            for end in (self.end_store, self.end_promotion, self.end_write, self.end_put):
                end()
        self.now += 1000.0
        self.tiers.expire(self.now)
        for client in CLIENTS:
            self.tiers.drop_client(client)
        self.settle()
        for _ in range(NUM_SLOTS):  # each round copies a group at least
            for step in (self.begin_write, self.end_write, self.begin_put, self.end_put):
                step()
        assert self.tiers.num_behind() == 0, "chunks wait for a tier for ever"
        self.check()


def fresh(number: int, count: int) -> list[bytes]:
    """Keys that were never there."""
    return [f"fresh {number} {place}".encode() for place in range(count)]


def store_whole(simulation: Simulation, keys: Sequence[bytes]) -> None:
    """All of it finds room and reaches every rank."""
    plan = simulation.tiers.prepare_store(
        keys, client="red", now=simulation.now, start=0, rank=None, patient=False
    )
    assert isinstance(plan, StorePlan) and len(plan.refs) == len(keys), "slots are held back for ever"
    for rank in simulation.ranks.values():
        assert all(map(rank.commit, plan.refs))
    simulation.tiers.complete_store(plan.plan_id, HOLDERS, done=range(len(keys)))


def check_all_room_can_be_used(simulation: Simulation) -> None:
    """Every slot and every file can be given to others, as often as it takes."""
    simulation.rng = random.Random(1)
    simulation.some = lambda: False  # type: ignore[method-assign]
    simulation.answers = lambda do: {rank: do(rank) for rank in HOLDERS}  # type: ignore[method-assign]
    for number in range(3):
        store_whole(simulation, fresh(number, NUM_SLOTS))
        simulation.drain()
    assert simulation.disk.counts().ready == NUM_FILES
    known = {(ref.key, ref.generation) for ref, _ in simulation.disk.entries()}
    assert all(rank.files | simulation.lost >= known for rank in simulation.ranks.values())
    assert not simulation.tiers.awaiting and not simulation.tiers.coming_up
    assert (simulation.memory.counts().leases, simulation.disk.counts().leases) == (0, 0)
    assert (simulation.memory.counts().plans, simulation.disk.counts().plans) == (0, 0)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_what_is_cached_is_there_and_nothing_is_held_back_for_ever(policy: str, seed: int, keeps: bool) -> None:
    simulation = Simulation(policy, seed, keeps=keeps)
    steps = [simulation.store] * 8 + [simulation.end_store] * 10 + [simulation.load] * 4 + [simulation.look_up] * 3
    steps += [simulation.begin_write, simulation.end_write] * 5 + [simulation.begin_put, simulation.end_put] * 3
    steps += [simulation.begin_promotion] * 5 + [simulation.end_promotion] * 6 + [simulation.release] * 4
    steps += [simulation.lose_a_file, simulation.pass_time, simulation.clear, *[simulation.settle] * 3]
    steps += [simulation.lose_a_client, simulation.go_out_of_order, *[simulation.come_back] * 5]
    for _ in range(500):
        simulation.rng.choice(steps)()
        simulation.check()
    assert simulation.num_seen[Tier.DISK] > 300, "a run in which little comes to the disk proves little"
    simulation.drain()
    check_all_room_can_be_used(simulation)
