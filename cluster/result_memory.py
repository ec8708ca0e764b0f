"""Memory for the copies that `get` returns: used again when nothing refers to an earlier result any more.

Fresh memory costs several times as much as the copy into it, because the kernel hands it out zeroed, page by page. So
the memory of a result that has died waits here for the next one. It is idle only when every tensor over it, each view,
slice and NumPy array of one, and each storage is gone: torch keeps the object that it was given the memory by alive for
just so long. Meanwhile the kernel may take idle memory back if it needs some.
"""

import math
import mmap
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch

from lmcache_ray.connector.dense import empty_shard
from lmcache_ray.layout import ALIGNMENT, RankLayout
from lmcache_ray.torch_dtypes import to_torch_dtype

MAX_IDLE_NBYTES: Final = 2**30
_UNIT_NBYTES: Final = 2 * 2**20
"""Blocks are multiples of this; a smaller result is not worth one."""
_MAX_WASTE: Final = 2
"""A block serves a result of at least its size divided by this."""


class ResultMemory:
    """Thread-safe. At most `max_idle_nbytes` are kept for later."""

    def __init__(self, *, max_idle_nbytes: int = MAX_IDLE_NBYTES) -> None:
        self._max_idle_nbytes = max_idle_nbytes
        self._idle: deque[mmap.mmap] = deque()
        self._lock = threading.Lock()

    @property
    def idle_nbytes(self) -> int:
        """Bytes that wait for the next result."""
        return sum(map(len, tuple(self._idle)))

    def empty_shard(self, layout: RankLayout, num_tokens: int) -> list[torch.Tensor]:
        """Uninitialised tensors for one rank's shard of `num_tokens` tokens, one per layer group."""
        shapes = [(group.kv_size, group.num_layers, num_tokens, group.hidden_dim) for group in layout.groups]
        dtypes = [to_torch_dtype(group.dtype) for group in layout.groups]
        offsets, end = [], 0
        for group in layout.groups:
            offsets.append(end)
            end += -(-group.token_nbytes * num_tokens // ALIGNMENT) * ALIGNMENT
        if end < _UNIT_NBYTES:
            return empty_shard(layout, num_tokens)
        block = np.asarray(_Block(self._take(end), self._give_back))
        return [
            torch.frombuffer(block, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
            for shape, dtype, offset in zip(shapes, dtypes, offsets, strict=True)
        ]

    def close(self) -> None:
        """Let idle memory go, and keep none from now on."""
        self._max_idle_nbytes = 0
        self._idle.clear()

    def _take(self, nbytes: int) -> mmap.mmap:
        """The smallest idle block that fits, or a new one."""
        with self._lock:
            idle = []
            with suppress(IndexError):
                while True:  # a block that is given back meanwhile comes in at the other end, or is taken too
                    idle.append(self._idle.popleft())
            fitting = [block for block in idle if nbytes <= len(block) <= _MAX_WASTE * max(nbytes, _UNIT_NBYTES)]
            best = min(fitting, key=len, default=None)
            self._idle.extend(block for block in idle if block is not best)
        return _new_block(nbytes) if best is None else best

    def _give_back(self, block: mmap.mmap) -> None:
        """Called by finalizers, at any moment and in any thread: takes no lock."""
        if self.idle_nbytes + len(block) <= self._max_idle_nbytes:
            with suppress(OSError):  # a kernel that takes nothing back in this way
                block.madvise(mmap.MADV_FREE)
            self._idle.append(block)


class _Block:
    """A block as NumPy sees it. Arrays and tensors over it keep this alive; it gives the block back when it dies."""

    def __init__(self, block: mmap.mmap, give_back: Callable[[mmap.mmap], None]) -> None:
        self._block = block
        self._give_back = give_back
        address = np.frombuffer(block, dtype=np.uint8).ctypes.data
        self.__array_interface__: dict[str, Any] = {
            "version": 3, "typestr": "|u1", "shape": (len(block),), "data": (address, False),
        }

    def __del__(self) -> None:
        self._give_back(self._block)


def _new_block(nbytes: int) -> mmap.mmap:
    # Not of huge pages: where memory is in pieces, the kernel moves it about for each of them, which took four times
    # as long as many small pages did.
    return mmap.mmap(-1, -(-nbytes // _UNIT_NBYTES) * _UNIT_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
