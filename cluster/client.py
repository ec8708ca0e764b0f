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

from lmcache_ray.chunking import Mask
from lmcache_ray.clearing import ClearResult, names_cpu_tier
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.connector.base import SlotMapping
from lmcache_ray.errors import ClusterError, ClusterNotFoundError, InvalidRequestError, LMCacheRayError
from lmcache_ray.layout import ShardSpec
from lmcache_ray.prompt import RequestConfigs
from lmcache_ray.tokens import TokenSequence

from .direct_path import DirectPath
from .every_rank import check_every_rank, run_on_every_rank
from .launch import ClusterActors, LaunchPlan, find, launch, take_down
from .link import ClusterLink
from .lookups import lookup_prompts
from .messages import pack_keys
from .ray_session import RaySession, alive_node_ids, join_session, open_session
from .requests import Request, prompt_of
from .row_calls import retrieve_rows, store_rows
from .topology import place_ranks
from .world import ClusterStatus, RankStatus
from .world_spec import kv_spec, world_spec

if TYPE_CHECKING:
    import torch

    from lmcache_ray.shape_spec import LayerGroupSpec

    from .kv_source import KVSource

__all__ = ["CacheCluster", "ClusterStatus", "RankStatus", "Request"]

Result = TypeVar("Result")


class CacheCluster:
    """A connection to a cache cluster. Made by `start` or `connect`; a context manager."""

    def __init__(self, link: ClusterLink, session: RaySession, owned: ClusterActors | None) -> None:
        self._link = link
        self._session = session
        self._owned = owned
        self._direct = DirectPath(link)
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

    # -- rows of the ranks' paged KV ----------------------------------------------------------------------------------

    def store(
        self,
        tokens: TokenSequence,
        slot_mapping: SlotMapping,
        *,
        mask: Mask | None = None,
        req_id: str | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> int:
        """Every rank stores its rows of the chunks nobody has yet; the leading tokens READY at return."""
        return _single(self.store_many([Request(tokens, slot_mapping, None, mask, 0, req_id, request_configs)]))

    def retrieve(
        self,
        tokens: TokenSequence,
        slot_mapping: SlotMapping,
        *,
        mask: Mask | None = None,
        req_id: str | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> "torch.Tensor":
        """Every rank loads the cached prefix into its rows; bool ``[num_tokens]``, True where all ranks have it."""
        return _single(self.retrieve_many([Request(tokens, slot_mapping, None, mask, 0, req_id, request_configs)]))

    def store_many(self, requests: Sequence[Request]) -> list[int | Exception]:
        """`store` of each request, in order; a request that failed has its exception in its place."""
        self._link.check_open()
        return store_rows(self._link, requests)

    def retrieve_many(self, requests: Sequence[Request]) -> "list[torch.Tensor | Exception]":
        """`retrieve` of each request, in order; a request that failed has its exception in its place."""
        import torch

        self._link.check_open()
        masks = retrieve_rows(self._link, requests)
        return [mask if isinstance(mask, Exception) else torch.from_numpy(mask) for mask in masks]

    # -- the index ----------------------------------------------------------------------------------------------------

    def lookup(
        self,
        tokens: TokenSequence,
        *,
        lookup_id: str | None = None,
        pin: bool = False,
        request_configs: RequestConfigs | None = None,
    ) -> int:
        """Leading tokens that every rank could load now; one message, whatever the number of ranks.

        ``pin=True`` with a `lookup_id` keeps them loadable until `lookup_unpin` or the lease's expiry.
        """
        lease_id = self._link.lease_names.for_lookup(lookup_id) if pin else None
        request = Request(tokens, request_configs=request_configs)
        return _single(lookup_prompts(self._link, [request], lease_id=lease_id))

    def lookup_many(self, requests: Sequence[Request]) -> list[int | Exception]:
        """`lookup` of each request without a pin, in order."""
        self._link.check_open()
        return lookup_prompts(self._link, requests)

    def lookup_unpin(self, lookup_id: str) -> None:
        """End the lease of a pinned lookup; an unknown one is ignored."""
        self._link.coordinator.complete([], [self._link.lease_names.for_lookup(lookup_id)])

    def clear(
        self,
        tokens: TokenSequence | None = None,
        *,
        locations: Sequence[str] | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> ClearResult:
        """Forget the prompt's chunks, or everything without `tokens`, on every rank; leased chunks are kept."""
        self._link.check_open()
        if tokens is None and request_configs:
            raise InvalidRequestError("request_configs say whose chunks of `tokens` to clear; no tokens were given")
        keys = None if tokens is None else prompt_of(self._link.hasher, tokens, request_configs).keys
        layout = self._link.world.layout
        if not names_cpu_tier(locations, argument="locations"):
            return ClearResult.nothing(layout)
        return ClearResult.of_memory(self._link.coordinator.clear(None if keys is None else pack_keys(keys)), layout)

    # -- the driver's own bytes ---------------------------------------------------------------------------------------

    def put(
        self,
        tokens: TokenSequence,
        shards: "Sequence[Sequence[torch.Tensor]]",
        start: int = 0,
        *,
        request_configs: RequestConfigs | None = None,
    ) -> int:
        """Store the shards' rows, which are those of ``tokens[start:]``; the leading tokens READY at return.

        ``shards[rank][group]`` is ``[kv_size, num_layers, num_tokens - start, hidden_dim]`` (MLA: ``shards[0]`` alone).
        `start` is a multiple of the chunk size; nothing is stored if what stands before it is not cached.
        """
        return _single(self.put_many([Request(tokens, shards=shards, start=start, request_configs=request_configs)]))

    def get(
        self, tokens: TokenSequence, start: int = 0, *, request_configs: RequestConfigs | None = None
    ) -> "tuple[int, list[list[torch.Tensor]]]":
        """Copies of the cached rows ``[start, num_tokens)`` of every holder rank, as ``(num_tokens, shards)``.

        `num_tokens` counts from 0; it is 0, and the shards are empty, if no row from `start` on is cached.
        """
        return _single(self.get_many([Request(tokens, start=start, request_configs=request_configs)]))

    def put_many(self, requests: Sequence[Request]) -> list[int | Exception]:
        """`put` of each request, in order."""
        self._check_native()
        return self._direct.put(requests)

    def get_many(
        self, requests: Sequence[Request]
    ) -> "list[tuple[int, list[list[torch.Tensor]]] | Exception]":
        """`get` of each request, in order."""
        self._check_native()
        return self._direct.get(requests)

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
        is_idle = self._direct.close(timeout_s=self._link.world.call_timeout_s)
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

    def _check_native(self) -> None:
        self._link.check_open()
        if ray.util.client.ray.is_connected():
            raise ClusterError(
                "put and get move bytes, which a Ray Client connection (ray://) is not fit for: run the driver on a "
                "node of the cluster, for example as a Ray job"
            )


def _single(results: "Sequence[Result | Exception]") -> Result:
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result
