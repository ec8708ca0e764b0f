"""The protocol of a connector, and the check of the slot mapping that every connector relies on.

A connector knows an engine's KV memory; it knows nothing of keys, plans or generations. The shard gives it one slot's
bytes at a time.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, TypeAlias, Union

import numpy as np
from numpy.typing import NDArray

from lmcache_ray.arrays import AnyArray, integer_of, is_torch_tensor, packed_integers, tensor_values
from lmcache_ray.errors import InvalidRequestError, shown

if TYPE_CHECKING:
    import torch

_SLOTS_PER_ROW_TO_MARK: Final = 128
"""In a KV memory that has more slots for each row in question, sorting the rows is faster than marking the slots."""


class KVConnector(Protocol):
    """Copies the rows of one rank's paged KV into and out of a shard's bytes.

    `shard` is uint8 ``[slot_nbytes]`` in the layout of `layout.RankLayout`; `rows` is int64, unique and within
    ``[0, num_slots)`` (`checked_slot_mapping` has seen to it).
    """

    @property
    def num_slots(self) -> int:
        """Token rows that the KV memory has: blocks times block size."""
        ...

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        """Copy KV rows `rows` into the shard's rows ``0 .. len(rows)``."""
        ...

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        """Copy the shard's rows ``first_row .. first_row + len(rows)`` into KV rows `rows`; touch no other row."""
        ...


SlotMapping: TypeAlias = Union[Sequence[int], NDArray[np.integer], "torch.Tensor"]
"""One KV row per token. Tensors may be of any device."""


def checked_slot_mapping(slot_mapping: SlotMapping, *, num_tokens: int, num_slots: int) -> NDArray[np.int64]:
    """`slot_mapping` as contiguous int64 ``[num_tokens]``: unique rows within ``[0, num_slots)``.

    The result may share memory with `slot_mapping`. Raises `InvalidRequestError` that names the first offending token.
    """
    rows = _as_array(slot_mapping, num_slots)
    if rows.ndim == 1 and rows.size == 0:
        rows = rows.astype(np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"slot_mapping must be one-dimensional integers; got shape {rows.shape} of {rows.dtype}"
        )
    if len(rows) != num_tokens:
        raise InvalidRequestError(f"slot_mapping has {len(rows)} entries for {num_tokens} tokens; one each is needed")
    if num_tokens and (rows.min() < 0 or rows.max() >= num_slots):
        token = int(((rows < 0) | (rows >= num_slots)).argmax())
        _refuse_row(token, int(rows[token]), num_slots)
    rows = np.ascontiguousarray(rows, dtype=np.int64)
    if not _all_different(rows, num_slots):
        _, first_uses = np.unique(rows, return_index=True)
        repeats = np.ones(num_tokens, dtype=bool)
        repeats[first_uses] = False
        token = int(repeats.argmax())
        raise InvalidRequestError(f"slot_mapping[{token}] is {int(rows[token])}, which an earlier token already uses")
    return rows


def _as_array(slot_mapping: SlotMapping, num_slots: int) -> AnyArray:
    if slot_mapping is None:
        raise InvalidRequestError("slot_mapping is missing: one KV row per token is needed")
    if is_torch_tensor(slot_mapping):
        return tensor_values(slot_mapping, "slot_mapping")
    try:
        if isinstance(slot_mapping, list | tuple):
            return packed_integers(slot_mapping)
        return np.asarray(slot_mapping)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(slot_mapping, list | tuple):
            for token, value in enumerate(slot_mapping):
                row = integer_of(value)
                if row is None or not 0 <= row < num_slots:
                    _refuse_row(token, value, num_slots)
        raise InvalidRequestError(f"slot_mapping cannot be read as one integer per token: {error}") from error


def _refuse_row(token: int, row: object, num_slots: int) -> NoReturn:
    shown_row = row if type(row) is int else shown(row)
    raise InvalidRequestError(f"slot_mapping[{token}] is {shown_row}; the paged KV has rows 0 to {num_slots - 1}")


def _all_different(rows: NDArray[np.int64], num_slots: int) -> bool:
    """Whether no row stands twice in `rows`, which are all within ``[0, num_slots)``."""
    if num_slots <= _SLOTS_PER_ROW_TO_MARK * len(rows):
        seen = np.zeros(num_slots, dtype=bool)
        seen[rows] = True
        return int(np.count_nonzero(seen)) == len(rows)
    ordered = np.sort(rows)
    return not (ordered[1:] == ordered[:-1]).any()
