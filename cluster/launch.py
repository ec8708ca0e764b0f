"""Bringing a cluster up and taking it down: nodes chosen and probed, coordinator and ranks created, started, adopted.

Ranks are placed by hand on chosen nodes and reserve their arena's bytes as Ray `memory`, so that a node never gets
more arenas than it has memory for. The choice is soft: when a node is gone, Ray starts its actors on another. Every
wait shares one deadline, and a failure takes everything down again.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lmcache_ray.arena.capacity import arena_nbytes
from lmcache_ray.errors import ClusterError, ClusterExistsError, DeadlineError, LMCacheRayError

from .coordinator import Coordinator, concurrency_groups
from .core import first_generation
from .deadline import Deadline
from .kv_source import KVSpec
from .packed_calls import unpack
from .probe import NodeNeeds, choose_env_vars, probe_nodes
from .rank_port import Enlistment
from .ray_calls import Actor, Ref
from .topology import Topology
from .worker import CONCURRENCY_GROUPS, RankWorker
from .world import WorldSpec, cluster_prefix, coordinator_name, rank_name

_STOP_TIMEOUT_S = 5.0
_FIND_TIMEOUT_S = 10.0
_FLUSH_TIMEOUT_S = 30.0
_POLL_S = 0.02
_MAX_PENDING_CALLS = 10_000
_LEAST_NBYTES = 2**20  # an actor that needs nothing is placed at random, whatever node it would rather be on


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What to bring up: `node_ids` has the node of each rank; a detached cluster outlives its driver."""

    world: WorldSpec
    kv: KVSpec
    node_ids: Sequence[str]
    detached: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ClusterActors:
    """The processes of a cluster; `workers` in rank order."""

    world: WorldSpec
    coordinator: Actor
    workers: list[Actor]


def launch(plan: LaunchPlan) -> ClusterActors:
    """Bring a cluster up and wait until it serves.

    Raises `ClusterExistsError`, `ForeignPackageError`, `CapacityError`, `DeadlineError` naming what is missing, or
    whatever a rank raised; then nothing of it is left.
    """
    deadline = Deadline(plan.timeout_s)
    _check_free(plan.world)
    env_vars = choose_env_vars(plan.world, plan.node_ids, deadline)
    probe_nodes(plan.world, _needs(plan), deadline, env_vars=env_vars)
    actors = _create(plan, env_vars)
    try:
        _start(plan, actors, deadline)
    except BaseException:
        take_down(actors)
        raise
    return actors


def find(name: str, namespace: str) -> Actor | None:
    """The coordinator of a cluster that lives, or None. One that is just being restarted is waited for."""
    deadline = Deadline(_FIND_TIMEOUT_S)
    try:
        coordinator: Actor = ray.get_actor(coordinator_name(name), namespace=namespace)
        while not _answers(coordinator, deadline):
            time.sleep(_POLL_S)
    except (ValueError, RayActorError):
        return None
    except GetTimeoutError:
        raise DeadlineError(
            f"the coordinator of cluster {name!r} in namespace {namespace!r} did not answer in {_FIND_TIMEOUT_S:g} s"
        ) from None
    return coordinator


def _answers(coordinator: Actor, deadline: Deadline) -> bool:
    """False if its process has ended and Ray starts another."""
    try:
        ray.get(coordinator.ping.remote(), timeout=deadline.remaining_s())
    except ActorUnavailableError:
        return False
    return True


def is_taken(name: str, namespace: str) -> bool:
    """True while a cluster of that name lives, is being made, or is not ended yet."""
    return bool(_living_actors(name, namespace))


def take_down(actors: ClusterActors) -> None:
    """Stop every rank (which removes its arena) and end all processes. What is dead already is passed over.

    Chunks that wait for a tier below memory are copied there first, for a call's time at most.
    """
    if actors.world.tiers.has_lower:
        _flush(actors.coordinator, actors.world.call_timeout_s)
    _end([*actors.workers, actors.coordinator])
    _wait_until_ended(actors.world.name, actors.world.namespace)


def end_remains(name: str, namespace: str) -> int:
    """End every actor that bears the cluster's name, whatever state the cluster is in; their number."""
    actors = _handles(name, namespace)
    with contextlib.suppress(ValueError):  # it has lost its coordinator
        _flush(ray.get_actor(coordinator_name(name), namespace=namespace), _FLUSH_TIMEOUT_S)
    _end(actors)
    _wait_until_ended(name, namespace)
    return len(actors)


def end_orphans(name: str, namespace: str) -> None:
    """End the ranks of a cluster that has lost its coordinator: they serve nobody.

    A cluster that another driver is just starting is left alone. Every coordinator is made before its ranks, so a rank
    whose handle was taken before the coordinator's name was found to be free has lost its coordinator, and whoever is
    started under its name later is another actor. Raises `ClusterExistsError` if the coordinator's name stays taken.
    """
    actors = _handles(name, namespace)
    deadline = Deadline(_STOP_TIMEOUT_S)
    while coordinator_name(name) in _living_actors(name, namespace):  # of a dead one, until Ray has seen it
        if deadline.remaining_s() <= 0:
            raise ClusterExistsError(f"a cluster {name!r} is being started or ended in namespace {namespace!r}")
        time.sleep(_POLL_S)
    if actors:
        _end(actors)
        _wait_until_ended(name, namespace)


def _flush(coordinator: Actor, timeout_s: float) -> None:
    """Have what waits for lower tiers copied there, if the coordinator lives and is willing."""
    with contextlib.suppress(RayError):
        ray.get(coordinator.close_tiers.remote(timeout_s), timeout=timeout_s + _STOP_TIMEOUT_S)


def _end(actors: Sequence[Actor]) -> None:
    """Let them stop, all at once and for a limited time, then kill them. What is dead already is passed over."""
    stops = [actor.stop.remote() for actor in actors]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=_STOP_TIMEOUT_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _handles(name: str, namespace: str) -> list[Actor]:
    handles: list[Actor] = []
    for actor_name in _living_actors(name, namespace):
        with contextlib.suppress(ValueError):  # it ended meanwhile
            handles.append(ray.get_actor(actor_name, namespace=namespace))
    return handles


def _living_actors(name: str, namespace: str) -> list[str]:
    prefix = cluster_prefix(name)
    return [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == namespace and entry["name"].startswith(prefix)
    ]


def _wait_until_ended(name: str, namespace: str) -> None:
    """Ray kills in the background; while a name is still taken, the next cluster of that name could not start."""
    deadline = Deadline(_STOP_TIMEOUT_S)
    while _living_actors(name, namespace) and deadline.remaining_s() > 0:
        time.sleep(_POLL_S)


def _check_free(world: WorldSpec) -> None:
    try:
        is_taken = find(world.name, world.namespace) is not None
    except DeadlineError as error:
        raise ClusterExistsError(f"a cluster of that name is being started, or hangs: {error}") from error
    if is_taken:
        raise ClusterExistsError(
            f"a cluster {world.name!r} lives in namespace {world.namespace!r}: connect to it, take it down, or choose "
            "another name"
        )
    end_orphans(world.name, world.namespace)


def _needs(plan: LaunchPlan) -> Mapping[str, NodeNeeds]:
    layout, needs = plan.world.layout, dict[str, dict[int, int]]()
    for rank, node_id in enumerate(plan.node_ids):
        on_node = needs.setdefault(node_id, {})
        if rank in layout.holders:
            on_node[rank] = arena_nbytes(plan.world.num_slots, layout.ranks[rank].slot_nbytes)
    return {node_id: NodeNeeds(on_node) for node_id, on_node in needs.items()}


def _create(plan: LaunchPlan, env_vars: Mapping[str, str]) -> ClusterActors:
    world, needs = plan.world, _needs(plan)
    common = {
        "namespace": world.namespace,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_pending_calls": _MAX_PENDING_CALLS,
        "lifetime": "detached" if plan.detached else None,
        "runtime_env": {"env_vars": dict(env_vars)} if env_vars else None,
    }
    coordinator_threads = concurrency_groups(world.layout.world_size)
    # Ray's types know concurrency_groups as an option only, where it is not taken.
    coordinator_class = ray.remote(concurrency_groups=coordinator_threads)(Coordinator)  # type: ignore[call-overload]
    worker_class = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(RankWorker)  # type: ignore[call-overload]
    with _claiming_names(world):
        coordinator = coordinator_class.options(
            **common,
            name=coordinator_name(world.name),
            memory=_LEAST_NBYTES,
            scheduling_strategy=NodeAffinitySchedulingStrategy(plan.node_ids[0], soft=True),
        ).remote(world)
    actors = ClusterActors(world, coordinator, [])
    try:
        for rank, node_id in enumerate(plan.node_ids):
            options = {
                **common,
                "name": rank_name(world.name, rank),
                "memory": max(_LEAST_NBYTES, needs[node_id].arena_nbytes.get(rank, 0)),
                "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True),
            }
            with _claiming_names(world):
                actors.workers.append(worker_class.options(**options).remote(world, rank, plan.kv))
    except BaseException:
        take_down(actors)
        raise
    return actors


@contextlib.contextmanager
def _claiming_names(world: WorldSpec) -> Iterator[None]:
    """Of two actors with one name Ray refuses the second, in the driver that makes it."""
    try:
        yield
    except ValueError as error:
        raise ClusterExistsError(
            f"a cluster {world.name!r} is being started or ended in namespace {world.namespace!r}: {error}"
        ) from error


def _start(plan: LaunchPlan, actors: ClusterActors, deadline: Deadline) -> None:
    node_ids = _gather(
        [worker.node_id.remote() for worker in actors.workers], deadline, plan, "was not scheduled"
    )
    topology = Topology.from_node_ids([str(node_id) for node_id in node_ids])
    (epoch,) = _gather([actors.coordinator.ping.remote()], deadline, plan, "found its coordinator not to start")
    assert isinstance(epoch, int)
    floor = first_generation(epoch)
    enlisted = _gather(
        [
            worker.enlist.remote(Enlistment(place, epoch, floor, may_attach=False), actors.coordinator)
            for worker, place in zip(actors.workers, topology.places, strict=True)
        ],
        deadline,
        plan,
        "did not start",
    )
    adopted = actors.coordinator.adopt.remote(
        [unpack(one) for one in enlisted if isinstance(one, bytes)], actors.workers, deadline.remaining_s() / 2
    )
    _gather([adopted], deadline, plan, "did not adopt the ranks")


def _gather(
    references: Sequence[Ref], deadline: Deadline, plan: LaunchPlan, failure: str
) -> list[object]:
    results = []
    for rank, reference in enumerate(references):
        who = f"rank {rank} on node {plan.node_ids[rank]}"
        try:
            results.append(ray.get(reference, timeout=deadline.remaining_s()))
        except GetTimeoutError:
            reserved = _needs(plan)[plan.node_ids[rank]].arena_nbytes.get(rank, 0)
            raise DeadlineError(
                f"{who} {failure} within {deadline.timeout_s:g} s; it needs {reserved} bytes of Ray `memory` there"
            ) from None
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, LMCacheRayError) else ClusterError(
                f"{who} {failure}: {error.cause}"
            ) from error
        except RayError as error:
            raise ClusterError(f"{who} {failure}: {str(error).splitlines()[0]}") from error
    return results
