"""The connector over the planes of some KV memory, whatever that memory is.

A *plane* is one layer's keys or values: rows of equal size in the KV memory, ``chunk_size`` rows in the shard. Values
are never interpreted: rows are copied as raw bytes, so NaN payloads and the sign of zero survive and one code path
serves all dtypes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from lmcache_ray.connector.row_copy import Plane, RowCopy, row_copy
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
