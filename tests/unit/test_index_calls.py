"""Who may write for a plan, and what ends it: calls of clients, as the coordinator answers them."""

import pytest

from cluster.clients import Clients
from cluster.index_calls import IndexCalls
from cluster.messages import ClientHello, DirectWrites, LoadItem, StoreDone, StoreItem, pack_flags, pack_keys
from cluster.open_plans import OpenPlans
from cluster.world import WorldSpec
from lmcache_ray.index_service import IndexService
from lmcache_ray.layout import Placement
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import TierSpec
from lmcache_ray.tiers.tier_service import TierService
from lmcache_ray.tiers.tiered_index import TieredIndex
from tests.unit.index_builders import make_index
from tests.unit.stored_chunks import chunk_of, layout_of

KEYS = pack_keys([chunk_of(number).key for number in range(2)])
PUT = DirectWrites(call=0, oldest=0)


class World:
    """The calls over an index of two ranks; nobody clears."""

    def __init__(self) -> None:
        spec = WorldSpec(
            namespace="n", name="w", model_name="m", model_revision=None,
            layout=layout_of(placement=Placement.PER_RANK), num_slots=8, save_unfull_chunk=False,
            min_retrieve_tokens=0, block_size=16, cache_policy="LRU", arena_dir="/dev/shm", lease_timeout_s=10.0,
            lookup_timeout_s=1.0, call_timeout_s=5.0, restart_window_s=60.0, tiers=TierSpec(), life="life",
            lossy_serde=None,
        )  # fmt: skip
        index = TieredIndex.of_memory(make_index(8, (0, 1)))
        service = IndexService(index, clock=lambda: 0.0, free_slots=lambda ranks, refs: ranks)
        self.plans = OpenPlans(clock=lambda: 0.0, keep_s=50.0)
        self.clients = Clients(lambda client_id: None)
        self.calls = IndexCalls(
            spec,
            service=service,
            tiers=TierService(service, disk=None, remote=None, call_timeout_s=5.0, clock=lambda: 0.0),
            can_serve=lambda: True,
            may_store=lambda: True,
            plans=self.plans,
            clients=self.clients,
            clear=lambda keys, tiers: TierClearCounts({}, {}, 0, 0, ()),
        )

    def put(self, client: str) -> list[str | None]:
        """Plan a direct store: who is to answer for each chunk of it."""
        (plan,) = self.calls.prepare_stores(client, [StoreItem(KEYS, 0)], PUT)
        assert plan.plan_id is not None and len(plan.refs) == 2
        writers = [self.plans.writer_of(ref.generation) for ref in plan.refs.unpack()]
        flags = pack_flags([True, True])
        assert self.calls.complete([StoreDone(plan.plan_id, {0: flags, 1: flags})]) == [2]
        return writers


@pytest.fixture
def world() -> World:
    return World()


def test_a_client_whose_end_can_be_proven_answers_for_what_it_may_write(world: World) -> None:
    world.clients.enter(ClientHello("near", "node", 1, "/dev/shm/near"))
    assert world.put("near") == ["near", "near"]


def test_nothing_waits_for_the_end_of_a_client_that_nobody_can_prove(world: World) -> None:
    """It has no arena on its node: the ranks write for it, and can be asked."""
    world.clients.enter(ClientHello("far", "elsewhere", 1, None))
    assert world.put("far") == [None, None]
    (load,) = world.calls.prepare_loads("far", [LoadItem(KEYS, 0, ("views",), keep=True)])
    assert len(load.refs) == 2 and not load.is_kept, "its views would hold their slots for ever"
