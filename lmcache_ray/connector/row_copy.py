"""The two means of copying rows between a shard and planes: a compiled one and NumPy, which give the same bytes.

The compiled one (`_row_copy.c`) works at the speed of memory and without the interpreter's lock. It is built with the
package where there is a C compiler; where there is none, NumPy does the same at about half the speed or less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

import numpy as np

from lmcache_ray.compiled import compiled_module

_FORMAT: Final = 1  # of the compiled module's arguments; see `_row_copy.c`


@dataclass(frozen=True, slots=True)
class Plane:
    """One layer's keys or values.

    `rows` is void ``[num_rows]`` in the KV memory, one item a row, any stride; `offset` is where the shard's row 0 of
    this plane begins, in bytes. The shard's rows lie one after the other.
    """

    rows: np.ndarray
    offset: int
    row_nbytes: int


class RowCopy(Protocol):
    """Copies rows of a set of planes. Rows are as `KVConnector` promises them: int64, unique, within the planes."""

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        """Copy KV rows `rows` into the shard's rows ``0 .. len(rows)``."""
        ...

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        """Copy the shard's rows ``first_row .. first_row + len(rows)`` into KV rows `rows`; touch no other row."""
        ...


def row_copy(planes: Sequence[Plane]) -> RowCopy:
    """The fastest copy that there is here."""
    compiled = compiled_copy()
    return NumPyRowCopy(planes) if compiled is None else CompiledRowCopy(planes, compiled)


class NumPyRowCopy:
    """Plane by plane, each with one call of NumPy."""

    def __init__(self, planes: Sequence[Plane]) -> None:
        self._planes = tuple(planes)

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        """See `RowCopy`."""
        run = _as_run(rows)
        for plane in self._planes:
            target = _shard_rows(shard, plane, 0, len(rows))
            if run is not None:
                target[:] = plane.rows[run]
            else:  # "clip" because "raise" would go through a buffer; the rows are known to be in range
                np.take(plane.rows, rows, out=target, mode="clip")

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        """See `RowCopy`."""
        run = _as_run(rows)
        for plane in self._planes:
            plane.rows[rows if run is None else run] = _shard_rows(shard, plane, first_row, len(rows))


class CompiledModule(Protocol):
    """What `_row_copy.c` defines. `planes` is its packed table; out of range rows are a `ValueError`, before a copy."""

    FORMAT: int

    def gather(self, planes: bytes, rows: np.ndarray, shard: np.ndarray, first_row: int, streaming: bool, /) -> None:
        """Copy KV rows into the shard from its row `first_row` on."""
        ...

    def scatter(self, planes: bytes, rows: np.ndarray, shard: np.ndarray, first_row: int, streaming: bool, /) -> None:
        """Copy the shard's rows from `first_row` on into KV rows."""
        ...


class CompiledRowCopy:
    """All planes in one call. `streaming` False forgoes the stores that pass the caches by."""

    def __init__(self, planes: Sequence[Plane], compiled: CompiledModule, *, streaming: bool = True) -> None:
        self._compiled = compiled
        self._streaming = streaming
        self._borrowed = [plane.rows for plane in planes]  # the table has their addresses
        self._table = np.array([_packed(plane) for plane in planes], dtype=np.int64).tobytes()

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        """See `RowCopy`."""
        self._compiled.gather(self._table, np.ascontiguousarray(rows), shard, 0, self._streaming)

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        """See `RowCopy`."""
        self._compiled.scatter(self._table, np.ascontiguousarray(rows), shard, first_row, self._streaming)


def compiled_copy() -> CompiledModule | None:
    """The compiled copies; None, which the log says once, where they were not built."""
    return cast(CompiledModule | None, compiled_module("lmcache_ray.connector._row_copy", form=_FORMAT))


def _packed(plane: Plane) -> tuple[int, int, int, int, int]:
    address: int = plane.rows.__array_interface__["data"][0]
    return address, len(plane.rows), plane.rows.strides[0], plane.offset, plane.row_nbytes


def _shard_rows(shard: np.ndarray, plane: Plane, first_row: int, num_rows: int) -> np.ndarray:
    """Void ``[num_rows]`` of the shard."""
    start = plane.offset + first_row * plane.row_nbytes
    return shard[start : start + num_rows * plane.row_nbytes].view(plane.rows.dtype)


def _as_run(rows: np.ndarray) -> slice | None:
    """The slice that equals `rows`, if they are consecutive."""
    first, count = int(rows[0]) if len(rows) else 0, len(rows)
    if count == 0 or (int(rows[-1]) - first == count - 1 and bool((np.diff(rows) == 1).all())):
        return slice(first, first + count)
    return None
