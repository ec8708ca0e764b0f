"""The check of slot mappings, which every copy relies on."""

from array import array

import numpy as np
import pytest
import torch

from lmcache_ray.connector.base import checked_slot_mapping
from lmcache_ray.errors import InvalidRequestError
from tests.unit.odd_tensors import memory_given_back


@pytest.mark.parametrize(
    "mapping",
    [
        [3, 0, 7],
        (3, 0, 7),
        np.array([3, 0, 7], np.uint8),
        np.array([3, 0, 7], np.uint64),
        torch.tensor([3, 0, 7]),
        torch.tensor([3, 0, 7], dtype=torch.int32),
        array("H", [3, 0, 7]),
        [np.int64(3), 0, torch.tensor(7)],
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
        ([[0, 1, 2]], r"slot_mapping\[0\] is \[0, 1, 2\] \(list\)"),
        ([0, 1.0, 2], r"slot_mapping\[1\] is 1.0 \(float\)"),
        ([3, 0, True], r"slot_mapping\[2\] is True \(bool\)"),
        ((1, np.False_, 2), r"slot_mapping\[1\] is (np.)?False_? "),
        (["a", "b", "c"], r"slot_mapping\[0\] is 'a' \(str\)"),
        ([0, 1, 2**70], rf"slot_mapping\[2\] is {2**70}; the paged KV has rows 0 to 7"),
        ([0, -1, 2**70], r"slot_mapping\[1\] is -1; the paged KV has rows 0 to 7"),
        (np.array([[0, 1, 2]]), r"shape \(1, 3\)"),
        (np.zeros(3), "float64"),
        (np.ones(3, dtype=bool), "bool"),
        (torch.zeros(3), "float32"),
        (torch.zeros(3, dtype=torch.bfloat16), "cannot be read"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), "device meta.*accepted: a dense tensor that has values"),
        (torch.tensor([0, 1, 2]).to_sparse(), "layout torch.sparse_coo.*accepted: a dense"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "layout torch.jagged"),
        (7, "one-dimensional"),
        (None, "slot_mapping is missing"),
    ],
)
def test_a_wrong_mapping_names_the_first_offending_token(mapping: object, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=named):
        checked_slot_mapping(mapping, num_tokens=3, num_slots=8)  # type: ignore[arg-type]


def test_a_tensor_whose_memory_was_given_back_is_not_read() -> None:
    for nbytes_left in (0, 16):
        mapping = memory_given_back(torch.tensor([0, 1, 2]), nbytes_left=nbytes_left)
        with pytest.raises(InvalidRequestError, match="slot_mapping is a torch tensor whose memory was given back"):
            checked_slot_mapping(mapping, num_tokens=3, num_slots=8)
    every_second = memory_given_back(torch.arange(6)[::2], nbytes_left=5 * 8)
    assert checked_slot_mapping(every_second, num_tokens=3, num_slots=8).tolist() == [0, 2, 4], "all there is needed"


@pytest.mark.parametrize("num_slots", [9, 128 * 8, 128 * 8 + 1, 10**6])
def test_a_row_that_stands_twice_is_found_in_any_size_of_memory(num_slots: int) -> None:
    rows = [7, 3, num_slots - 1, 0, 5, 1, 4, 2]
    assert checked_slot_mapping(rows, num_tokens=8, num_slots=num_slots).tolist() == rows
    rows[6:] = [3, 0]
    with pytest.raises(InvalidRequestError, match=r"slot_mapping\[6\] is 3, which an earlier token already uses"):
        checked_slot_mapping(rows, num_tokens=8, num_slots=num_slots)


def test_rows_of_any_stride_and_byte_order_are_made_plain() -> None:
    for odd in (np.array([3, 9, 0, 9, 7, 9])[::2], np.array([3, 0, 7], dtype=">i8")):
        rows = checked_slot_mapping(odd, num_tokens=3, num_slots=8)
        assert rows.flags.c_contiguous and rows.dtype == np.dtype("=i8") and rows.tolist() == [3, 0, 7]
