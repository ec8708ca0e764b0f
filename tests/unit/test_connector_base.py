"""The check of slot mappings, which every copy relies on."""

import numpy as np
import pytest
import torch

from lmcache_ray.connector.base import checked_slot_mapping
from lmcache_ray.errors import InvalidRequestError


@pytest.mark.parametrize(
    "mapping",
    [
        [3, 0, 7],
        (3, 0, 7),
        np.array([3, 0, 7], np.uint8),
        np.array([3, 0, 7], np.uint64),
        torch.tensor([3, 0, 7]),
        torch.tensor([3, 0, 7], dtype=torch.int32),
    ],
)
def test_every_form_gives_the_same_rows(mapping: object) -> None:
    rows = checked_slot_mapping(mapping, num_tokens=3, num_slots=8)  # type: ignore[arg-type]
    assert rows.dtype == np.int64 and rows.tolist() == [3, 0, 7]


@pytest.mark.parametrize("mapping", [[], (), np.array([]), torch.tensor([])])
def test_no_token_needs_no_row(mapping: object) -> None:
    assert checked_slot_mapping(mapping, num_tokens=0, num_slots=8).tolist() == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mapping", "named"),
    [
        ([0, -1, -2], r"slot_mapping\[1\] is -1; the paged KV has rows 0 to 7"),
        ([0, 1, 8], r"slot_mapping\[2\] is 8; the paged KV has rows 0 to 7"),
        (np.array([0, 2**64 - 1, 1], np.uint64), r"slot_mapping\[1\] is 18446744073709551615"),
        ([5, 1, 5], r"slot_mapping\[2\] is 5, which an earlier token already uses"),
        ([5, 5, 1], r"slot_mapping\[1\] is 5, which"),
        ([0, 1], "2 entries for 3 tokens"),
        ([0, 1, 2, 3], "4 entries for 3 tokens"),
        ([], "0 entries for 3 tokens"),
        ([[0, 1, 2]], r"shape \(1, 3\)"),
        ([0.0, 1.0, 2.0], "float64"),
        ([True, False, True], "bool"),
        (["a", "b", "c"], "one-dimensional integers"),
        ([0, 1, 2**70], "one-dimensional integers"),
        ([[0], [1, 2], [3]], "cannot be read"),
        (torch.zeros(3, dtype=torch.bfloat16), "cannot be read"),
        (7, "one-dimensional"),
        (None, "slot_mapping is missing"),
    ],
)
def test_a_wrong_mapping_names_the_first_offending_token(mapping: object, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        checked_slot_mapping(mapping, num_tokens=3, num_slots=8)  # type: ignore[arg-type]
