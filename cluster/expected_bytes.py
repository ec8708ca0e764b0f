"""What every byte of a verified workload must be: a fixed pattern that no mix-up can reproduce. Pure.

A byte depends on the rank (unless the bytes are the same for all ranks), the layer's number, keys or values, the
position in the chunk, and the chunk's key; so a wrong rank, layer, plane, row or prompt shows as about 255 wrong
bytes in 256. The pattern is laid out exactly as `lmcache_ray.layout` says, padding zero.

Each (layer, keys-or-values) plane of a chunk, ``chunk_size x row_nbytes`` bytes, is one stream of 8-byte words. Rows of
1 or 2 bytes therefore share a word but never a byte, and cost no more than wide ones.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lmcache_ray.errors import InvalidRequestError, LayoutError
from lmcache_ray.keys import KEY_NBYTES
from lmcache_ray.layout import RankLayout, ShardSpec
from lmcache_ray.splitmix import fold64, mix64, word_streams

_WORDS_AT_ONCE: Final = 1 << 14  # keeps the scratch arrays (128 KiB each) in the processor's cache


def expected_chunks(keys: Sequence[bytes], layout: RankLayout, rank: int | None) -> NDArray[np.uint8]:
    """The bytes that the slots of `keys` hold on `rank`: uint8 ``[num_keys, slot_nbytes]``, a new array.

    `rank` is None where all ranks hold the same bytes (MLA). `keys` are 32-byte digests, else `InvalidRequestError`.
    """
    seeds = _key_seeds(keys)
    out = np.zeros((len(keys), layout.slot_nbytes), dtype=np.uint8)
    for group, offset in zip(layout.groups, layout.group_offsets, strict=True):
        places = _place_words(group, layout.chunk_size, rank)
        group_nbytes = group.token_nbytes * layout.chunk_size
        keys_at_once = max(1, _WORDS_AT_ONCE // places.size)
        for start in range(0, len(keys), keys_at_once):
            batch = slice(start, start + keys_at_once)
            _fill(out[batch, offset : offset + group_nbytes], seeds[batch], places)
    return out


def count_mismatches(actual: NDArray[np.uint8], expected: NDArray[np.uint8]) -> int:
    """How many bytes differ. Raises `LayoutError` unless both are uint8 of the same shape."""
    if actual.dtype != np.uint8 or expected.dtype != np.uint8 or actual.shape != expected.shape:
        raise LayoutError(
            f"only bytes of one shape can be compared; got {actual.dtype} {actual.shape} "
            f"and {expected.dtype} {expected.shape}"
        )
    # Row by row: one comparison of everything would touch as much fresh memory as it compares.
    rows = zip(np.atleast_2d(actual), np.atleast_2d(expected), strict=True)
    return sum(int(np.count_nonzero(row != wanted)) for row, wanted in rows)


def _key_seeds(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    wrong = next((key for key in keys if len(key) != KEY_NBYTES), None)
    if wrong is not None:
        raise InvalidRequestError(f"chunk key {wrong!r} has {len(wrong)} bytes; accepted: {KEY_NBYTES}")
    words = np.frombuffer(b"".join(keys), dtype="<u8").astype(np.uint64).reshape(-1, KEY_NBYTES // 8)
    return fold64(*words.T)


def _place_words(group: ShardSpec, chunk_size: int, rank: int | None) -> NDArray[np.uint64]:
    """One word for every 8 bytes of the group on `rank`: ``[kv_size * num_layers, words of a plane]``."""
    kv = np.arange(group.kv_size, dtype=np.uint64)[:, None]
    layers = np.array(group.layers, dtype=np.uint64)[None, :]
    planes = fold64(0 if rank is None else rank + 1, layers, kv).reshape(-1)
    return word_streams(planes, -(-chunk_size * group.row_nbytes // 8))


def _fill(out: NDArray[np.uint8], seeds: NDArray[np.uint64], places: NDArray[np.uint64]) -> None:
    """Write the group's bytes, ``[num_keys, group bytes]``; each plane's last word is cut where the plane ends."""
    words = mix64(seeds[:, None, None] ^ places[None, :, :])
    streams = words.astype("<u8", copy=False).view(np.uint8)
    plane_nbytes = out.shape[1] // places.shape[0]
    out[...] = streams[:, :, :plane_nbytes].reshape(out.shape)
