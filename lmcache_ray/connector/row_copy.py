"""The two means of copying rows between a shard and planes: a compiled one and NumPy, which give the same bytes.

The compiled one (`_row_copy.c`) works at the speed of memory and without the interpreter's lock. It is built with the
package where there is a C compiler; where there is none, NumPy does the same at about half the speed or less.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

logger = logging.getLogger(__name__)

_FORMAT: Final = 1  # of the compiled module's arguments; see `_row_copy.c`
_NAME: Final = "lmcache_ray.connector._row_copy"


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
    """The fastest copy that there is here. Says once in the log if that is not the compiled one."""
    compiled = compiled_module()
    if compiled is None:
        _say_that_it_is_slow()
        return NumPyRowCopy(planes)
    return CompiledRowCopy(planes, compiled)


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


@cache
def compiled_module() -> CompiledModule | None:
    """The compiled copies; None where the package was installed without a compiler.

    Looked for beside this file, then in the installations on the path: a source tree that was copied to another place,
    as Ray copies a job's working directory, comes without its compiled part.
    """
    folders = [Path(__file__).parent, *(Path(entry, *_NAME.split(".")[:-1]) for entry in sys.path)]
    spec = PathFinder.find_spec(_NAME, [str(folder) for folder in folders])
    if spec is None:
        return None
    return _load(spec)


def _load(spec: "ModuleSpec") -> CompiledModule | None:
    module = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    if getattr(module, "FORMAT", None) != _FORMAT:
        logger.warning("%s was built from another version and is not used; install the package again", spec.origin)
        return None
    return cast(CompiledModule, module)


@cache
def _say_that_it_is_slow() -> None:
    logger.warning(
        "rows are copied by NumPy, which is slower: %s was not built; install a C compiler and the package again", _NAME
    )


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
