"""What runs inside the ranks' processes, called by name through `CacheCluster.run_on_ranks`.

Apart from the parts, so that a rank imports this and nothing of the driver's.
"""

import hashlib
import time
from functools import lru_cache

import numpy as np
import torch

from benchmarks.measure import Case
from benchmarks.memory_copy import memory_copies
from cluster.rank_start import RankContext


@lru_cache(maxsize=1)
def _copies_of(nbytes: int) -> dict[str, Case]:
    """The two plain copies of this process, kept warm until another size is asked for."""
    return memory_copies(nbytes)


def memory_copy(context: RankContext, name: str, nbytes: int, begin_at: float) -> float:
    """Copy `nbytes` once; the seconds that took. Begins at `begin_at` of the clock that all processes share, or now."""
    copy = _copies_of(nbytes)[name]
    begin = _wait_until(begin_at)
    copy()
    return time.perf_counter() - begin


def broadcast_object(context: RankContext, obj: object, begin_at: float) -> float:
    """Rank 0 sends `obj` to the others; the seconds until this rank was done."""
    begin = _wait_until(begin_at)
    context.broadcast_fns.broadcast_object_fn(obj if context.worker_id == 0 else None, 0)
    return time.perf_counter() - begin


def broadcast_tensor(context: RankContext, nbytes: int, begin_at: float) -> float:
    """Rank 0 sends a tensor of `nbytes` to the others; the seconds until this rank was done."""
    tensor = torch.full((nbytes,), context.worker_id, dtype=torch.uint8)
    begin = _wait_until(begin_at)
    context.broadcast_fns.broadcast_fn(tensor, 0)
    time_s = time.perf_counter() - begin
    if int(tensor.max()) != 0:
        raise RuntimeError(f"rank {context.worker_id} got other bytes than rank 0 sent")
    return time_s


def retrieve(context: RankContext, tokens: list[int], rows: np.ndarray) -> int:
    """Call the rank's own engine, as code does that runs on every rank; the tokens it loaded."""
    return int(context.engine.retrieve(tokens, slot_mapping=rows).sum())


def _wait_until(begin_at: float) -> float:
    """Sleep until then, unless it is past; the time at return."""
    while (wait_s := begin_at - time.perf_counter()) > 0:
        time.sleep(wait_s)
    return time.perf_counter()


def digest(context: RankContext, rows: np.ndarray) -> str:
    """A digest of these rows of all layers of the rank's paged KV."""
    found = hashlib.blake2b()
    index = torch.from_numpy(rows)
    for cache in context.kv_caches:
        kv_size, num_blocks, block_size = cache.shape[:3]
        found.update(cache.view(torch.uint8).view(kv_size, num_blocks * block_size, -1)[:, index].numpy().data)
    return found.hexdigest()


def copy_facts(context: RankContext) -> tuple[int, bool]:
    """Threads of torch in this process, and whether rows are copied by the compiled means."""
    from lmcache_ray.connector.row_copy import compiled_copy

    return torch.get_num_threads(), compiled_copy() is not None
