"""Copying between slots and what stands for paged KV: in two halves, between which anything may happen.

Whoever writes into a slot is noted while it does, so that two at once are found, in whatever processes.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from tests.simulation.faults import Fault, Faults
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.values import CHUNK_SIZE, Bytes


class Violation(AssertionError):
    """Something that must never be so."""


class Copying:
    """The hands of one world: `numpy` copies that take their time."""

    def __init__(self, scheduler: Scheduler, faults: Faults) -> None:
        self._scheduler = scheduler
        self._faults = faults
        self._writers: dict[int, Process] = {}

    def pass_time(self) -> None:
        """What half a copy takes."""
        delay_s = self._faults.slowness(Fault.COPY_SLOW)
        if delay_s:
            self._scheduler.sleep(delay_s)
            self._scheduler.current().process.lost_s += delay_s  # nobody can copy faster than it goes

    def write(self, slot: np.ndarray, data: np.ndarray) -> None:
        """Fill a slot. Raises `Violation` if another living process is doing so."""
        address = slot.__array_interface__["data"][0]
        me = self._scheduler.current().process
        other = self._writers.get(address)
        if other is not None and other.is_alive:
            raise Violation(f"{me} and {other} write into one slot at the same time")
        self._writers[address] = me
        half = len(slot) // 2
        slot[:half] = data[:half]
        self.pass_time()
        slot[half:] = data[half:]
        if self._writers.get(address) is me:
            del self._writers[address]

    def read(self, slot: np.ndarray) -> np.ndarray:
        """Copy a slot out."""
        half = len(slot) // 2
        first = slot[:half].copy()
        self.pass_time()
        return np.concatenate((first, slot[half:]))


class Rows:
    """A `KVConnector` for one call: the rows of chunk i are those of ``keys[i]``."""

    num_slots: Final = 1 << 20

    def __init__(self, copying: Copying, contents: Bytes, rank: int, keys: Sequence[bytes]) -> None:
        self._copying = copying
        self._contents = contents
        self._rank = rank
        self._keys = keys
        self._loaded: dict[int, np.ndarray] = {}

    def rows(self) -> list[np.ndarray]:
        """Those of each chunk."""
        begins = range(0, len(self._keys) * CHUNK_SIZE, CHUNK_SIZE)
        return [np.arange(begin, begin + CHUNK_SIZE) for begin in begins]

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        """See `KVConnector`."""
        self._copying.write(shard, self._contents.of(self._keys[int(rows[0]) // CHUNK_SIZE], self._rank))

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        """See `KVConnector`."""
        self._loaded[int(rows[0]) // CHUNK_SIZE] = self._copying.read(shard)

    def check(self, flags: Sequence[bool]) -> None:
        """Raises `Violation` if a row that was called good is not that of its chunk."""
        for position, is_good in enumerate(flags):
            if is_good and not self._contents.are_of(self._loaded[position], self._keys[position], self._rank):
                raise Violation(f"rank {self._rank} was given other bytes for {self._keys[position][:2].hex()}")
