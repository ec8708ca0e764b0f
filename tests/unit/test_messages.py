"""What is packed comes back as it was, whatever its size."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.messages import (
    MESSAGE_NBYTES,
    PackedRefs,
    PackedRows,
    batches,
    pack_flags,
    pack_keys,
    pack_numbers,
    unpack_flags,
    unpack_keys,
    unpack_numbers,
)
from lmcache_ray.index.plans import ChunkRef

UINT64 = st.integers(0, 2**64 - 1)
KEYS = st.binary(min_size=32, max_size=32)
REFS = st.lists(st.builds(ChunkRef, KEYS, st.integers(0, 2**40), UINT64))
ROWS = st.lists(st.lists(st.integers(0, 2**50), max_size=9))


@given(st.lists(KEYS))
def test_keys(keys: list[bytes]) -> None:
    assert unpack_keys(pack_keys(keys)) == keys


@given(st.lists(UINT64))
def test_numbers(numbers: list[int]) -> None:
    assert unpack_numbers(pack_numbers(numbers)) == numbers


@pytest.mark.parametrize("number", [-1, 2**64])
def test_a_number_that_has_no_place_is_refused(number: int) -> None:
    with pytest.raises(OverflowError):
        pack_numbers([number])


@given(st.lists(st.booleans()))
def test_flags(flags: list[bool]) -> None:
    assert unpack_flags(pack_flags(flags)) == flags


@given(REFS)
def test_refs(refs: list[ChunkRef]) -> None:
    packed = PackedRefs.pack(refs)
    assert packed.unpack() == tuple(refs)
    assert len(packed) == len(refs)
    assert pickle.loads(pickle.dumps(packed)) == packed


@given(ROWS)
def test_rows_in_any_order(rows: list[list[int]]) -> None:
    arrays = [np.array(chunk, dtype=np.int64) for chunk in rows]
    unpacked = PackedRows.pack(arrays).unpack()
    assert [chunk.tolist() for chunk in unpacked] == rows
    assert all(chunk.dtype == np.int64 for chunk in unpacked)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 6)), max_size=8))
def test_rows_of_adjacent_blocks(runs: list[tuple[int, int]]) -> None:
    """Runs that touch, also across chunks, are told apart by the chunks' lengths."""
    rows = [np.arange(start, start + length) for start, length in runs]
    assert [chunk.tolist() for chunk in PackedRows.pack(rows).unpack()] == [chunk.tolist() for chunk in rows]


def test_a_run_costs_two_numbers_whatever_its_length() -> None:
    packed = PackedRows.pack([np.arange(512 * number, 512 * (number + 1)) for number in range(100)])
    assert len(packed.starts) == len(packed.lengths) == 8
    assert sum(map(len, packed.unpack())) == 51_200


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_batches_are_consecutive_and_as_large_as_the_limit_allows(sizes: list[int], limit: int) -> None:
    found = list(batches(sizes, limit))
    assert [position for batch in found for position in batch] == list(range(len(sizes)))
    for batch in found:
        assert len(batch) == 1 or sum(sizes[position] for position in batch) <= limit
    for batch, following in itertools.pairwise(found):
        assert sum(sizes[position] for position in batch) + sizes[following[0]] > limit


def test_an_item_larger_than_a_message_goes_alone() -> None:
    assert list(batches([1, MESSAGE_NBYTES + 1, 1])) == [range(0, 1), range(1, 2), range(2, 3)]
