"""`CacheCluster`: what users of a cluster hold. A driver starts one and owns it, or connects to one that runs.

::

    with CacheCluster.start(config, model_name="llama-7b", layer_groups=groups, world_size=4) as cluster:
        cluster.store(tokens, slot_mapping)
        mask = cluster.retrieve(tokens, slot_mapping)

Calls are thread-safe and end by `call_timeout_s`. Batched forms cost about as many actor messages as single ones, so
they are the way to speed. A rank that is dead makes misses, not errors; `status().problems` says so.
"""

import atexit
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import ray

from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.errors import ClusterNotFoundError, LMCacheRayError
from lmcache_ray.layout import ShardSpec

from .calls import ClusterCalls
from .every_rank import check_every_rank, run_on_every_rank
from .health import ClusterHealth, HealthProblem
from .launch import ClusterActors, LaunchPlan, find, launch, take_down
from .link import ClusterLink
from .ray_session import RaySession, alive_node_ids, join_session, open_session
from .requests import Request
from .topology import place_ranks
from .upkeep import Drained, drain, restart_ranks
from .world import ClusterStatus, RankStatus
from .world_spec import kv_spec, world_spec

if TYPE_CHECKING:
    import torch

    from lmcache_ray.shape_spec import LayerGroupSpec

    from .kv_source import KVSource

__all__ = [
    "CacheCluster",
    "ClusterHealth",
    "ClusterStatus",
    "Drained",
    "HealthProblem",
    "RankStatus",
    "Request",
]

Result = TypeVar("Result")


class CacheCluster(ClusterCalls):
    """A connection to a cache cluster. Made by `start` or `connect`; a context manager."""

    def __init__(self, link: ClusterLink, session: RaySession, owned: ClusterActors | None) -> None:
        super().__init__(link)
        self._session = session
        self._owned = owned
        if owned is not None or session.owns_ray:
            atexit.register(self.shutdown)  # before Ray's own: a driver that ends without `shutdown` leaves nothing

    @classmethod
    def start(
        cls,
        config: LMCacheEngineConfig,
        *,
        model_name: str,
        layer_groups: "Sequence[LayerGroupSpec] | None" = None,
        kv_shape: Sequence[int] | None = None,
        kv_dtype: "torch.dtype | None" = None,
        rank_layouts: Sequence[Sequence[ShardSpec]] | None = None,
        world_size: int = 1,
        use_mla: bool = False,
        name: str | None = None,
        namespace: str | None = None,
        nodes: Sequence[str] | None = None,
        ranks_per_node: Sequence[int] | None = None,
        detached: bool = False,
        kv_source: "str | KVSource | None" = None,
        num_blocks: int | None = None,
        timeout_s: float = 120.0,
    ) -> "CacheCluster":
        """Bring a cluster up and wait until it serves; without a Ray, a local one is started for it.

        The KV is described by `layer_groups` of one rank (already split), by `kv_shape` with `kv_dtype`, or by
        `rank_layouts`, one list of `ShardSpec` per rank. `nodes[rank]` places ranks by hand, `ranks_per_node` by
        count. A `detached` cluster outlives this driver and its `shutdown`; any other ends with it. `kv_source` names
        a function "module:function" (or is one) that makes a rank's paged KV of `num_blocks` blocks.

        Raises `ConfigError`, `ShapeSpecError` and the like for arguments, and what `launch` raises.
        """
        world = world_spec(
            config,
            model_name=model_name,
            layer_groups=layer_groups,
            kv_shape=kv_shape,
            kv_dtype=kv_dtype,
            rank_layouts=rank_layouts,
            world_size=world_size,
            use_mla=use_mla,
            name=name,
            namespace=namespace,
        )
        kv = kv_spec(config, layer_groups, kv_source, num_blocks)
        session = open_session(world.namespace)
        try:
            node_ids = place_ranks(world_size, alive_node_ids(), nodes=nodes, ranks_per_node=ranks_per_node)
            actors = launch(LaunchPlan(world, kv, node_ids, detached, timeout_s))
            try:
                return cls(ClusterLink(actors.coordinator), session, None if detached else actors)
            except BaseException:
                take_down(actors)
                raise
        except BaseException:
            session.close()
            raise

    @classmethod
    def connect(cls, name: str = "default", *, namespace: str = "lmcache_ray") -> "CacheCluster":
        """Use a cluster that runs; leaving it ends the connection, not the cluster. Raises `ClusterNotFoundError`."""
        session = join_session(namespace)
        try:
            coordinator = find(name, namespace)
            if coordinator is None:
                raise ClusterNotFoundError(f"no cache cluster {name!r} lives in namespace {namespace!r}")
            return cls(ClusterLink(coordinator), session, None)
        except BaseException:
            session.close()
            raise

    # -- the cluster itself -------------------------------------------------------------------------------------------

    def run_on_ranks(
        self, function: str | Callable[..., Result], *arguments: object, timeout_s: float | None = None
    ) -> list[Result]:
        """Run ``function(context, *arguments)`` in every rank's process at once; the results in rank order.

        `context` has the rank's `engine` and `kv_caches` (see `rank_start.RankContext`): this is how SPMD code, where
        each rank calls its own engine, runs. `function` is picklable or "module:function". The first failure by rank
        is raised after all have ended.
        """
        self._link.check_open()
        return run_on_every_rank(self._link, function, arguments, timeout_s)

    @property
    def link(self) -> ClusterLink:
        """Handles and facts of the connection, for code that plans its own messages."""
        return self._link

    def status(self) -> ClusterStatus:
        """The cluster at this moment."""
        return self._link.coordinator.status()

    def health(self) -> ClusterHealth:
        """Whether the world is whole and can serve; if not which rank is away, why, and since when."""
        return self._link.coordinator.health()

    def restart_ranks(self, ranks: Sequence[int] | None = None, *, timeout_s: float = 60.0) -> dict[int, float]:
        """Start ranks (None: all) anew, one after the other, while the cluster serves; see `upkeep.restart_ranks`."""
        self._link.check_open()
        return restart_ranks(self._link, ranks, timeout_s=timeout_s)

    def drain(self, *, timeout_s: float = 60.0) -> Drained:
        """End the cluster, whoever started it, with all stores finished and on disk; see `upkeep.drain`.

        This connection is closed then.
        """
        drained = drain(self._link, timeout_s=timeout_s)
        self.shutdown()
        return drained

    def is_healthy(self) -> bool:
        """True if the coordinator answers and every rank lives; `status().problems` says what is wrong."""
        try:
            return not self.status().problems
        except LMCacheRayError:
            return False

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the index or an arena contradicts itself. Meaningful while nobody writes."""
        self._link.coordinator.check_integrity()
        check_every_rank(self._link)

    def shutdown(self) -> None:
        """Leave; end the cluster if this driver owns it, and Ray if it was started here. Idempotent."""
        atexit.unregister(self.shutdown)
        is_idle = self._arenas.close(timeout_s=self._link.world.call_timeout_s)
        self._get_path.close()
        self._link.close(is_idle=is_idle)
        owned, self._owned = self._owned, None
        if not ray.is_initialized():
            return  # somebody has shut Ray down, and the cluster with it
        if owned is not None:
            take_down(owned)
        self._session.close()

    def __enter__(self) -> "CacheCluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        world = self._link.world
        return f"<CacheCluster {world.name!r} in {world.namespace!r}, {world.layout.world_size} ranks>"
