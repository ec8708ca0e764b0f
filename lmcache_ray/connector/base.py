"""The protocol of a connector, and the check of the slot mapping that every connector relies on.

A connector knows an engine's KV memory; it knows nothing of keys, plans or generations. The shard gives it one slot's
bytes at a time.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lmcache_ray.errors import InvalidRequestError


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


SlotMapping = Sequence[int] | np.ndarray
"""One KV row per token; torch integer tensors are accepted wherever this stands."""


def checked_slot_mapping(slot_mapping: SlotMapping, *, num_tokens: int, num_slots: int) -> np.ndarray:
    """`slot_mapping` as int64 ``[num_tokens]``: unique rows within ``[0, num_slots)``.

    Raises `InvalidRequestError` that names the first offending token.
    """
    if slot_mapping is None:
        raise InvalidRequestError("slot_mapping is missing: one KV row per token is needed")
    try:
        rows = np.asarray(slot_mapping)
    except (TypeError, ValueError) as error:  # lists of unequal lengths, tensors that are not in CPU memory
        raise InvalidRequestError(f"slot_mapping cannot be read as one integer per token: {error}") from error
    if rows.ndim == 1 and rows.size == 0:
        rows = rows.astype(np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"slot_mapping must be one-dimensional integers; got shape {rows.shape} of {rows.dtype}"
        )
    if len(rows) != num_tokens:
        raise InvalidRequestError(f"slot_mapping has {len(rows)} entries for {num_tokens} tokens; one each is needed")
    outside = (rows < 0) | (rows >= num_slots)
    if outside.any():
        token = int(outside.argmax())
        raise InvalidRequestError(
            f"slot_mapping[{token}] is {int(rows[token])}; the paged KV has rows 0 to {num_slots - 1}"
        )
    rows = rows.astype(np.int64, copy=False)
    seen = np.zeros(num_slots, dtype=bool)
    seen[rows] = True
    if int(np.count_nonzero(seen)) != num_tokens:
        _, first_uses = np.unique(rows, return_index=True)
        repeats = np.ones(num_tokens, dtype=bool)
        repeats[first_uses] = False
        token = int(repeats.argmax())
        raise InvalidRequestError(f"slot_mapping[{token}] is {int(rows[token])}, which an earlier token already uses")
    return rows
