"""One rank's bytes: what a plan writes, what a reader believes, and what a failure leaves."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lmcache_ray.arena.arena import Arena
from lmcache_ray.arena.slots import WordState
from lmcache_ray.arena.spec import ArenaGeometry, ArenaSpec
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.shard import NO_SOURCE, ArenaSource, EngineShard, PayloadSource, export_chunks, leading, read_chunks

SLOT_NBYTES = 128
KEYS = [bytes([letter]) * 32 for letter in b"abcd"]


class ArrayConnector:
    """KV memory that is one array of rows of 16 bytes; `before` and `after` are called around each copy."""

    def __init__(
        self, num_slots: int = 32, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
    ):
        self.rows = np.random.default_rng(0).integers(0, 256, (num_slots, 16), dtype=np.uint8)
        self._before, self._after = before, after

    @property
    def num_slots(self) -> int:
        return len(self.rows)

    def gather(self, shard: np.ndarray, rows: np.ndarray) -> None:
        self._call(self._before)
        shard[: 16 * len(rows)] = self.rows[rows].reshape(-1)
        self._call(self._after)

    def scatter(self, shard: np.ndarray, rows: np.ndarray, first_row: int) -> None:
        self._call(self._before)
        self.rows[rows] = shard.reshape(-1, 16)[first_row : first_row + len(rows)]
        self._call(self._after)

    def _call(self, hook: Callable[[], None] | None) -> None:
        if hook is not None:
            hook()


@pytest.fixture
def arena(tmp_path: Path):  # type: ignore[no-untyped-def]
    spec = ArenaSpec("test", "shard", 0, 1, b"f" * 32, ArenaGeometry(4, SLOT_NBYTES))
    with Arena.create(spec, tmp_path, node_id="n", now=0.0) as arena:
        yield arena


@pytest.fixture
def shard(arena: Arena) -> EngineShard:
    return EngineShard(arena.slots)


def ref(slot: int, generation: int, key: int = 0) -> ChunkRef:
    return ChunkRef(KEYS[key], slot, generation)


def chunks(*firsts: int, num_rows: int = 4) -> Sequence[np.ndarray]:
    return [np.arange(first, first + num_rows) for first in firsts]


def test_what_is_stored_is_read_back_from_where_it_was_put(shard: EngineShard) -> None:
    source, target = ArrayConnector(), ArrayConnector()
    target.rows[:] = 0
    refs = [ref(2, 1, 0), ref(0, 2, 1)]
    assert shard.store(refs, chunks(4, 12), source) == [True, True]
    assert [(chunk.slot, chunk.num_tokens) for chunk in shard.slots.committed()] == [(0, 4), (2, 4)]
    assert read_chunks(ArenaSource(shard.slots), refs, chunks(20, 8), target) == [True, True]
    assert np.array_equal(target.rows[20:24], source.rows[4:8]) and np.array_equal(
        target.rows[8:12], source.rows[12:16]
    )
    assert not target.rows[:8].any() and not target.rows[12:20].any()


def test_a_read_may_start_within_the_first_chunk(shard: EngineShard) -> None:
    source, target = ArrayConnector(), ArrayConnector()
    refs = [ref(0, 1, 0), ref(1, 2, 1)]
    shard.store(refs, chunks(0, 4), source)
    rows = [np.arange(10, 11), np.arange(20, 24)]
    assert read_chunks(ArenaSource(shard.slots), refs, rows, target, first_row=3) == [True, True]
    assert np.array_equal(target.rows[10], source.rows[3]) and np.array_equal(target.rows[20:24], source.rows[4:8])


def test_a_stale_plan_writes_nothing(shard: EngineShard) -> None:
    connector = ArrayConnector()
    shard.store([ref(1, 5)], chunks(0), connector)
    before = shard.slots.data(1).copy()
    assert shard.store([ref(1, 5, 1), ref(1, 4, 1), ref(9, 6, 1), ref(2, 6, 1)], chunks(8, 8, 8, 8), connector) == [
        False,
        False,
        False,
        True,
    ]
    assert np.array_equal(shard.slots.data(1), before) and shard.slots.holds(1, 5, KEYS[0])


def test_a_failed_copy_aborts_its_chunk_and_leaves_the_rest_free(shard: EngineShard) -> None:
    calls = iter([None, RuntimeError("device lost")])

    def fail_second() -> None:
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(RuntimeError, match="device lost"):
        shard.store([ref(0, 1, 0), ref(1, 2, 1), ref(2, 3, 2)], chunks(0, 4, 8), ArrayConnector(after=fail_second))
    assert [shard.slots.word(slot).state for slot in range(3)] == [WordState.COMMITTED, WordState.FREE, WordState.FREE]
    assert all(shard.settle([ref(0, 1, 0), ref(1, 2, 1), ref(2, 3, 2)])), "no write is left in progress"
    assert shard.slots.num_committed == 0
    shard.slots.check_integrity()


def test_bytes_can_be_taken_in_and_exported(shard: EngineShard) -> None:
    payload = np.random.default_rng(3).integers(0, 256, (2, SLOT_NBYTES), dtype=np.uint8)
    refs = [ref(3, 1, 0), ref(1, 2, 1)]
    assert shard.take_in(refs, payload, [4, 2]) == [True, True]
    assert [chunk.num_tokens for chunk in shard.slots.committed()] == [2, 4]
    gone = ref(0, 7, 2)
    copied, present = export_chunks(ArenaSource(shard.slots), [refs[0], gone, refs[1]], SLOT_NBYTES)
    assert present == [True, False, True]
    assert np.array_equal(copied[[0, 2]], payload)
    source = PayloadSource(copied, present)
    assert np.array_equal(source.open(2, refs[1]), payload[1]) and source.open(1, gone) is None  # type: ignore[arg-type]
    payload[:] = 0
    assert copied[0].any(), "an export is a copy"
    assert NO_SOURCE.is_intact(gone) and export_chunks(NO_SOURCE, [], SLOT_NBYTES)[1] == []


@pytest.mark.parametrize("other", [ref(0, 1, 1), ref(0, 2, 0), ref(1, 1, 0)])
def test_a_reader_wants_this_key_in_this_use_of_this_slot(shard: EngineShard, other: ChunkRef) -> None:
    shard.store([ref(0, 1, 0)], chunks(0), ArrayConnector())
    target = ArrayConnector()
    before = target.rows.copy()
    assert read_chunks(ArenaSource(shard.slots), [other], chunks(8), target) == [False]
    assert np.array_equal(target.rows, before)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_slot_that_is_reused_during_the_copy_is_not_believed(shard: EngineShard, moment: str) -> None:
    """The next chunk is written while the reader is between its two looks at the slot."""
    shard.store([ref(0, 1, 0), ref(1, 2, 1)], chunks(0, 4), ArrayConnector())

    def reuse() -> None:
        shard.store([ref(0, shard.slots.word(0).generation + 10, 2)], chunks(16), ArrayConnector())

    refs = [ref(0, 1, 0), ref(1, 2, 1)]
    hooks: dict[str, Callable[[], None]] = {moment: reuse}
    reader = ArrayConnector(**hooks)  # type: ignore[arg-type]
    assert read_chunks(ArenaSource(shard.slots), refs, chunks(8, 12), reader) == [False, True]


def test_a_slot_that_is_reused_during_an_export_is_not_vouched_for(shard: EngineShard) -> None:
    shard.store([ref(0, 1, 0)], chunks(0), ArrayConnector())

    class Overtaken(ArenaSource):
        def open(self, position: int, wanted: ChunkRef) -> np.ndarray | None:
            data = super().open(position, wanted)
            shard.free([wanted])
            return data

    assert export_chunks(Overtaken(shard.slots), [ref(0, 1, 0)], SLOT_NBYTES)[1] == [False]


@contextmanager
def writing(shard: EngineShard, plan: Sequence[ChunkRef]) -> Iterator[list[bool]]:
    """A thread stores `plan` and stands at its first chunk while the body runs; its answers are there afterwards."""
    started, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert go_on.wait(10)

    answers: list[bool] = []
    rows, connector = chunks(*range(0, 4 * len(plan), 4)), ArrayConnector(before=wait)
    writer = threading.Thread(target=lambda: answers.extend(shard.store(plan, rows, connector)))
    writer.start()
    assert started.wait(10)
    try:
        yield answers
    finally:
        go_on.set()
        writer.join()


def test_settle_answers_for_each_ref_whether_it_is_not_being_written(shard: EngineShard) -> None:
    plan, others = [ref(0, 1, 0), ref(1, 2, 1)], [ref(2, 9, 2), ref(0, 7, 3)]
    shard.store([ref(3, 4, 2)], chunks(0), ArrayConnector())
    with writing(shard, plan) as answers:
        asked = [plan[1], others[0], plan[0], ref(3, 4, 2)]
        assert shard.settle(asked) == [False, True, False, True], "the plan's second chunk will be written next"
    assert answers == [True, True], "a write in progress goes on"
    assert [chunk.slot for chunk in shard.slots.committed()] == [0, 1], "what was idle is dropped, committed or not"
    assert shard.settle(plan) == [True, True] and shard.slots.num_committed == 0
    assert shard.settle([]) == []


def test_a_chunk_that_is_freed_while_it_is_written_is_not_committed(shard: EngineShard) -> None:
    plan = [ref(0, 1, 0), ref(1, 2, 1), ref(2, 3, 2)]
    with writing(shard, plan) as answers:
        shard.free(plan[:2])
        assert not any(shard.settle(plan)), "the writer has not ended, so no slot may be given away"
    assert answers == [False, False, True]
    assert [chunk.key for chunk in shard.slots.committed()] == [KEYS[2]]
    assert shard.settle(plan) == [True, True, True]


def test_a_write_that_was_freed_before_it_began_is_never_committed(shard: EngineShard) -> None:
    shard.store([ref(0, 1, 0)], chunks(0), ArrayConnector())
    plan = [ref(0, 5, 1), ref(1, 6, 2)]
    shard.free(plan)
    assert shard.slots.num_committed == 0, "the plan had given the first chunk's slot away"
    assert shard.store(plan, chunks(4, 8), ArrayConnector()) == [False, False]
    assert shard.store([ref(0, 7, 1)], chunks(4), ArrayConnector()) == [True]


def test_what_was_settled_is_never_written(shard: EngineShard) -> None:
    assert shard.settle([ref(0, 3, 0)]) == [True]
    assert shard.store([ref(0, 3, 0), ref(0, 2, 1)], chunks(0, 4), ArrayConnector()) == [False, False]
    assert shard.store([ref(0, 4, 0)], chunks(0), ArrayConnector()) == [True]


def test_free_drops_the_named_use_only(shard: EngineShard) -> None:
    shard.store([ref(0, 2, 0), ref(1, 3, 1)], chunks(0, 4), ArrayConnector())
    shard.free([ref(0, 1, 0), ref(1, 3, 1), ref(3, 8, 2)])
    assert [chunk.slot for chunk in shard.slots.committed()] == [0]


def test_readers_and_a_writer_of_the_same_slot_never_mix_bytes(shard: EngineShard) -> None:
    """Each use of the slot fills it with one value; a copy that is believed holds the value of its own ref."""
    last, mismatches, num_read = 3000, [], 0
    kv = np.zeros((1, SLOT_NBYTES), dtype=np.uint8)

    def write() -> None:
        for generation in range(1, last + 1):
            kv[:] = generation % 256
            shard.take_in([ref(0, generation)], kv, [4])

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        generation = shard.slots.word(0).generation
        copied, (intact,) = export_chunks(ArenaSource(shard.slots), [ref(0, generation)], SLOT_NBYTES)
        num_read += intact
        if intact and set(copied[0].tolist()) != {generation % 256}:
            mismatches.append(generation)
    writer.join()
    assert not mismatches and export_chunks(ArenaSource(shard.slots), [ref(0, last)], SLOT_NBYTES)[1] == [True]


def test_leading_counts_up_to_the_first_failure() -> None:
    assert [leading(flags) for flags in ([], [True], [False], [True, True, False, True])] == [0, 1, 0, 2]
