"""A chaos run's half in the rank: paged KV that is filled and compared, and the calls that all ranks make together.

Functions for `CacheCluster.run_on_ranks`. `first_row` is where a prompt's rows begin; all of them are its caller's.
"""

from collections.abc import Sequence

import numpy as np

from lmcache_ray.layout import Placement

from .expected_bytes import count_mismatches, expected_chunks
from .rank_start import RankContext
from .replay_rank import POISON
from .workload import BLOCK_SIZE, TraceRequest, prompt_tokens


def fill(context: RankContext, request: TraceRequest, first_row: int) -> None:
    """What a model would have computed."""
    keys = _keys(context, request)
    for chunk, rows in zip(_expected(context, keys), _rows(first_row, len(keys)), strict=True):
        context.rank.connector.scatter(chunk, rows, 0)


def poison(context: RankContext, request: TraceRequest, first_row: int) -> None:
    """What no chunk has, so that a copy that never happened shows as well as a wrong one."""
    chunk = np.full(context.rank.layout.slot_nbytes, POISON, dtype=np.uint8)
    for rows in _rows(first_row, len(request.hash_ids)):
        context.rank.connector.scatter(chunk, rows, 0)


def count_wrong(context: RankContext, request: TraceRequest, num_chunks: int, first_row: int) -> int:
    """The wrong bytes in the rows of the leading chunks."""
    keys = _keys(context, request)[:num_chunks]
    found = np.zeros(context.rank.layout.slot_nbytes, dtype=np.uint8)
    wrong = 0
    for expected, rows in zip(_expected(context, keys), _rows(first_row, num_chunks), strict=True):
        context.rank.connector.gather(found, rows)
        wrong += count_mismatches(found, expected)
    return wrong


def store(context: RankContext, request: TraceRequest, first_row: int) -> None:
    """By the rank's own engine."""
    fill(context, request, first_row)
    context.engine.store(prompt_tokens(request), slot_mapping=_all_rows(request, first_row))


def retrieve(context: RankContext, request: TraceRequest, first_row: int) -> tuple[int, int]:
    """By the rank's own engine: chunks that were hit, and wrong bytes in them."""
    poison(context, request, first_row)
    mask = context.engine.retrieve(prompt_tokens(request), slot_mapping=_all_rows(request, first_row))
    num_chunks = int(mask.sum()) // BLOCK_SIZE
    return num_chunks, count_wrong(context, request, num_chunks, first_row)


def broadcast(context: RankContext, words: Sequence[str], src: int) -> object:
    """Rank `src` sends its word; what this rank got."""
    _, broadcast_object_fn = context.broadcast_fns
    return broadcast_object_fn(words[context.worker_id], src)


def _keys(context: RankContext, request: TraceRequest) -> list[bytes]:
    return context.rank.world.hasher().keys(prompt_tokens(request))


def _expected(context: RankContext, keys: Sequence[bytes]) -> np.ndarray:
    is_shared = context.rank.world.layout.placement is Placement.FIRST_RANK
    return expected_chunks(keys, context.rank.layout, None if is_shared else context.worker_id)


def _all_rows(request: TraceRequest, first_row: int) -> np.ndarray:
    return np.arange(first_row, first_row + len(request.hash_ids) * BLOCK_SIZE)


def _rows(first_row: int, num_chunks: int) -> list[np.ndarray]:
    return list(np.arange(first_row, first_row + num_chunks * BLOCK_SIZE).reshape(num_chunks, BLOCK_SIZE))
