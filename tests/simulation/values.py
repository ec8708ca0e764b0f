"""What is stored in a simulated world: prompts, their chunks' keys, and the bytes that each chunk must have.

Bytes are a function of key and rank, so any mix-up of prompts, slots or ranks shows. Prompts of one world share
prefixes, and there are few of them, so that calls meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Final

import numpy as np

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.layout import Placement, ShardSpec, WorldLayout, uniform_world

CHUNK_SIZE: Final = 2
_LONGEST: Final = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt by name, a letter a chunk, and the keys of its chunks."""

    name: str
    keys: tuple[bytes, ...]

    @staticmethod
    def of(name: str) -> "Prompt":
        """The prompt of these letters; one that begins alike has the same leading keys."""
        return Prompt(name, tuple(sha256(name[: end + 1].encode()).digest() for end in range(len(name))))


def draw_prompts(rng: Random, number: int) -> list[Prompt]:
    """Different prompts of a tree with few branches."""
    names: set[str] = set()
    while len(names) < number:
        names.add("".join(rng.choices("abc", weights=(5, 2, 1), k=rng.randint(1, _LONGEST))))
    return [Prompt.of(name) for name in sorted(names)]


def layout_of(world_size: int, placement: Placement) -> WorldLayout:
    """A small model: one layer, 64 bytes a chunk."""
    group = ShardSpec((0,), range(0, 1), 16, KVDtype.UINT8)
    return uniform_world((group,), chunk_size=CHUNK_SIZE, world_size=world_size, placement=placement)


class Bytes:
    """The bytes of every chunk on every holder."""

    def __init__(self, layout: WorldLayout) -> None:
        self._layout = layout
        self._known: dict[tuple[bytes, int], np.ndarray] = {}

    def of(self, key: bytes, rank: int) -> np.ndarray:
        """uint8 ``[slot_nbytes]``: what the chunk must be in the arena that `rank` reads."""
        holder = self._layout.holder_of(rank)
        known = self._known.get((key, holder))
        if known is None:
            nbytes = self._layout.ranks[holder].slot_nbytes
            digest = sha256(key + bytes((holder,))).digest()
            known = np.frombuffer((digest * (1 + nbytes // len(digest)))[:nbytes], dtype=np.uint8)
            self._known[key, holder] = known
        return known

    def are_of(self, data: np.ndarray, key: bytes, rank: int) -> bool:
        """Whether every byte is as it must be."""
        return data.tobytes() == self.of(key, rank).tobytes()


def short(keys: Sequence[bytes]) -> str:
    """Keys as a story names them."""
    return ",".join(key[:2].hex() for key in keys) or "nothing"
