"""Before any actor starts: does each node import our packages, and have room for its arenas?

A job's `working_dir` may hold a package that is called `cluster` too, and wins on Ray's path; then actors would die of
an import error that names neither node nor remedy. The task that asks is therefore shipped by value: it imports
nothing of ours until it has looked at what it would get.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import lmcache_ray
from lmcache_ray.errors import ArenaError, CapacityError, ClusterError, DeadlineError, ForeignPackageError

from .deadline import Deadline
from .world import WorldSpec

PACKAGE_ROOT = str(Path(__file__).resolve().parent.parent)
_REFUSALS: Final = {kind.__name__: kind for kind in (ForeignPackageError, ArenaError, CapacityError)}
"""What a probe may answer, by name: a node that imports foreign packages cannot send a class of ours."""


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """What one node must hold: arena file bytes per rank."""

    arena_nbytes: Mapping[int, int]


def probe_nodes(
    world: WorldSpec, needs: Mapping[str, NodeNeeds], deadline: Deadline, *, env_vars: Mapping[str, str]
) -> None:
    """Ask every node of `needs` (by node id) at once; also sweeps what dead clusters of ours left there.

    Raises `ForeignPackageError` (one sentence: node, path, remedy), `ArenaError` (`arena_dir` cannot be used there),
    `CapacityError`, or `DeadlineError`.
    """
    task = ray.remote(_make_probe())
    pending = {
        node_id: task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            runtime_env={"env_vars": dict(env_vars)} if env_vars else None,
        ).remote(
            lmcache_ray.__version__,
            world.arena_dir,
            world.namespace,
            world.name,
            world.restart_window_s,
            dict(need.arena_nbytes),
        )
        for node_id, need in needs.items()
    }
    for node_id, reference in pending.items():
        try:
            kind, text = ray.get(reference, timeout=deadline.remaining_s())
        except GetTimeoutError:
            raise DeadlineError(f"node {node_id} ran no task within {deadline.timeout_s:g} s") from None
        except RayError as error:
            raise ClusterError(f"node {node_id} cannot run a task: {str(error).splitlines()[0]}") from error
        if kind is not None:
            raise _REFUSALS[kind](f"node {node_id} {text}")


def choose_env_vars(world: WorldSpec, node_ids: Sequence[str], deadline: Deadline) -> dict[str, str]:
    """The environment that workers need to import our packages: none if they are installed there, else PYTHONPATH.

    Raises as `probe_nodes` does if neither works.
    """
    needs = {node_id: NodeNeeds({}) for node_id in dict.fromkeys(node_ids)}
    try:
        probe_nodes(world, needs, deadline, env_vars={})
        return {}
    except ForeignPackageError:
        env_vars = {"PYTHONPATH": f"{PACKAGE_ROOT}{os.pathsep}${{PYTHONPATH}}"}  # Ray puts the node's own in
        probe_nodes(world, needs, deadline, env_vars=env_vars)
        return env_vars


def _make_probe() -> Callable[..., tuple[str | None, str]]:
    """A function that Ray pickles by value, because it is no attribute of a module that could be imported instead.

    It answers None and an empty text, or the name of the error to raise and a text that goes on after the node's name.
    """

    def probe(
        version: str, arena_dir: str, namespace: str, name: str, restart_window_s: float, arena_nbytes: dict[int, int]
    ) -> tuple[str | None, str]:
        import importlib
        import time

        foreign = "ForeignPackageError"
        remedy = (
            "install this project there, and keep other packages of that name out of the job's working_dir and of the "
            "folder in which the driver is started"
        )
        for package in ("lmcache_ray", "cluster"):
            try:
                module = importlib.import_module(package)
            except ImportError as error:
                return foreign, f"cannot import the package {package!r} ({error}): {remedy}"
            where = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ["?"])))
            found = getattr(module, "__lmcache_ray_version__", None)
            if found is None:
                return foreign, f"imports a package {package!r} that is not lmcache_ray's, from {where}: {remedy}"
            if found != version:
                return foreign, f"imports {package!r} {found} from {where}, this process is {version}: {remedy}"
        from lmcache_ray.arena.capacity import check_capacity
        from lmcache_ray.arena.sweep import sweep
        from lmcache_ray.errors import ArenaError, CapacityError

        try:
            sweep(arena_dir, namespace, name, restart_window_s=restart_window_s, now=time.time())
            check_capacity(arena_nbytes, arena_dir)
        except ArenaError as error:
            return "ArenaError", str(error)
        except CapacityError as error:
            return "CapacityError", f"has too little room: {error}"
        return None, ""

    return probe
