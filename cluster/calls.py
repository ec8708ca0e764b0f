"""The calls of a cluster: store, retrieve, lookup, clear, put and get, singly and many at a time.

Apart from `client.py`, which makes and ends connections; `CacheCluster` is both. A prompt is named by its tokens, by a
`Prompt` made of them before, or by `hashes` and `offsets`: the 32-byte digests and the lengths of its chunks, for
callers who have them already.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar, overload

import ray

from lmcache_ray.chunking import Mask
from lmcache_ray.clearing import ClearResult, tiers_of
from lmcache_ray.connector.base import SlotMapping
from lmcache_ray.errors import ClusterError, InvalidRequestError, shown
from lmcache_ray.prompt import Prompt, RequestConfigs, Tokens
from lmcache_ray.tiers.hits import TierHits, prompt_hits

from .get_path import GetPath
from .link import ClusterLink
from .local_arenas import LocalArenas
from .lookups import lookup_prompts
from .messages import pack_keys
from .put_path import PutPath
from .requests import Request, prompt_of
from .row_calls import retrieve_rows, store_rows

if TYPE_CHECKING:
    import torch

    from .get_path import Copies
    from .views import CachedViews

Result = TypeVar("Result")


class ClusterCalls:
    """What can be asked of a cluster over one link. Thread-safe."""

    def __init__(self, link: ClusterLink) -> None:
        self._link = link
        self._arenas = LocalArenas(link)
        self._put_path = PutPath(link, self._arenas)
        self._get_path = GetPath(link, self._arenas)

    def prompt(self, tokens: Tokens, request_configs: RequestConfigs | None = None) -> Prompt:
        """The prompt of these tokens, hashed once for any number of calls, and `extended` when it has grown.

        Every call here that takes tokens takes it in their place.
        """
        self._link.check_open()
        return prompt_of(self._link.hasher, Request(tokens, request_configs=request_configs))

    # -- rows of the ranks' paged KV ----------------------------------------------------------------------------------

    def store(
        self,
        tokens: Tokens | None = None,
        slot_mapping: SlotMapping | None = None,
        *,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Mask | None = None,
        req_id: str | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> int:
        """Every rank stores its rows of the chunks nobody has yet; the leading tokens READY at return."""
        request = Request(
            tokens,
            slot_mapping,
            mask=mask,
            req_id=req_id,
            request_configs=request_configs,
            hashes=hashes,
            offsets=offsets,
        )
        return _single(self.store_many([request]))

    def retrieve(
        self,
        tokens: Tokens | None = None,
        slot_mapping: SlotMapping | None = None,
        *,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Mask | None = None,
        req_id: str | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> "torch.Tensor":
        """Every rank loads the cached prefix into its rows; bool ``[num_tokens]``, True where all ranks have it."""
        request = Request(
            tokens,
            slot_mapping,
            mask=mask,
            req_id=req_id,
            request_configs=request_configs,
            hashes=hashes,
            offsets=offsets,
        )
        return _single(self.retrieve_many([request]))

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
        tokens: Tokens | None = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        search_range: Sequence[str] | None = None,
        lookup_id: str | None = None,
        pin: bool = False,
        request_configs: RequestConfigs | None = None,
    ) -> int:
        """Leading tokens that every rank could load now; one message, whatever the number of ranks.

        ``pin=True`` with a `lookup_id` keeps them loadable until `lookup_unpin` or the lease's expiry. `search_range`
        names the tiers to look in. The arguments are those of `LMCacheEngine.lookup`.
        """
        lease_id = self._link.lease_names.for_lookup(lookup_id) if pin else None
        request = Request(tokens, request_configs=request_configs, hashes=hashes, offsets=offsets)
        tiers = tiers_of(search_range, argument="search_range")
        return _single(lookup_prompts(self._link, [request], lease_id=lease_id, tiers=tiers))

    def lookup_many(self, requests: Sequence[Request]) -> list[int | Exception]:
        """`lookup` of each request without a pin, in order."""
        self._link.check_open()
        return lookup_prompts(self._link, requests)

    def lookup_unpin(self, lookup_id: str) -> None:
        """End the lease of a pinned lookup; an unknown one is ignored."""
        self._link.coordinator.complete([], [self._link.lease_names.for_lookup(lookup_id)])

    def locate(self, tokens: Tokens, request_configs: RequestConfigs | None = None) -> TierHits:
        """Tokens of the leading cached run, by the fastest tier that has each chunk; not a use of them."""
        prompt = self.prompt(tokens, request_configs)
        tiers = self._link.coordinator.locate(pack_keys(prompt.keys), timeout_s=self._link.world.lookup_timeout_s)
        return prompt_hits(prompt, tiers)

    def pin(self, tokens: Tokens, request_configs: RequestConfigs | None = None) -> int:
        """Keep the leading cached chunks in memory and on disk until `unpin` of the same tokens; how many tokens.

        A pin outlives the client that asked for it. Pinning again pins what is cached then. Raises `CapacityError` if
        too little room would be left for stores.
        """
        prompt = self.prompt(tokens, request_configs)
        return prompt.tokens_in(self._link.coordinator.pin(pack_keys(prompt.keys)))

    def unpin(self, tokens: Tokens, request_configs: RequestConfigs | None = None) -> bool:
        """End a pin; False if there is none of these tokens."""
        return self._link.coordinator.unpin(pack_keys(self.prompt(tokens, request_configs).keys))

    def check_tiers(self, *, repair: bool = False, timeout_s: float = 600.0) -> list[str]:
        """Compare the disk's index with its files in both directions, reading every byte; what was found.

        With `repair`, files of no use are deleted, and chunks without a sound file on every rank are forgotten.
        Meaningful while nothing is stored.
        """
        self._link.check_open()
        return self._link.coordinator.check_tiers(repair=repair, timeout_s=timeout_s)

    def clear(
        self,
        tokens: Tokens | None = None,
        *,
        locations: Sequence[str] | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> ClearResult:
        """Forget the prompt's chunks, or everything without `tokens`, in the tiers that `locations` names (None: all).

        Leased chunks are kept. In a remote store that is for all clusters of this model and layout; if it does not
        answer, `StorageError` is raised, and the other tiers have been cleared.
        """
        self._link.check_open()
        if tokens is None and request_configs:
            raise InvalidRequestError("request_configs say whose chunks of `tokens` to clear; no tokens were given")
        request = Request(tokens, request_configs=request_configs)
        keys = None if tokens is None else prompt_of(self._link.hasher, request).keys
        tiers = tiers_of(locations, argument="locations")
        counts = self._link.coordinator.clear(None if keys is None else pack_keys(keys), tiers)
        return ClearResult.of(counts, self._link.world.layout)

    # -- the driver's own bytes ---------------------------------------------------------------------------------------

    def put(
        self,
        tokens: Tokens | None,
        shards: "Sequence[Sequence[torch.Tensor]]",
        start: int = 0,
        *,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> int:
        """Store the shards' rows, which are those of ``tokens[start:]``; the leading tokens READY at return.

        ``shards[rank][group]`` is ``[kv_size, num_layers, num_tokens - start, hidden_dim]`` (MLA: ``shards[0]`` alone).
        `start` is a multiple of the chunk size; nothing is stored if what stands before it is not cached.
        """
        request = Request(
            tokens, shards=shards, start=start, request_configs=request_configs, hashes=hashes, offsets=offsets
        )
        return _single(self.put_many([request]))

    @overload
    def get(
        self,
        tokens: Tokens | None = None,
        start: int = 0,
        *,
        views: Literal[False] = False,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> "Copies": ...

    @overload
    def get(
        self,
        tokens: Tokens | None = None,
        start: int = 0,
        *,
        views: Literal[True],
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> "CachedViews": ...

    def get(
        self,
        tokens: Tokens | None = None,
        start: int = 0,
        *,
        views: bool = False,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> "Copies | CachedViews":
        """The cached rows ``[start, num_tokens)`` of every holder rank, as ``(num_tokens, shards)``.

        ``shards[rank][group]`` is a tensor ``[kv_size, num_layers, rows, hidden_dim]``, a copy. `num_tokens` counts
        from 0; it is 0, and the shards are empty, if no row from `start` on is cached.

        With `views` no byte is copied: ``shards[rank][group]`` is a list of tensors, one per chunk, over the memory
        of the cache itself. The answer is to be closed, or used as a context manager: see `CachedViews`.
        """
        request = Request(tokens, start=start, request_configs=request_configs, hashes=hashes, offsets=offsets)
        if views is False:
            return _single(self.get_many([request]))
        return _single(self.get_many([request], views=views))

    def put_many(self, requests: Sequence[Request]) -> list[int | Exception]:
        """`put` of each request, in order."""
        self._check_native()
        return self._put_path.put(requests)

    @overload
    def get_many(self, requests: Sequence[Request], *, views: Literal[False] = False) -> "list[Copies | Exception]": ...

    @overload
    def get_many(self, requests: Sequence[Request], *, views: Literal[True]) -> "list[CachedViews | Exception]": ...

    def get_many(
        self, requests: Sequence[Request], *, views: bool = False
    ) -> "list[Copies | Exception] | list[CachedViews | Exception]":
        """`get` of each request, in order."""
        if type(views) is not bool:  # any text is true
            raise InvalidRequestError(f"views is {shown(views)}; accepted: True or False")
        self._check_native()
        return self._get_path.view(requests) if views else self._get_path.get(requests)

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
