"""What must be so when nothing goes wrong any more: how a world comes to rest, and what is left then."""

from collections.abc import Callable
from functools import partial
from typing import Final

from lmcache_ray.errors import LMCacheRayError
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import TieredIndex
from tests.simulation.clients import Client
from tests.simulation.copying import Violation
from tests.simulation.faults import Fault
from tests.simulation.values import Prompt, short
from tests.simulation.world import World

_LONGEST_S: Final = 300.0
_STEP_S: Final = 1.0
_BETWEEN_PUTS_S: Final = 15.0
_NOTICE_S: Final = 5.0
"""Until all ends are known, and late messages have come."""
_CALL_S: Final = 6.0


def come_to_rest(world: World) -> None:
    """Let everything end that was begun. Raises `Violation` if that does not come about, or something is missing."""
    world.faults.cease()
    for handle in (world.coordinator, *world.ranks):
        if handle.process is not None:
            world.scheduler.go_on(handle.process)
    world.remote.is_down = False
    for client in world.living_clients():
        world.scheduler.go_on(client.process)
        client.close_views()
    end = world.scheduler.now + _LONGEST_S
    world.scheduler.run_until(world.scheduler.now + _NOTICE_S)
    last_puts_at = world.scheduler.now
    while unrest := _unrest(world):
        if world.scheduler.now >= end:
            raise Violation(f"after {_LONGEST_S:g} s without a mishap there is no rest: {'; '.join(unrest)}")
        if world.scheduler.now >= last_puts_at:
            last_puts_at = world.scheduler.now + _BETWEEN_PUTS_S
            for client in world.living_clients():
                world.scheduler.spawn(client.process, "put", partial(_put_once_more, world, client))
        world.scheduler.run_until(world.scheduler.now + _STEP_S)
    _look_for_what_was_stored(world)
    _use_everything(world)


def _put_once_more(world: World, client: Client) -> None:
    """A client's next put tells which of its earlier ones are over."""
    try:
        client.put(world.rng.choice(world.shape.prompts))
    except LMCacheRayError as error:
        world.story.tell(client.name, "put: %s", error)


def _unrest(world: World) -> list[str]:
    coordinator = world.living_coordinator()
    if coordinator is None:
        return ["there is no coordinator"]
    core, index = coordinator.core, coordinator.index
    found = [f"task {task.name} of {task.process} goes on" for task in world.scheduler.busy_tasks()]
    found += [f"{name}: {fault}" for name, fault in coordinator.faults.items()]
    found += list(core.membership.problems().values())
    if not core.can_serve():
        return [*found, "the coordinator cannot serve"]
    for name, part in (("memory", index.memory), ("disk", index.disk)):
        if part is not None:
            counts = part.counts()
            kept = sum(lease.startswith("pin/") for lease in part.leases._leases)
            if counts.writing or counts.quarantined or counts.plans or counts.leases > kept:
                found.append(f"{name} has {counts}, {kept} of the leases pins")
    found += [
        f"{len(backlog)} chunks wait for {tier.value}" for tier, backlog in index.backlogs.items() if len(backlog)
    ]
    found += [f"promotions {list(index.coming_up)} go on"] if index.coming_up else []
    found += core.tiers.problems()
    if index.backlogs.keys() & index.suspended:
        found.append(f"tiers {index.suspended} are suspended")
    for node in world.living_nodes():
        found += [f"{node.name} has temporary files" for directory in node.directories.values() if directory.temporary]
    return found


def _look_for_what_was_stored(world: World) -> None:
    """In a roomy world whose files stay what they are, what was reported as stored is found."""
    if not world.shape.is_roomy or not world.spec.tiers.keeps_in_memory:
        return
    if any(world.faults.happened[fault] for fault in (Fault.DISK_TORN, Fault.DISK_DAMAGED, Fault.DISK_FAILS)):
        return
    coordinator = world.living_coordinator()
    assert coordinator is not None
    for prompt in world.shape.prompts:
        missing = [key for key in prompt.keys if key in world.oracle.stored and not _is_cached(coordinator.index, key)]
        if missing:
            raise Violation(f"{short(missing)} of {prompt.name} were stored, and are gone")
    world.happened["found again"] += len(world.oracle.stored)


def _is_cached(index: TieredIndex, key: bytes) -> bool:
    return index.memory.table.ready_ref(key) is not None or index.is_on_disk(key)


def _use_everything(world: World) -> None:
    """A new prompt is stored, found, and loaded on every rank."""
    client = world.add_client()
    prompt = Prompt.of("zzz")
    results: list[object] = []

    def use() -> None:
        client.register()
        for prompt_again in world.shape.prompts:
            client.pin(prompt_again, is_wanted=False)
        results.append(client.store(prompt))
        results.append(client.retrieve(prompt))
        results.append(client.get(prompt))
        client.clear(None, tuple(Tier))
        results.append(client.put(prompt))
        results.append(client.lookup(prompt))

    _do(world, use, client.process.name)
    expected = len(prompt.keys)
    if results != [expected] * 5:
        raise Violation(f"at rest a new prompt of {expected} chunks was stored, loaded, copied, put, found: {results}")


def _do(world: World, run: Callable[[], None], name: str) -> None:
    client = world.clients[-1]
    world.scheduler.spawn(client.process, "last", run)
    end = world.scheduler.now + 5 * _CALL_S
    while world.scheduler.busy_tasks():
        if world.scheduler.now >= end:
            raise Violation(f"at rest {name} does not end")
        world.scheduler.run_until(world.scheduler.now + 0.1)
