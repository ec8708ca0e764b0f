"""Plain Python beside every chunk written and read: `open` and one call. A peer's interpreter runs it as well."""

import mmap
import os
from collections.abc import Iterable, Sequence
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


def give_back(paths: Iterable[str | Path]) -> None:
    """Empty files instead of deleting them, so that their space is free and the next files are made as the first were.

    A filesystem without a journal does not use what it just freed: ext4 then searches, for each new file, for something
    that it freed longer ago, which takes several times as long as to write 64 KiB.
    """
    for path in paths:
        os.truncate(path, 0)


class PlainFiles:
    """Files of given names below `folder`, one for each slot. `read` reads those of `make`, `write` makes new ones."""

    def __init__(self, folder: Path, names: Sequence[str], memory: Sequence[np.ndarray]) -> None:
        self._names = [str(folder / "written" / name) for name in names]
        self._kept = [str(folder / "kept" / name) for name in names]
        self._memory = memory
        self._written: list[str] = []
        self._num_writes = 0
        for path in (*self._names, *self._kept):
            Path(path).parent.mkdir(parents=True, exist_ok=True)

    def make(self) -> None:
        """Write the files that are going to be read."""
        _write_all(self._kept, self._memory)

    def write(self) -> None:
        """Every slot to a new file under a temporary name, renamed when it is complete."""
        self._num_writes += 1
        self._written = [f"{name}.{self._num_writes}" for name in self._names]
        _write_all(self._written, self._memory)

    def clear(self) -> None:
        """Give back the space of what was written last."""
        give_back(self._written)

    def read(self) -> None:
        """Every file into its slot."""
        for path, slot in zip(self._kept, self._memory, strict=True):
            with open(path, "rb") as file:
                if file.readinto(slot.data) != slot.nbytes:
                    raise RuntimeError(f"{path} is too short")


def _write_all(paths: Sequence[str], memory: Sequence[np.ndarray]) -> None:
    for path, slot in zip(paths, memory, strict=True):
        with open(path + ".tmp", "wb") as file:
            file.write(slot.data)
        os.rename(path + ".tmp", path)
