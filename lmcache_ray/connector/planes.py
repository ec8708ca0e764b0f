"""The connector over the planes of some KV memory, whatever that memory is.

A *plane* is one layer's keys or values: rows of equal size in the KV memory, ``chunk_size`` rows in the shard. Values
are never interpreted: rows are copied as raw bytes, so NaN payloads and the sign of zero survive and one code path
serves all dtypes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from lmcache_ray.arrays import has_memory
from lmcache_ray.connector.row_copy import Plane, RowCopy, row_copy
from lmcache_ray.errors import LayoutError
from lmcache_ray.layout import RankLayout


class PlaneConnector:
    """A `KVConnector` over planes. `copies` makes the means of copying, by default the fastest that there is."""

    def __init__(
        self, planes: Iterable[Plane], *, copies: Callable[[Sequence[Plane]], RowCopy] = row_copy
    ) -> None:
        all_planes = tuple(planes)
        self._num_slots = min(len(plane.rows) for plane in all_planes)
        self._copy = copies(all_planes)

    @property
    def num_slots(self) -> int:
        """Rows of the smallest plane."""
        return self._num_slots

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        """Copy KV rows `rows` into the shard's first rows."""
        self._copy.gather(shard, rows)

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        """Copy the shard's rows from `first_row` on into KV rows `rows`."""
        self._copy.scatter(shard, rows, first_row)


def row_type(row_nbytes: int) -> np.dtype:
    """The item type of a plane's rows: opaque bytes."""
    return np.dtype((np.void, row_nbytes))


def planes_of_group(layout: RankLayout, group_index: int, rows: Sequence[Sequence[np.ndarray]]) -> Iterator[Plane]:
    """The planes of one layer group; ``rows[kv][layer]`` is void ``[num_rows]`` of the group's layers in order."""
    group, offset = layout.groups[group_index], layout.group_offsets[group_index]
    plane_nbytes = layout.chunk_size * group.row_nbytes
    for kv in range(group.kv_size):
        for layer in range(group.num_layers):
            plane_offset = offset + (kv * group.num_layers + layer) * plane_nbytes
            yield Plane(rows[kv][layer], plane_offset, group.row_nbytes)


def check_memory(tensor: torch.Tensor, name: str) -> None:
    """Raise `LayoutError` that begins with `name` unless this is a dense tensor whose memory, the CPU's, is there."""
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        layout = "nested" if tensor.is_nested else str(tensor.layout)
        raise LayoutError(f"{name} is a {layout} tensor; only a dense one has rows that can be copied")
    if tensor.device.type != "cpu":
        raise LayoutError(f"{name} is on {tensor.device}; only CPU memory is copied")
    try:
        is_gone = not has_memory(tensor)
    except RuntimeError as error:
        raise LayoutError(f"{name} cannot be read as plain memory: {error}") from error
    if is_gone:
        raise LayoutError(f"{name} has shape {list(tensor.shape)} but not all of its memory any more")


def bytes_of(tensor: torch.Tensor, name: str) -> np.ndarray:
    """The memory of a tensor that has passed `check_memory` and whose last dimension is dense, which counts bytes here.

    Raises `LayoutError` that begins with `name` for a tensor that only stands for one, or whose bytes mean their
    negative.
    """
    try:
        return tensor.detach().view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:
        raise LayoutError(f"{name} cannot be read as plain memory: {error}") from error
