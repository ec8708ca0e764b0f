"""What one arena is: whose, of which layout, and where its parts lie in the file. Pure.

::

    | header, 4 KiB | slot words, 8 B each | pad | records, 64 B each | pad | slot 0 | slot 1 | ... |
    ^ 0             ^ words_offset               ^ records_offset           ^ data_offset           ^ file_nbytes

Each part begins on a 4 KiB border and each slot on a 64-byte border, so that neither words nor slots share a cache
line with something of another kind. The words stand close together: one vectorised look checks many slots.
"""

from dataclasses import dataclass
from typing import Final

from lmcache_ray.errors import ArenaError
from lmcache_ray.layout import ALIGNMENT

HEADER_NBYTES: Final = 4096
FLOOR_OFFSET: Final = HEADER_NBYTES - 16
WORD_NBYTES: Final = 8
RECORD_NBYTES: Final = 64
FINGERPRINT_NBYTES: Final = 32
MAX_NAME_NBYTES: Final = 255
_BORDER: Final = 4096
_MAX_FILE_NBYTES: Final = 2**62


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """Where the parts of an arena of `num_slots` slots of `slot_nbytes` bytes lie. Offsets are bytes from its start."""

    num_slots: int
    slot_nbytes: int

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            raise ArenaError(f"an arena needs at least 1 slot; got num_slots={self.num_slots}")
        if self.slot_nbytes < 1 or self.slot_nbytes % ALIGNMENT:
            raise ArenaError(f"slot_nbytes must be a positive multiple of {ALIGNMENT}; got {self.slot_nbytes}")
        if self.file_nbytes > _MAX_FILE_NBYTES:
            raise ArenaError(f"{self.num_slots} slots of {self.slot_nbytes} bytes are more than a file can hold")

    @property
    def words_offset(self) -> int:
        """Where the slot words begin."""
        return HEADER_NBYTES

    @property
    def records_offset(self) -> int:
        """Where the records begin."""
        return _round_up(self.words_offset + self.num_slots * WORD_NBYTES)

    @property
    def data_offset(self) -> int:
        """Where slot 0 begins."""
        return _round_up(self.records_offset + self.num_slots * RECORD_NBYTES)

    @property
    def file_nbytes(self) -> int:
        """The exact size of the file."""
        return self.data_offset + self.num_slots * self.slot_nbytes


@dataclass(frozen=True, slots=True)
class ArenaSpec:
    """One rank's arena, as the whole cluster agreed on it; a file with another spec is another file.

    `fingerprint` is that of the `WorldLayout` (32 bytes); it gives the bytes in the slots their meaning.
    """

    namespace: str
    name: str
    rank: int
    world_size: int
    fingerprint: bytes
    geometry: ArenaGeometry

    def __post_init__(self) -> None:
        for field_name, text in (("namespace", self.namespace), ("name", self.name)):
            if not 1 <= len(text.encode("utf-8", "surrogatepass")) <= MAX_NAME_NBYTES:
                raise ArenaError(f"a cluster's {field_name} must have 1 to {MAX_NAME_NBYTES} bytes; got {text!r}")
        if not 0 <= self.rank < self.world_size < 2**32:
            raise ArenaError(f"rank must be in [0, world_size); got rank={self.rank}, world_size={self.world_size}")
        if len(self.fingerprint) != FINGERPRINT_NBYTES:
            raise ArenaError(f"fingerprint must have {FINGERPRINT_NBYTES} bytes; got {len(self.fingerprint)}")


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _BORDER) * _BORDER
