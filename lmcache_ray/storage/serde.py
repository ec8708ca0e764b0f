"""How a shard's bytes are written to a remote store: as they are, compressed, or rounded. And the choice by name.

A serde sees one shard, uint8 ``[slot_nbytes]`` as `layout.py` lays it out, of which the first `num_tokens` rows of
each plane mean something. The others are written as zeros: what a slot held before is nobody's business elsewhere.
"""

from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
from typing_extensions import Buffer

from lmcache_ray.errors import ConfigError, DamagedChunkError, shown
from lmcache_ray.layout import RankLayout
from lmcache_ray.storage.shard_bytes import group_bytes, meant_bytes

NAMES: Final = ("naive", "zstd", "fp8")

_LEVEL: Final = 1  # KV compresses little, so what more effort gains is small, and time is what a cache saves


class Serde(Protocol):
    """One way to write a shard. Thread-safe, without state."""

    @property
    def name(self) -> str:
        """Part of every object's name and header, so that one serde never reads what another wrote."""
        ...

    @property
    def is_lossy(self) -> bool:
        """Whether `decode` gives other values than `encode` got."""
        ...

    def encode(self, data: np.ndarray, layout: RankLayout, num_tokens: int) -> Buffer:
        """The shard's bytes to be stored. Memory of its own: `data` may change as soon as this has returned."""
        ...

    def decode(self, encoded: Buffer, data: np.ndarray, layout: RankLayout) -> None:
        """Fill `data` with the shard that `encoded` holds. Raises `DamagedChunkError` if it holds none of this layout.

        No more memory is taken than the layout allows, whatever `encoded` says.
        """
        ...


def make_serde(name: str) -> Serde:
    """The serde of that name, one of `NAMES`. Raises `ConfigError`, also if a package that it needs is missing."""
    if name == "naive":
        return NaiveSerde()
    if name == "zstd":
        return ZstdSerde()
    if name == "fp8":
        return Fp8Serde()
    raise ConfigError(f"remote_serde {shown(name)} is not known; accepted: {', '.join(NAMES)}")


class Fp8Serde:
    """A `Serde` that rounds 16-bit floats to 8 bits: see `serde_fp8.py`.

    That is imported, and torch with it, by the first shard that is moved: whoever only asks for names needs neither.
    """

    name = "fp8"
    is_lossy = True

    def encode(self, data: np.ndarray, layout: RankLayout, num_tokens: int) -> Buffer:
        """As `Serde`."""
        from lmcache_ray.storage.serde_fp8 import encode

        return encode(data, layout, num_tokens)

    def decode(self, encoded: Buffer, data: np.ndarray, layout: RankLayout) -> None:
        """As `Serde`."""
        from lmcache_ray.storage.serde_fp8 import decode

        decode(encoded, data, layout)


class NaiveSerde:
    """The bytes as they are."""

    name = "naive"
    is_lossy = False

    def encode(self, data: np.ndarray, layout: RankLayout, num_tokens: int) -> Buffer:
        """As `Serde`."""
        return meant_bytes(data, layout, num_tokens).data

    def decode(self, encoded: Buffer, data: np.ndarray, layout: RankLayout) -> None:
        """As `Serde`."""
        view = memoryview(encoded)
        _check_nbytes(view.nbytes, layout)
        data[:] = np.frombuffer(view, np.uint8)


class ZstdSerde:
    """Compressed by Zstandard, without loss.

    Bytes of the same significance are put side by side before, per layer group: the exponents of neighbouring elements
    resemble each other, their fractions do not. bfloat16 KV takes about 0.7 of its size like this, and 0.8 otherwise.
    """

    name = "zstd"
    is_lossy = False

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigError(
                "remote_serde 'zstd' needs the package zstandard, which is not installed: "
                "pip install 'lmcache-ray[zstd]'"
            ) from error
        self._zstandard: Final = zstandard

    def encode(self, data: np.ndarray, layout: RankLayout, num_tokens: int) -> Buffer:
        """As `Serde`."""
        shard = meant_bytes(data, layout, num_tokens)
        sorted_bytes = np.zeros_like(shard)
        for source, target in zip(_elements(shard, layout), _by_significance(sorted_bytes, layout), strict=True):
            target[:] = source.T
        return self._zstandard.ZstdCompressor(level=_LEVEL).compress(sorted_bytes.data)

    def decode(self, encoded: Buffer, data: np.ndarray, layout: RankLayout) -> None:
        """As `Serde`."""
        sorted_bytes = np.frombuffer(self._decompressed(memoryview(encoded), layout), np.uint8)
        data[:] = 0
        for source, target in zip(_by_significance(sorted_bytes, layout), _elements(data, layout), strict=True):
            target[:] = source.T

    def _decompressed(self, encoded: memoryview, layout: RankLayout) -> bytes:
        try:
            _check_nbytes(self._zstandard.get_frame_parameters(encoded).content_size, layout)
            plain = self._zstandard.ZstdDecompressor().decompress(
                encoded, max_output_size=layout.slot_nbytes, allow_extra_data=False
            )
        except self._zstandard.ZstdError as error:
            raise DamagedChunkError(f"the data is no Zstandard frame: {error}") from error
        _check_nbytes(len(plain), layout)
        return plain


def _elements(shard: np.ndarray, layout: RankLayout) -> Iterator[np.ndarray]:
    """Per group ``[elements, itemsize]``."""
    for group, plain in zip(layout.groups, group_bytes(shard, layout), strict=True):
        yield plain.reshape(-1, group.dtype.itemsize)


def _by_significance(shard: np.ndarray, layout: RankLayout) -> Iterator[np.ndarray]:
    """Per group ``[itemsize, elements]``, in the same place as its elements."""
    for group, plain in zip(layout.groups, group_bytes(shard, layout), strict=True):
        yield plain.reshape(group.dtype.itemsize, -1)


def _check_nbytes(nbytes: int, layout: RankLayout) -> None:
    if nbytes != layout.slot_nbytes:
        raise DamagedChunkError(f"{nbytes} bytes, where a shard of this layout has {layout.slot_nbytes}")
