"""Prompts as the index sees them: runs of chunk keys, made anew each time as if they had just come in a message."""

import hashlib
import random
from collections.abc import Iterator
from typing import Final

from lmcache_ray.keys import KEY_NBYTES

NUM_CHUNKS: Final = 128
"""Chunks of a prompt: 32k tokens in chunks of 256."""


def packed_keys(prompt: int, num_chunks: int = NUM_CHUNKS) -> bytes:
    """The 32-byte keys of prompt number `prompt`, one after the other. No two prompts share one."""
    return hashlib.shake_256(prompt.to_bytes(8, "little")).digest(KEY_NBYTES * num_chunks)


def keys_of(prompt: int, num_chunks: int = NUM_CHUNKS) -> list[bytes]:
    """The same as a list."""
    packed = packed_keys(prompt, num_chunks)
    return [packed[at : at + KEY_NBYTES] for at in range(0, len(packed), KEY_NBYTES)]


def drawn(prompts: range, seed: int = 0) -> Iterator[int]:
    """Numbers out of `prompts`, without end."""
    generator = random.Random(seed)
    while True:
        yield generator.choice(prompts)
