"""The one chunking rule, and where a masked call begins."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ray.chunking import chunk_spans, masked_start
from lmcache_ray.errors import ConfigError, InvalidRequestError

C = 4
FORMS = [
    list,
    tuple,
    lambda flags: [np.bool_(flag) if position % 2 else flag for position, flag in enumerate(flags)],
    lambda flags: np.array(flags, dtype=bool),
    lambda flags: torch.tensor(flags, dtype=torch.bool),
]


@pytest.mark.parametrize(
    ("num_tokens", "full", "tail"),
    [
        (0, [], []),
        (1, [], [(0, 1)]),
        (C - 1, [], [(0, 3)]),
        (C, [(0, 4)], []),
        (C + 1, [(0, 4)], [(4, 5)]),
        (2 * C - 1, [(0, 4)], [(4, 7)]),
        (129 * C, [(4 * i, 4 * i + 4) for i in range(129)], []),
    ],
)
def test_borders(num_tokens, full, tail):
    assert chunk_spans(num_tokens, C, keep_partial=False) == full
    assert chunk_spans(num_tokens, C, keep_partial=True) == full + tail


@given(st.integers(0, 300), st.integers(1, 40), st.booleans())
def test_spans_cover_a_leading_run_without_gaps(num_tokens, chunk_size, keep_partial):
    spans = chunk_spans(num_tokens, chunk_size, keep_partial=keep_partial)
    covered = [token for start, end in spans for token in range(start, end)]
    expected = num_tokens if keep_partial else num_tokens // chunk_size * chunk_size
    assert covered == list(range(expected))
    assert all(end - start == chunk_size for start, end in spans[:-1])


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigError, match="chunk_size is 0"):
        chunk_spans(5, 0, keep_partial=True)
    with pytest.raises(InvalidRequestError, match="num_tokens is -1"):
        chunk_spans(-1, 4, keep_partial=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("num_false", [0, 4, 8])
def test_start_is_the_number_of_leading_false(form, aligned, num_false):
    mask = form([False] * num_false + [True] * (8 - num_false))
    assert masked_start(mask, 8, C, aligned=aligned) == num_false


@pytest.mark.parametrize("form", FORMS)
def test_no_mask_and_an_empty_mask_start_at_zero(form):
    assert masked_start(None, 9, C, aligned=True) == 0
    assert masked_start(form([]), 0, C, aligned=True) == 0


def test_only_an_aligned_call_needs_a_chunk_border():
    mask = [False] * 3 + [True] * 6
    assert masked_start(mask, 9, C, aligned=False) == 3
    with pytest.raises(InvalidRequestError, match=r"3 False.*chunk_size=4"):
        masked_start(mask, 9, C, aligned=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([True, False, True, True], r"mask\[1\] is False after mask\[0\] is True"),
        ([False, True, True, False], r"mask\[3\] is False after mask\[1\] is True"),
        ([False, True, True], r"shape \(3,\).* 4 tokens"),
        ([True] * 5, r"shape \(5,\).* 4 tokens"),
        ([], r"shape \(0,\).* 4 tokens"),
    ],
)
def test_holes_and_wrong_lengths_are_refused(form, flags, message):
    with pytest.raises(InvalidRequestError, match=message):
        masked_start(form(flags), 4, C, aligned=False)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([False, True, 1, True], r"mask\[2\] is 1 \(int\)"),
        (np.ones(4), "float64"),
        (np.ones((2, 2), dtype=bool), r"shape \(2, 2\)"),
        (np.array(True), r"shape \(\)"),
        (torch.ones(4, dtype=torch.uint8), "torch.uint8"),
        (torch.ones(4, dtype=torch.bool).to_sparse(), "mask is a torch tensor.*sparse_coo.*accepted: a dense"),
        (torch.ones(4, dtype=torch.bool, device="meta"), "mask is a torch tensor on device meta"),
        ([False, None, True, True], r"mask\[1\] is None"),
        ("TTTT", r"'TTTT' \(str\)"),
        (3, r"3 \(int\)"),
    ],
)
def test_other_types_are_refused(mask, message):
    with pytest.raises(InvalidRequestError, match=message):
        masked_start(mask, 4, C, aligned=False)
