"""`LMCacheEngine`: store, retrieve and lookup of one rank, over an index, a shard and a way to retrieve.

The engine is the thin shell around three decisions made elsewhere: `prompt.py` cuts the prompt and names its chunks,
the index says which chunks go where, and `shard.py` moves the bytes. It runs the same in one process and inside a
rank's actor; only the parts it is built from differ (`build.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lmcache_ray.chunking import Mask, masked_start
from lmcache_ray.clearing import ClearResult, tiers_of
from lmcache_ray.connector.base import KVConnector, SlotMapping, checked_slot_mapping
from lmcache_ray.connector.paged import KVCaches, PagedConnectors
from lmcache_ray.errors import ClosedError, InvalidRequestError
from lmcache_ray.index_service import IndexClient, LeaseNames
from lmcache_ray.keys import ChunkHasher
from lmcache_ray.layout import WorldLayout
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.prompt import Prompt, RequestConfigs, Tokens, loadable_tokens, read_prompt
from lmcache_ray.retrieval import Retrieval, RetrieveCall
from lmcache_ray.shard import EngineShard
from lmcache_ray.tiers.hits import TierHits, prompt_hits


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of. `shard` is None on a rank that holds no chunks: its stores copy nothing.

    `connector`, when given, is used by calls that name no `kvcaches`; `on_close` gives back what was built for this
    engine alone; `instance_id` is the name that a user gave this instance; `problems` says what is out of order.
    """

    metadata: LMCacheMetadata
    layout: WorldLayout
    hasher: ChunkHasher
    index: IndexClient
    shard: EngineShard | None
    retrieval: Retrieval
    lease_names: LeaseNames
    connector: KVConnector | None = None
    instance_id: str | None = None
    problems: Callable[[], list[str]] = list
    on_close: Callable[[], None] = lambda: None


class LMCacheEngine:
    """The cache of one rank. Thread-safe; after `close` every call but `is_healthy` raises `ClosedError`.

    Wherever a call takes `tokens`, a `Prompt` made of them before does as well, and saves hashing them again.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._layout = parts.layout.ranks[parts.metadata.worker_id]
        self._paged = PagedConnectors(self._layout)
        self._closed = False

    @property
    def metadata(self) -> LMCacheMetadata:
        """The metadata this rank was built from."""
        return self._parts.metadata

    @property
    def chunk_size(self) -> int:
        """Tokens of one chunk."""
        return self._layout.chunk_size

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        named = f" {self._parts.instance_id!r}" if self._parts.instance_id else ""
        return f"<{type(self).__name__}{named} rank {self.metadata.worker_id} of {self.metadata.world_size}, {state}>"

    def prompt(self, tokens: Tokens, request_configs: RequestConfigs | None = None) -> Prompt:
        """The prompt of these tokens, hashed once for any number of calls, and `extended` when it has grown.

        It is good for every engine and cluster client that makes keys alike: of the same model, revision, generation
        and chunk size.
        """
        self._check_open()
        return self._read(tokens, None, None, request_configs)

    def store(
        self,
        tokens: Tokens | None = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Mask | None = None,
        *,
        kvcaches: KVCaches | None = None,
        slot_mapping: SlotMapping,
        req_id: str | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> int:
        """Copy the prompt's chunks that nobody has yet out of `kvcaches`.

        `mask` (bool ``[num_tokens]``, False then True) leaves out leading chunks: their number of tokens must be a
        multiple of `chunk_size`, and they must be cached already, else nothing is stored. Returns the leading tokens
        that are READY (held by every rank) at return, those cached before included. `req_id` is accepted as LMCache's
        engine does, and changes and shows nothing. Raises `InvalidRequestError` or `LayoutError` for arguments that
        cannot be meant.
        """
        self._check_open()
        prompt = self._read(tokens, hashes, offsets, request_configs)
        start = masked_start(mask, prompt.num_tokens, self.chunk_size, aligned=True)
        connector = self._connect(kvcaches)
        rows = checked_slot_mapping(slot_mapping, num_tokens=prompt.num_tokens, num_slots=connector.num_slots)
        plan = self._parts.index.prepare_store(
            prompt.keys, start=start // self.chunk_size, rank=self.metadata.worker_id
        )
        if not plan.refs or self._parts.shard is None:
            return prompt.tokens_in(plan.num_ready)
        done = [False] * len(plan.refs)
        try:
            done = self._parts.shard.store(plan.refs, prompt.rows(rows, plan.positions), connector)
        finally:
            num_ready = self._parts.index.complete_store(plan, prompt.keys, {self.metadata.worker_id: done})
        return prompt.tokens_in(num_ready)

    def retrieve(
        self,
        tokens: Tokens,
        mask: Mask | None = None,
        *,
        kvcaches: KVCaches | None = None,
        slot_mapping: SlotMapping,
        req_id: str | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> torch.Tensor:
        """Copy the cached prefix into `kvcaches`, from the first True of `mask` on (anywhere, not only on chunks).

        Returns bool ``[num_tokens]`` on the CPU: True where the row now holds the cached KV. Rows of tokens below the
        start are never written; rows beyond the last True may hold anything. The chunks are pinned by this call for
        itself while it reads: it neither needs nor ends the lease of a lookup. `req_id` is accepted as LMCache's engine
        does, and changes and shows nothing.

        In a first-rank world every rank must call this for the same prompts in the same order; a failure at rank 0 is
        a miss on the others.
        """
        self._check_open()
        return self._parts.retrieval.run(
            partial(self._read_call, tokens, mask, kvcaches, slot_mapping, request_configs)
        )

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
        """Leading tokens that every rank could retrieve now, as far as this engine's index knows.

        The one exception are ranks above 0 of an MLA world that were built alone (`build_engine` with broadcast
        functions): their index is empty, so they find 0, although `retrieve` delivers. There, ask rank 0.

        With ``pin=True`` and a `lookup_id` they stay retrievable until `lookup_unpin` or the lease's expiry; asking
        again under the same id renews the lease for what is found then. `search_range` names the tiers to look in.
        """
        self._check_open()
        prompt = self._read(tokens, hashes, offsets, request_configs)
        lease_id = self._parts.lease_names.for_lookup(lookup_id) if pin else None
        tiers = tiers_of(search_range, argument="search_range")
        if not prompt.keys and lease_id is None:
            return 0
        return prompt.tokens_in(self._parts.index.lookup(prompt.keys, lease_id, tiers))

    def locate(self, tokens: Tokens, request_configs: RequestConfigs | None = None) -> TierHits:
        """Tokens of the leading cached run, by the fastest tier that has each chunk; not a use of them."""
        prompt = self.prompt(tokens, request_configs)
        return prompt_hits(prompt, self._parts.index.locate(prompt.keys))

    def pin(self, tokens: Tokens, request_configs: RequestConfigs | None = None) -> int:
        """Keep the leading cached chunks in memory and on disk until `unpin` of the same tokens; how many tokens.

        Pinning again pins what is cached then. Raises `CapacityError` if too little room would be left for stores.
        """
        prompt = self.prompt(tokens, request_configs)
        return prompt.tokens_in(self._parts.index.pin(prompt.keys))

    def unpin(self, tokens: Tokens, request_configs: RequestConfigs | None = None) -> bool:
        """End a pin; False if there is none of these tokens."""
        return self._parts.index.unpin(self.prompt(tokens, request_configs).keys)

    def lookup_unpin(self, lookup_id: str) -> None:
        """End the lease of a pinned lookup; an unknown or ended one is ignored."""
        self._check_open()
        self._parts.index.release([self._parts.lease_names.for_lookup(lookup_id)])

    def loadable(self, tokens: Tokens, num_computed: int, request_configs: RequestConfigs | None = None) -> int:
        """Tokens that `retrieve` may still load when `num_computed` leading ones are there: never the whole prompt."""
        prompt = self.prompt(tokens, request_configs)
        num_hits = self.lookup(prompt)
        num_loadable = loadable_tokens(num_hits, prompt.num_tokens, num_computed)
        return num_loadable if num_hits - num_computed >= self._parts.retrieval.min_tokens else 0

    def clear(
        self,
        tokens: Tokens | None = None,
        locations: Sequence[str] | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> ClearResult:
        """Forget the prompt's chunks, or everything without `tokens`, on every rank; leased chunks are kept."""
        self._check_open()
        keys = None if tokens is None else self._read(tokens, None, None, request_configs).keys
        if tokens is None and request_configs:
            raise InvalidRequestError("request_configs say whose chunks of `tokens` to clear; no tokens were given")
        tiers = tiers_of(locations, argument="locations")
        return ClearResult.of(self._parts.index.clear(keys, tiers), self._parts.layout)

    def problems(self) -> list[str]:
        """What is out of order, a sentence each: a tier below memory, whose chunks are misses meanwhile."""
        self._check_open()
        return self._parts.problems()

    def is_healthy(self) -> bool:
        """True while the engine is open and nothing is out of order; see `problems`."""
        return not self._closed and not self._parts.problems()

    def close(self) -> None:
        """Give the arena back. Idempotent."""
        if not self._closed:
            self._closed = True
            self._parts.on_close()

    # -- arguments ----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"engine of rank {self.metadata.worker_id} is closed")

    def _read_call(
        self,
        tokens: Tokens,
        mask: Mask | None,
        kvcaches: KVCaches | None,
        slot_mapping: SlotMapping,
        request_configs: RequestConfigs | None,
    ) -> RetrieveCall:
        prompt = self._read(tokens, None, None, request_configs)
        start = masked_start(mask, prompt.num_tokens, self.chunk_size, aligned=False)
        connector = self._connect(kvcaches)
        rows = checked_slot_mapping(slot_mapping, num_tokens=prompt.num_tokens, num_slots=connector.num_slots)
        return RetrieveCall(prompt, start, start // self.chunk_size, rows, connector)

    def _read(
        self,
        tokens: Tokens | None,
        hashes: Sequence[bytes] | None,
        offsets: Sequence[int] | None,
        request_configs: RequestConfigs | None,
    ) -> Prompt:
        return read_prompt(self._parts.hasher, tokens, hashes=hashes, offsets=offsets, request_configs=request_configs)

    def _connect(self, kvcaches: KVCaches | None) -> KVConnector:
        if kvcaches is not None:
            return self._paged.of(kvcaches)
        if self._parts.connector is None:
            raise InvalidRequestError("kvcaches is missing: one tensor per layer is needed")
        return self._parts.connector
