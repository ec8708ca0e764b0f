"""`WorldEngine`: the engine of one rank that acts for all ranks of an in-process world.

For a process that hosts a whole world (the standalone mode) and wants to call it as one: each call runs on every rank
at once, in threads, as separate processes would run it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from typing import TypeVar

import torch

from lmcache_ray.chunking import Mask
from lmcache_ray.connector.base import SlotMapping
from lmcache_ray.connector.paged import KVCaches
from lmcache_ray.engine import EngineParts, LMCacheEngine
from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.prompt import RequestConfigs, Tokens

Result = TypeVar("Result")


class WorldEngine(LMCacheEngine):
    """Rank `worker_id`'s engine; `store` and `retrieve` act for the world, `lookup` and `clear` always did.

    Each rank has one thread, and calls reach all of them in the same order, whatever threads they come from: the
    ranks of a first-rank world must take the same steps. `parts` are what every rank's engine is made of. `kvcaches`
    is one list of tensors per rank, or None for `kv_caches`, the world's own; in a world of one rank the list of
    tensors itself is accepted too.
    """

    def __init__(self, parts: Sequence[EngineParts], worker_id: int, kv_caches: Sequence[KVCaches]) -> None:
        super().__init__(replace(parts[worker_id], on_close=self._close_ranks))
        self._engines = tuple(map(LMCacheEngine, parts))
        self._kv_caches = list(kv_caches)
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank{rank}") for rank in range(len(parts))]
        self._order = threading.Lock()

    @property
    def engines(self) -> tuple[LMCacheEngine, ...]:
        """Every rank's own engine."""
        return self._engines

    def store(
        self,
        tokens: Tokens | None = None,
        hashes: Sequence[bytes] | None = None,
        offsets: Sequence[int] | None = None,
        mask: Mask | None = None,
        *,
        kvcaches: Sequence[KVCaches] | KVCaches | None = None,
        slot_mapping: SlotMapping,
        req_id: str | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> int:
        """Store every rank's KV; returns the leading tokens READY when the last rank has ended."""

        self._check_open()
        prompt = self._read(tokens, hashes, offsets, request_configs)

        def on(engine: LMCacheEngine, caches: KVCaches) -> int:
            return engine.store(prompt, mask=mask, kvcaches=caches, slot_mapping=slot_mapping, req_id=req_id)

        return max(self._on_every_rank(on, kvcaches))

    def retrieve(
        self,
        tokens: Tokens,
        mask: Mask | None = None,
        *,
        kvcaches: Sequence[KVCaches] | KVCaches | None = None,
        slot_mapping: SlotMapping,
        req_id: str | None = None,
        request_configs: RequestConfigs | None = None,
    ) -> torch.Tensor:
        """Retrieve on every rank; True where the row is good on all of them."""

        self._check_open()
        prompt = self._read(tokens, None, None, request_configs)

        def on(engine: LMCacheEngine, caches: KVCaches) -> torch.Tensor:
            return engine.retrieve(prompt, mask, kvcaches=caches, slot_mapping=slot_mapping, req_id=req_id)

        return reduce(torch.logical_and, self._on_every_rank(on, kvcaches))

    def close(self) -> None:
        """Close every rank's engine. Idempotent. Calls that have begun on a rank end by themselves."""
        with self._order:
            super().close()

    def _close_ranks(self) -> None:
        for engine in self._engines:
            engine.close()
        for thread in self._threads:
            thread.shutdown(wait=False)

    def _on_every_rank(
        self, call: Callable[[LMCacheEngine, KVCaches], Result], kvcaches: Sequence[KVCaches] | KVCaches | None
    ) -> list[Result]:
        """Every rank runs to its end before the first failure, by rank, is raised."""
        per_rank = self._per_rank(kvcaches)
        with self._order:
            self._check_open()
            futures = [
                thread.submit(call, engine, caches)
                for thread, engine, caches in zip(self._threads, self._engines, per_rank, strict=True)
            ]
        failures = [error for future in futures if (error := future.exception()) is not None]
        if failures:
            raise failures[0]
        return [future.result() for future in futures]

    def _per_rank(self, kvcaches: Sequence[KVCaches] | KVCaches | None) -> list[KVCaches]:
        if kvcaches is None:
            return self._kv_caches
        ranks, is_list = len(self._engines), isinstance(kvcaches, Sequence)
        if ranks == 1 and (isinstance(kvcaches, Mapping) or (is_list and all(map(torch.is_tensor, kvcaches)))):
            return [kvcaches]  # type: ignore[list-item]  # checked just now
        if not is_list or len(kvcaches) != ranks or any(map(torch.is_tensor, kvcaches)):
            got = f"{len(kvcaches)} items" if is_list else type(kvcaches).__name__
            raise InvalidRequestError(f"kvcaches must be one list of tensors for each of {ranks} ranks; got {got}")
        return list(kvcaches)  # type: ignore[arg-type]  # checked just now
