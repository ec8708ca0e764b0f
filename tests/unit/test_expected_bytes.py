import hashlib

import numpy as np
import pytest

from cluster.expected_bytes import count_mismatches, expected_chunks
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import InvalidRequestError, LayoutError
from lmcache_ray.layout import RankLayout, ShardSpec

NARROW = ShardSpec((0, 1), range(0, 1), 2, KVDtype.FLOAT16)  # rows of 4 bytes
BYTE_ROWS = ShardSpec((2,), range(0, 1), 1, KVDtype.UINT8)  # rows of 1 byte
ODD_ROWS = ShardSpec((3, 7, 8), range(4, 7), 3, KVDtype.FLOAT8_E5M2)  # rows of 9 bytes
LATENT = ShardSpec((9,), range(0, 1), 20, KVDtype.BFLOAT16, kv_size=1)  # rows of 40 bytes
LAYOUT = RankLayout(6, (NARROW, BYTE_ROWS, ODD_ROWS, LATENT))


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def planes(chunk: np.ndarray, layout: RankLayout) -> dict[tuple[int, int], np.ndarray]:
    """(layer, kv) -> uint8 ``[chunk_size, row_nbytes]``, cut out by the layout's own words."""
    cut = {}
    for group, offset in zip(layout.groups, layout.group_offsets, strict=True):
        raw = chunk[offset : offset + group.token_nbytes * layout.chunk_size]
        raw = raw.reshape(group.kv_size, group.num_layers, layout.chunk_size, group.row_nbytes)
        for kv in range(group.kv_size):
            for index, layer in enumerate(group.layers):
                cut[layer, kv] = raw[kv, index]
    return cut


def test_golden_values() -> None:
    (chunk,) = expected_chunks([key(0)], LAYOUT, 1)
    assert chunk[:8].tobytes().hex() == "90e1a898656283ec"
    assert hashlib.sha256(chunk.tobytes()).hexdigest()[:16] == "7f1b316934acfd35"
    (shared,) = expected_chunks([key(0)], LAYOUT, None)
    assert hashlib.sha256(shared.tobytes()).hexdigest()[:16] == "1fe5a1d3698770a3"


def test_shape_and_padding() -> None:
    chunks = expected_chunks([key(0), key(1)], LAYOUT, 0)
    assert chunks.dtype == np.uint8 and chunks.shape == (2, LAYOUT.slot_nbytes)
    is_padding = np.ones(LAYOUT.slot_nbytes, dtype=bool)
    for group, offset in zip(LAYOUT.groups, LAYOUT.group_offsets, strict=True):
        is_padding[offset : offset + group.token_nbytes * LAYOUT.chunk_size] = False
    assert is_padding.any() and not chunks[:, is_padding].any()
    assert np.count_nonzero(chunks[:, ~is_padding]) > 0.97 * chunks[:, ~is_padding].size
    assert expected_chunks([], LAYOUT, 0).shape == (0, LAYOUT.slot_nbytes)


def test_a_chunk_is_the_same_alone_and_among_many() -> None:
    keys = [key(number) for number in range(700)]
    together = expected_chunks(keys, LAYOUT, 3)
    for index in (0, 1, 350, 699):
        assert together[index].tobytes() == expected_chunks([keys[index]], LAYOUT, 3).tobytes()


def share_of_equal_bytes(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.mean(a == b))


def test_any_mix_up_shows() -> None:
    """Another rank, key, layer, plane or position has no more bytes in common than chance gives."""
    layout = RankLayout(512, (NARROW, BYTE_ROWS, ShardSpec((3, 7), range(4, 7), 3, KVDtype.FLOAT8_E5M2)))
    first, other = expected_chunks([key(0), key(1)], layout, 0)
    one_rank_on, shared = (expected_chunks([key(0)], layout, rank)[0] for rank in (1, None))
    payload = slice(0, layout.groups[0].token_nbytes * 512)
    for mixed_up in (other, one_rank_on, shared):
        assert share_of_equal_bytes(first[payload], mixed_up[payload]) < 0.02
    cut = planes(first, layout)
    for layers in ((0, 1), (3, 7)):
        for place in ((layers[0], 1), (layers[1], 0)):
            assert share_of_equal_bytes(cut[layers[0], 0], cut[place]) < 0.02
    for plane in cut.values():
        for distance in (1, 2, 3, 4, 8, 64, 256):
            assert share_of_equal_bytes(plane[:-distance], plane[distance:]) < 0.03


def test_the_layers_number_counts_not_its_place() -> None:
    """The same shape on another pipeline stage, or in another group, holds other bytes; the same layer the same."""
    a = planes(expected_chunks([key(0)], RankLayout(8, (ODD_ROWS,)), None)[0], RankLayout(8, (ODD_ROWS,)))
    stage = ShardSpec((7, 8, 9), range(4, 7), 3, KVDtype.FLOAT8_E5M2)
    layout = RankLayout(8, (NARROW, stage))
    b = planes(expected_chunks([key(0)], layout, None)[0], layout)
    assert a[7, 1].tobytes() == b[7, 1].tobytes()
    assert a[3, 1].tobytes() != b[9, 1].tobytes()


def test_every_part_of_a_key_counts() -> None:
    base = bytearray(key(0))
    keys = [bytes(base)]
    for position in range(32):
        changed = base.copy()
        changed[position] ^= 1
        keys.append(bytes(changed))
    swapped = bytes(base[8:16] + base[:8] + base[16:])
    chunks = expected_chunks([*keys, swapped], LAYOUT, 0)
    assert len({chunk.tobytes() for chunk in chunks}) == 34


def test_keys_are_digests() -> None:
    with pytest.raises(InvalidRequestError, match="has 31 bytes; accepted: 32"):
        expected_chunks([key(0), key(1)[:31]], LAYOUT, 0)


def test_count_mismatches_counts_bytes() -> None:
    expected = expected_chunks([key(0), key(1)], LAYOUT, 0)
    actual = expected.copy()
    assert count_mismatches(actual, expected) == 0
    actual[0, 0] ^= 1
    actual[1, -1] ^= 255
    actual[1, 5] ^= 16
    assert count_mismatches(actual, expected) == 3
    assert count_mismatches(actual[1], expected[1]) == 2


def test_count_mismatches_refuses_what_cannot_be_compared() -> None:
    expected = expected_chunks([key(0)], LAYOUT, 0)
    with pytest.raises(LayoutError, match="bytes of one shape"):
        count_mismatches(expected[:, 1:], expected)
    with pytest.raises(LayoutError, match="int8"):
        count_mismatches(expected.view(np.int8), expected)
