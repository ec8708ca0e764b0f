"""One Ray for all tests of this folder: two simulated nodes. Tests share clusters by module, since each start costs
seconds; whatever a module started must be gone, without a trace, when it ends.
"""

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray

from cluster.client import CacheCluster
from cluster.ray_session import RaySession, alive_node_ids, open_session
from lmcache_ray.config import LMCacheEngineConfig
from tests.on_ray import rank_functions

StartCluster = Callable[..., CacheCluster]

NAMESPACE = "lmcache_ray-tests"
NUM_NODES = 2
_HERE = Path(__file__).parent
_UNWANTED = ("RAY_ADDRESS", "RAY_NAMESPACE")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Everything here needs Ray."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.on_ray)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[RaySession]:
    """A Ray of two simulated nodes."""
    # A short path: the sockets of Ray's processes lie in it, and the names of sockets may have 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="lr-", dir="/tmp"))
    (directory / "ray").mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", str(directory))
        environment.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name in [name for name in os.environ if name in _UNWANTED or name.startswith("LMCACHE_")]:
            environment.delenv(name)
        session = open_session(NAMESPACE, num_nodes=NUM_NODES)
        rank_functions.ship_by_value()
        try:
            yield session
        finally:
            session.close()
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_nodes(ray_session: RaySession) -> list[str]:
    """The ids of the two nodes, this process's own first."""
    return alive_node_ids()


@pytest.fixture(scope="module")
def arena_dir(ray_nodes: list[str]) -> Iterator[Path]:
    """A place in shared memory of this module's own; at the module's end no file and no actor may be left."""
    directory = Path(tempfile.mkdtemp(prefix="lmcache_ray-tests-", dir="/dev/shm"))
    try:
        yield directory
        assert os.listdir(directory) == []
        assert living_actors() == []
    finally:
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def start_cluster(arena_dir: Path) -> Iterator[StartCluster]:
    """``start_cluster(chunk_size=…, …, model_name=…, …)``: configuration keys and arguments of `CacheCluster.start`.

    A cluster gets a name of its own and ends with the module at the latest.
    """
    names = (f"cluster-{number}" for number in itertools.count())
    with ExitStack() as clusters:

        def start(config: dict[str, object] | None = None, **arguments: object) -> CacheCluster:
            named = {"model_name": "m", "name": next(names), "namespace": NAMESPACE, "timeout_s": 90.0, **arguments}
            return clusters.enter_context(CacheCluster.start(make_config(arena_dir, **(config or {})), **named))  # type: ignore[arg-type]

        yield start


def make_config(arena_dir: Path, **values: object) -> LMCacheEngineConfig:
    """A small world's configuration; `values` are keys of it."""
    defaults: dict[str, object] = {"chunk_size": 4, "capacity_chunks": 64, "block_size": 4, "call_timeout_s": 20}
    return LMCacheEngineConfig(**{"arena_dir": str(arena_dir), **defaults, **values})


def living_actors() -> list[str]:
    """Names of the actors of all caches that the tests started."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [entry["name"] for entry in actors if entry["namespace"] == NAMESPACE]
