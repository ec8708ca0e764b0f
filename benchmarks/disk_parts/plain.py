"""Plain Python beside every chunk written and read: `open` and one call. A peer's interpreter runs it as well."""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

WRITE = "plain_write"
READ = "plain_read"


def slots(count: int, nbytes: int) -> np.ndarray:
    """`count` slots of `nbytes` bytes as an arena has them, uint8 [count, nbytes], every page really there.

    They begin on a page: a copy into memory that begins off a cache line takes up to four times as long.
    """
    memory = np.frombuffer(mmap.mmap(-1, count * nbytes), dtype=np.uint8).reshape(count, nbytes)
    memory[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    return memory


class PlainFiles:
    """Files with given names below `folder`, one for each slot. `read` reads those of `make`, `write` makes others."""

    def __init__(self, folder: Path, names: Sequence[str], memory: np.ndarray) -> None:
        self._written = [str(folder / "written" / name) for name in names]
        self._kept = [str(folder / "kept" / name) for name in names]
        self._memory = memory
        for path in (*self._written, *self._kept):
            Path(path).parent.mkdir(parents=True, exist_ok=True)

    def make(self) -> None:
        """Write the files that are going to be read."""
        for path, slot in zip(self._kept, self._memory, strict=True):
            _write(path, slot)

    def write(self) -> None:
        """Every slot to a file under a temporary name, renamed when it is complete."""
        for path, slot in zip(self._written, self._memory, strict=True):
            _write(path, slot)

    def remove(self) -> None:
        """What `write` made, if anything."""
        for path in self._written:
            Path(path).unlink(missing_ok=True)

    def read(self) -> None:
        """Every file into its slot."""
        for path, slot in zip(self._kept, self._memory, strict=True):
            with open(path, "rb") as file:
                if file.readinto(slot) != slot.nbytes:
                    raise RuntimeError(f"{path} is too short")


def _write(path: str, slot: np.ndarray) -> None:
    with open(path + ".tmp", "wb") as file:
        file.write(slot)
    os.rename(path + ".tmp", path)
