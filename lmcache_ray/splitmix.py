"""Random-looking numbers that are the same in every process, on every machine and with every version of NumPy. Pure.

Workloads and verification patterns are made of these. They are not cryptographic: cache keys are (`keys.py`).
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: SplitMix64's step between two states


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea, Flood, 2014) of each word, in a new array of the same shape.

    It is a bijection: different words stay different.
    """
    mixed: NDArray[np.uint64] = words ^ (words >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def fold64(*parts: NDArray[np.uint64] | int) -> NDArray[np.uint64]:
    """One word for several, in order: parts (arrays that broadcast together, or integers of 0 <= n < 2**64) are
    mixed one into the other, so that no sum or swap of parts gives the same word. Returns at least one dimension.
    """
    folded = np.zeros(1, dtype=np.uint64)
    for part in parts:
        folded = mix64((folded + GOLDEN) ^ np.asarray(part, dtype=np.uint64))
    return folded


def word_streams(seeds: NDArray[np.uint64], num_words: int) -> NDArray[np.uint64]:
    """SplitMix64 seeded with each of `seeds`, ``[n]``: its first `num_words` words, ``[n, num_words]``."""
    steps = np.arange(1, num_words + 1, dtype=np.uint64) * GOLDEN
    return mix64(seeds[:, None] + steps[None, :])
