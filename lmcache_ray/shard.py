"""One rank's bytes: carries out what plans say, chunk by chunk, and answers which chunks it did.

A shard decides nothing. It writes a chunk in the order WRITING(g), data, record, COMMITTED(g) and believes what it
read only if the slot was COMMITTED(g) before and after the last byte (see `arena/slots.py`).
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import numpy as np

from lmcache_ray.arena.slots import ArenaSlots
from lmcache_ray.connector.base import KVConnector
from lmcache_ray.errors import ProtocolError
from lmcache_ray.index.plans import ChunkRef


class ChunkSource(Protocol):
    """Where the bytes of planned chunks are read from."""

    def open(self, position: int, ref: ChunkRef) -> np.ndarray | None:
        """The bytes ``[slot_nbytes]`` of the plan's chunk number `position`, or None if `ref` is not there (any more).

        They may change under the reader: believe them only if `is_intact` says so after the last byte was read.
        """
        ...

    def is_intact(self, ref: ChunkRef) -> bool:
        """True if the bytes that `open` gave are still those of `ref`."""
        ...


class ArenaSource:
    """Reads chunks out of an arena: the rank's own, or one mapped from another process of the same node."""

    def __init__(self, slots: ArenaSlots) -> None:
        self._slots = slots

    def open(self, position: int, ref: ChunkRef) -> np.ndarray | None:
        """A view of the slot, if it holds `ref`."""
        return self._slots.chunk(ref.slot, ref.generation, ref.key)

    def is_intact(self, ref: ChunkRef) -> bool:
        """True while the slot is COMMITTED with the generation of `ref`."""
        return self._slots.is_committed(ref.slot, ref.generation)


class PayloadSource:
    """Reads chunks out of bytes that were copied from a slot and checked there: uint8 ``[num_chunks, slot_nbytes]``.

    `present[i]` is False where the sender did not find chunk i intact.
    """

    def __init__(self, payload: np.ndarray, present: Sequence[bool]) -> None:
        self._payload = payload
        self._present = present

    def open(self, position: int, ref: ChunkRef) -> np.ndarray | None:
        """The payload's row, if the sender vouched for it."""
        return self._payload[position] if self._present[position] else None

    def is_intact(self, ref: ChunkRef) -> bool:
        """Always: a payload is this reader's own copy."""
        return True


NO_SOURCE: ChunkSource = PayloadSource(np.empty((0, 0), dtype=np.uint8), ())
"""The source of a load that has no chunks."""


class EngineShard:
    """The writing side of one rank's arena. Thread-safe, as long as plans give each slot to one writer at a time.

    It knows which generations are being written at this moment, so that a slot is not given away under a writer.
    """

    def __init__(self, slots: ArenaSlots) -> None:
        self._slots = slots
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._in_progress: dict[int, int] = {}  # generation -> slot

    @property
    def slots(self) -> ArenaSlots:
        """The arena's slots."""
        return self._slots

    def store(self, refs: Sequence[ChunkRef], rows: Sequence[np.ndarray], connector: KVConnector) -> list[bool]:
        """Copy each chunk's KV rows into its slot and commit it; answers per chunk whether that was done.

        False: the slot refused the generation as stale, or was freed meanwhile, so the plan is out of date. Any other
        failure aborts the slot that was being written and is raised.
        """

        def gather(position: int, data: np.ndarray) -> int:
            connector.gather(data, rows[position])
            return len(rows[position])

        return self._write(refs, gather)

    def take_in(self, refs: Sequence[ChunkRef], payload: np.ndarray, num_tokens: Sequence[int]) -> list[bool]:
        """Write chunks given as bytes, uint8 ``[len(refs), slot_nbytes]``; answers as `store` does."""

        def copy(position: int, data: np.ndarray) -> int:
            data[:] = payload[position]
            return num_tokens[position]

        return self._write(refs, copy)

    def fill(self, refs: Sequence[ChunkRef], fill: Callable[[int, np.ndarray], int]) -> list[bool]:
        """Write chunks by ``fill(position, data)``, which puts chunk `position` into `data` and answers its tokens.

        0 tokens: there is no such chunk, nothing is committed. Answers as `store` does.
        """
        return self._write(refs, fill)

    def settle(self, refs: Sequence[ChunkRef], *, foreign: Collection[tuple[int, int]] = ()) -> list[bool]:
        """Make sure that `refs` are not and never will be written here; per ref False while its slot is written.

        `foreign` are the slots, with generations, that other living processes may be writing.
        """
        with self._lock:
            busy = {*self._in_progress.values(), *(slot for slot, _ in foreign)}
            idle = [ref.slot not in busy for ref in refs]
            self._drop(ref for ref, is_idle in zip(refs, idle, strict=True) if is_idle)
        return idle

    def fence(self, floor: int, *, wait_s: float) -> None:
        """Let no write below the generation `floor` begin or commit, here or in any process that maps the arena.

        Those under way in this process may end within `wait_s`; what is still under way then ends without a commit.
        """
        self._slots.raise_floor(floor)
        with self._lock:
            self._ended.wait_for(lambda: all(generation >= floor for generation in self._in_progress), wait_s)
            for generation, slot in self._in_progress.items():
                if generation < floor:
                    self._slots.abort(slot, generation)

    def unfinished(self, *, foreign: Collection[tuple[int, int]] = ()) -> list[tuple[int, int]]:
        """(slot, generation) wherever bytes may still be written, after a `fence`: by threads here, and `foreign` ones.

        A slot that is WRITING below the floor by none of them was left by a writer that is dead; it is freed.
        """
        with self._lock:
            busy = {*((slot, of) for of, slot in self._in_progress.items()), *foreign}
            for slot, generation in self._slots.unfinished():
                if generation < self._slots.floor and (slot, generation) not in busy:
                    self._slots.abort(slot, generation)
            return sorted({*busy, *self._slots.unfinished()})

    def free(self, refs: Sequence[ChunkRef]) -> None:
        """Drop these chunks, written or not: none of them is here now, and none can be committed any more.

        A slot whose generation is newer is left alone. A write in progress goes on, and ends without a commit.
        """
        with self._lock:
            self._drop(refs)

    def _drop(self, refs: Iterable[ChunkRef]) -> None:
        for ref in refs:
            if not self._slots.abort(ref.slot, ref.generation):
                self._slots.free(ref.slot, ref.generation)

    def _write(self, refs: Sequence[ChunkRef], fill: Callable[[int, np.ndarray], int]) -> list[bool]:
        """`fill(position, data)` writes one chunk's bytes and answers its number of tokens."""
        with self._lock:
            self._in_progress.update((ref.generation, ref.slot) for ref in refs)
        try:
            return [self._write_one(position, ref, fill) for position, ref in enumerate(refs)]
        finally:
            with self._lock:
                for ref in refs:
                    self._in_progress.pop(ref.generation, None)
                self._ended.notify_all()

    def _write_one(self, position: int, ref: ChunkRef, fill: Callable[[int, np.ndarray], int]) -> bool:
        slots = self._slots
        try:
            with self._lock:  # each look at a slot's word and the store that follows it belong together
                slots.begin_write(ref.slot, ref.generation)
        except ProtocolError:
            return False
        try:
            num_tokens = fill(position, slots.data(ref.slot))
        except BaseException:
            with self._lock:
                slots.abort(ref.slot, ref.generation)
            raise
        if not num_tokens:
            with self._lock:
                slots.abort(ref.slot, ref.generation)
            return False
        try:
            with self._lock:
                slots.commit(ref.slot, ref.generation, ref.key, num_tokens)
        except ProtocolError:  # dropped meanwhile, by a clear
            return False
        return True


def read_chunks(
    source: ChunkSource,
    refs: Sequence[ChunkRef],
    rows: Sequence[np.ndarray],
    connector: KVConnector,
    *,
    first_row: int = 0,
) -> list[bool]:
    """Copy each chunk into its KV rows; answers per chunk whether the rows now hold exactly that chunk.

    `first_row` is the row of the first chunk at which reading begins (a start in the middle of a chunk). Rows of a
    chunk that is answered False may have been written with bytes that must not be used.
    """
    loaded = []
    for position, (ref, chunk_rows) in enumerate(zip(refs, rows, strict=True)):
        data = source.open(position, ref)
        if data is not None:
            connector.scatter(data, chunk_rows, first_row if position == 0 else 0)
        loaded.append(data is not None and source.is_intact(ref))
    return loaded


def export_chunks(source: ChunkSource, refs: Sequence[ChunkRef], slot_nbytes: int) -> tuple[np.ndarray, list[bool]]:
    """Copy chunks out: uint8 ``[len(refs), slot_nbytes]`` and, per chunk, whether the copy is intact."""
    payload = np.empty((len(refs), slot_nbytes), dtype=np.uint8)
    present = []
    for position, ref in enumerate(refs):
        data = source.open(position, ref)
        if data is not None:
            payload[position] = data
        present.append(data is not None and source.is_intact(ref))
    return payload, present


def leading(flags: Sequence[bool]) -> int:
    """How many of `flags` are True before the first False."""
    return next((position for position, flag in enumerate(flags) if not flag), len(flags))
