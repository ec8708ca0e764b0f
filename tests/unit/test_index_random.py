"""Random operations on an index, against a model made of dicts and sets, and against the memory of its ranks.

The model predicts every state from the plans and answers alone; it knows no policy, and checks instead that evictions
were allowed. Each rank's memory is a dict from slots to what was last written there: a READY chunk whose bytes are not
its own on every rank would be the one failure that matters.
"""

import random
from dataclasses import dataclass, field
from itertools import product
from math import inf

import pytest

from lmcache_ray.index.plans import ChunkRef, Expired, StorePlan
from lmcache_ray.index.policy import POLICIES
from lmcache_ray.index.slot_table import SlotState
from tests.unit.index_builders import make_index

HOLDERS = (0, 1, 2)
NUM_SLOTS = 9
MOST_KEPT = 4
CLIENTS = ("red", "blue")


@dataclass
class Write:
    """A chunk being written: ranks that have not committed it, and those of them that were handed it."""

    ref: ChunkRef
    plan_id: int
    uncommitted: set[int] = field(default_factory=lambda: set(HOLDERS))
    owing: set[int] = field(default_factory=set)


@dataclass
class Plan:
    refs: tuple[ChunkRef, ...]
    ranks: tuple[int, ...]
    client: str
    deadline: float
    ended: bool = False


class Simulation:
    """An index and its model, taking the same random steps."""

    def __init__(self, policy: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.index = make_index(NUM_SLOTS, HOLDERS, policy)
        self.now = 0.0
        self.ready: dict[bytes, ChunkRef] = {}
        self.writes: dict[bytes, Write] = {}
        self.quarantine: dict[ChunkRef, set[int]] = {}
        self.plans: dict[int, Plan] = {}
        self.clears: dict[int, tuple[ChunkRef, ...]] = {}
        self.cleared: set[ChunkRef] = set()
        self.leases: dict[str, tuple[str, set[bytes], float]] = {}
        self.memory: dict[int, dict[int, ChunkRef]] = {rank: {} for rank in HOLDERS}

    def random_keys(self) -> list[bytes]:
        path = "".join(self.rng.choices("ab", k=self.rng.randint(1, 6)))
        return [path[: end + 1].encode() for end in range(len(path))]

    def random_client(self) -> str:
        return self.rng.choice(CLIENTS)

    def leased_keys(self) -> set[bytes]:
        return set().union(*(keys for _, keys, _ in self.leases.values()))

    def kept_keys(self) -> set[bytes]:
        return set().union(*(keys for _, keys, expires in self.leases.values() if expires == inf))

    # -- steps, each on the index and on the model

    def store(self) -> None:
        keys, client, rank = self.random_keys(), self.random_client(), self.rng.choice((None, *HOLDERS))
        plan = self.index.prepare_store(keys, client=client, now=self.now, rank=rank)
        self.check_store(plan, keys)
        for ref in plan.evicted:
            del self.ready[ref.key]
        ranks = HOLDERS if rank is None else (rank,)
        for ref in plan.refs:
            write = self.writes.setdefault(ref.key, Write(ref, plan.plan_id))
            assert write.ref == ref and write.owing.isdisjoint(ranks) and write.uncommitted.issuperset(ranks)
            write.owing.update(ranks)
        if plan.refs:
            self.plans[plan.plan_id] = Plan(plan.refs, ranks, client, self.now + 10.0)

    def check_store(self, plan: StorePlan, keys: list[bytes]) -> None:
        evicted = {ref.key for ref in plan.evicted}
        assert all(self.ready[ref.key] == ref for ref in plan.evicted)
        assert evicted.isdisjoint(keys) and evicted.isdisjoint(self.leased_keys())
        assert [keys[position] for position in plan.positions] == [ref.key for ref in plan.refs]
        in_use = [*self.ready.values(), *self.quarantine, *(write.ref for write in self.writes.values())]
        slots = {ref.slot for ref in in_use if ref not in plan.evicted}
        opened = [ref for ref in plan.refs if ref.key not in self.writes]
        assert slots.isdisjoint(ref.slot for ref in opened)
        for key in keys[: len(keys) - plan.num_refused]:
            assert key in self.ready or key in self.writes or key in {ref.key for ref in opened}
        if plan.num_refused:
            unevictable = self.leased_keys() | self.writes.keys() | set(keys) | evicted
            assert self.ready.keys() <= unevictable and len(slots) + len(opened) == NUM_SLOTS

    def answer(self) -> None:
        owed = [(plan_id, rank) for plan_id in self.plans for rank in self.ranks_owing(plan_id)]
        if owed and self.rng.random() < 0.9:
            plan_id, rank = self.rng.choice(owed)
        elif self.plans:
            plan_id = self.rng.choice(list(self.plans))
            rank = self.rng.choice(self.plans[plan_id].ranks)
        else:
            return
        plan = self.plans[plan_id]
        ranks = [rank] if self.rng.random() < 0.5 else list(plan.ranks)
        num_answered = self.rng.choice((len(plan.refs), len(plan.refs), self.rng.randint(0, len(plan.refs))))
        answered = self.rng.sample(range(len(plan.refs)), num_answered)
        failed = [position for position in answered if self.rng.random() < 0.05]
        done = [position for position in answered if position not in failed]
        for ref, rank in product([plan.refs[position] for position in done], ranks):
            if self.owes(ref, rank):
                self.memory[rank][ref.slot] = ref
        self.index.complete_store(plan_id, ranks, done=done, failed=failed)
        for ref, rank in product([plan.refs[position] for position in done], ranks):
            self.commit(ref, rank)
        for ref, rank in product([plan.refs[position] for position in failed], ranks):
            self.fail(ref, rank)

    def ranks_owing(self, plan_id: int) -> list[int]:
        plan = self.plans[plan_id]
        return [rank for rank in plan.ranks if any(self.owes(ref, rank) for ref in plan.refs)]

    def owes(self, ref: ChunkRef, rank: int) -> bool:
        """True if the rank has still to write the ref; what it owes to a clear is another matter."""
        if ref in self.cleared:
            return False
        write = self.writes.get(ref.key)
        return rank in self.quarantine.get(ref, ()) or (write is not None and write.ref == ref and rank in write.owing)

    def commit(self, ref: ChunkRef, rank: int) -> None:
        if not self.owes(ref, rank):
            return
        if ref in self.quarantine:
            self.release_quarantine(ref, rank)
            return
        write = self.writes[ref.key]
        write.owing.remove(rank)
        write.uncommitted.remove(rank)
        if not write.uncommitted:
            self.ready[ref.key] = ref
            del self.writes[ref.key]

    def fail(self, ref: ChunkRef, rank: int) -> None:
        if not self.owes(ref, rank):
            return
        if ref not in self.quarantine:
            self.abort_write(ref)
        self.release_quarantine(ref, rank)

    def abort_write(self, ref: ChunkRef) -> None:
        write = self.writes.pop(ref.key)
        if write.owing:
            self.quarantine[ref] = write.owing

    def release_quarantine(self, ref: ChunkRef, rank: int) -> None:
        self.quarantine[ref].discard(rank)
        if not self.quarantine[ref]:
            del self.quarantine[ref]

    def abort(self) -> None:
        if self.plans:
            plan_id = self.rng.choice(list(self.plans))
            self.index.abort_store(plan_id)
            for ref in self.plans[plan_id].refs:
                for rank in self.plans[plan_id].ranks:
                    self.fail(ref, rank)

    def load(self) -> None:
        keys, client, lease_id = self.random_keys(), self.random_client(), self.rng.choice("xyz")
        start = self.rng.choice((0, 0, 1, 2))
        plan = self.index.prepare_load(keys, lease_id=lease_id, client=client, now=self.now, start=start)
        expected = keys[start : self.num_ready(keys)]
        assert list(plan.refs) == [self.ready[key] for key in expected]
        self.leases.pop(lease_id, None)
        if expected:
            self.leases[lease_id] = (client, set(expected), self.now + 10.0)

    def keep(self) -> None:
        lease_id = self.rng.choice("xyz")
        client, keys, _ = self.leases.get(lease_id, ("", set(), 0.0))
        may_keep = bool(keys) and len(self.kept_keys() | keys) <= MOST_KEPT
        assert self.index.keep(lease_id, max_slots=MOST_KEPT) is may_keep
        if may_keep:
            self.leases[lease_id] = (client, keys, inf)

    def release(self) -> None:
        lease_id = self.rng.choice("xyz")
        assert self.index.release(lease_id) is (self.leases.pop(lease_id, None) is not None)

    def pass_time(self) -> None:
        self.now += self.rng.choice((0.5, 3.0, 3.0, 40.0))
        due = [plan_id for plan_id, plan in self.plans.items() if plan.deadline <= self.now]
        late = [lease_id for lease_id, (_, _, expires) in self.leases.items() if expires <= self.now]
        self.end(self.index.expire(self.now), due, late)

    def lose_client(self) -> None:
        lost = self.random_client()
        theirs = [plan_id for plan_id, plan in self.plans.items() if plan.client == lost]
        held = [lease_id for lease_id, (client, _, _) in self.leases.items() if client == lost]
        self.end(self.index.drop_client(lost), theirs, held)

    def end(self, expired: Expired, plan_ids: list[int], lease_ids: list[str]) -> None:
        assert set(expired.lease_ids) == set(lease_ids)
        aborted = []
        for plan_id in plan_ids:
            plan = self.plans[plan_id]
            for ref in plan.refs:
                write = self.writes.get(ref.key)
                if plan.ended or write is None or write.ref != ref:
                    continue
                if write.plan_id == plan_id or not write.owing.isdisjoint(plan.ranks):
                    self.abort_write(ref)
                    aborted.append(ref)
            plan.ended = True
        assert sorted(expired.aborted) == sorted(aborted)
        for lease_id in lease_ids:
            del self.leases[lease_id]

    def settle(self) -> None:
        rank = self.rng.choice(HOLDERS)
        owed = self.index.unsettled(rank)
        assert sorted(owed) == sorted(ref for ref, ranks in self.quarantine.items() if rank in ranks)
        proven = owed if self.rng.random() < 0.5 else owed[::2]
        assert self.index.settle(rank, proven) == len(proven)
        for ref in proven:
            self.release_quarantine(ref, rank)

    def clear(self) -> None:
        keys = None if self.rng.random() < 0.3 else self.random_keys()
        plan = self.index.prepare_clear(keys)
        wanted = set(self.ready) | set(self.writes) if keys is None else set(keys)
        leased = self.leased_keys()
        assert {ref.key for ref in plan.refs} == (self.ready.keys() & wanted) - leased
        assert {ref.key for ref in plan.aborted} == self.writes.keys() & wanted
        assert plan.num_kept == len(self.ready.keys() & wanted & leased)
        for ref in plan.refs:
            del self.ready[ref.key]
            self.quarantine[ref] = set(HOLDERS)
            self.cleared.add(ref)
        for ref in plan.aborted:
            self.abort_write(ref)
        if plan.refs:
            self.clears[plan.plan_id] = plan.refs

    def finish_clear(self) -> None:
        if self.clears:
            plan_id, rank = self.rng.choice(list(self.clears)), self.rng.choice(HOLDERS)
            self.index.complete_clear(plan_id, rank)
            for ref in self.clears[plan_id]:
                if ref in self.quarantine:
                    self.release_quarantine(ref, rank)

    # -- checks

    def num_ready(self, keys: list[bytes]) -> int:
        return next((count for count, key in enumerate(keys) if key not in self.ready), len(keys))

    def check(self) -> None:
        self.index.check_integrity()
        entries = dict(self.index.entries())
        assert {ref for ref, state in entries.items() if state is SlotState.READY} == set(self.ready.values())
        writing = {ref for ref, state in entries.items() if state is SlotState.WRITING}
        assert writing == {write.ref for write in self.writes.values()}
        counts = self.index.counts()
        assert counts.quarantined == len(self.quarantine) and counts.leases == len(self.leases)
        num_kept = sum(expires == inf for _, _, expires in self.leases.values())
        assert self.index.kept() == (num_kept, len(self.kept_keys()))
        keys = self.random_keys()
        assert self.index.lookup(keys, touch=self.rng.random() < 0.5) == self.num_ready(keys)
        for ref in self.ready.values():
            assert all(self.memory[rank][ref.slot] == ref for rank in HOLDERS), f"{ref} was overwritten"


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(4))
def test_the_index_agrees_with_its_model_after_every_step(policy: str, seed: int) -> None:
    simulation = Simulation(policy, seed)
    steps = [simulation.store] * 8 + [simulation.answer] * 24 + [simulation.load] * 3 + [simulation.release] * 2
    steps += [simulation.keep, simulation.pass_time, simulation.lose_client, simulation.settle, simulation.abort]
    steps += [simulation.clear, *[simulation.finish_clear] * 3]
    num_ready_seen = 0
    for _ in range(400):
        simulation.rng.choice(steps)()
        simulation.check()
        num_ready_seen += len(simulation.ready)
    assert num_ready_seen > 150, "a run in which little becomes READY proves little"
    drain(simulation)


def drain(simulation: Simulation) -> None:
    """When all have answered and all leases have ended, nothing may be left."""
    index = simulation.index
    index.expire(simulation.now + 1000.0)
    for client in CLIENTS:
        index.drop_client(client)
    plan = index.prepare_clear()
    assert plan.num_kept == 0
    for rank in HOLDERS:
        index.settle(rank, index.unsettled(rank))
    counts = index.counts()
    assert (counts.free, counts.plans, counts.leases) == (NUM_SLOTS, 0, 0)
    index.check_integrity()
