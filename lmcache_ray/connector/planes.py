"""Row copies between a shard's bytes and the planes of some KV memory, whatever that memory is.

A *plane* is one layer's keys or values: rows of equal size in the KV memory, ``chunk_size`` rows in the shard. Values
are never interpreted: rows are copied as raw bytes, so NaN payloads and the sign of zero survive and one code path
serves all dtypes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lmcache_ray.layout import RankLayout


@dataclass(frozen=True, slots=True)
class Plane:
    """`rows` is void ``[num_rows]``, one item a row; `offset` is where the shard's row 0 begins, in bytes."""

    rows: np.ndarray
    offset: int
    row_nbytes: int


class PlaneConnector:
    """A `KVConnector` over planes."""

    def __init__(self, planes: Iterable[Plane]) -> None:
        self._planes = tuple(planes)
        self._num_slots = min(len(plane.rows) for plane in self._planes)

    @property
    def num_slots(self) -> int:
        """Rows of the smallest plane."""
        return self._num_slots

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        """Copy KV rows `rows` into the shard's first rows."""
        num_rows = len(rows)
        run = _as_run(rows)
        for plane in self._planes:
            target = shard[plane.offset : plane.offset + num_rows * plane.row_nbytes].view(plane.rows.dtype)
            if run is not None:
                target[:] = plane.rows[run]
            else:  # "clip" because "raise" would go through a buffer; the rows are known to be in range
                np.take(plane.rows, rows, out=target, mode="clip")

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        """Copy the shard's rows from `first_row` on into KV rows `rows`."""
        num_rows = len(rows)
        run = _as_run(rows)
        for plane in self._planes:
            start = plane.offset + first_row * plane.row_nbytes
            source = shard[start : start + num_rows * plane.row_nbytes].view(plane.rows.dtype)
            plane.rows[rows if run is None else run] = source


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


def _as_run(rows: np.ndarray) -> slice | None:
    """The slice that equals `rows`, if they are consecutive."""
    first, count = int(rows[0]) if len(rows) else 0, len(rows)
    if count == 0 or (int(rows[-1]) - first == count - 1 and bool((np.diff(rows) == 1).all())):
        return slice(first, first + count)
    return None
