"""The slot protocol, one process at a time (several: tests/contract/test_arena_processes.py)."""

import random
from collections.abc import Callable

import numpy as np
import pytest

from lmcache_ray.arena.slots import MAX_GENERATION, ArenaSlots, CommittedSlot, SlotWord, WordState
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.errors import ArenaError, IntegrityError, ProtocolError

GEOMETRY = ArenaGeometry(num_slots=5, slot_nbytes=128)
KEY, OTHER_KEY = b"k" * 32, b"o" * 32


@pytest.fixture
def file_bytes() -> bytearray:
    return bytearray(GEOMETRY.file_nbytes)


@pytest.fixture
def slots(file_bytes: bytearray) -> ArenaSlots:
    return ArenaSlots(memoryview(file_bytes), GEOMETRY)


def store(slots: ArenaSlots, slot: int, generation: int, key: bytes = KEY, fill: int = 7) -> None:
    slots.begin_write(slot, generation)
    slots.data(slot)[:] = fill
    slots.commit(slot, generation, key, 16)


def test_a_slot_goes_from_free_to_committed_and_back(slots: ArenaSlots) -> None:
    assert slots.word(2) == SlotWord(0, WordState.FREE)
    slots.begin_write(2, 9)
    assert slots.word(2) == SlotWord(9, WordState.WRITING)
    assert not slots.is_committed(2, 9) and not slots.holds(2, 9, KEY) and slots.num_committed == 0
    slots.commit(2, 9, KEY, 16)
    assert slots.word(2) == SlotWord(9, WordState.COMMITTED)
    assert slots.is_committed(2, 9) and slots.holds(2, 9, KEY) and slots.num_committed == 1
    assert not slots.is_committed(2, 8) and not slots.holds(2, 9, OTHER_KEY) and not slots.holds(1, 9, KEY)
    assert list(slots.committed()) == [CommittedSlot(2, 9, KEY, 16)]
    assert slots.free(2, 9)
    assert slots.word(2) == SlotWord(9, WordState.FREE)
    assert not slots.is_committed(2, 9) and list(slots.committed()) == []


def test_data_is_a_view_of_its_slot_alone(slots: ArenaSlots, file_bytes: bytearray) -> None:
    for slot in range(5):
        slots.data(slot)[:] = slot + 1
    assert slots.data(3).shape == (128,) and slots.data(3).dtype == np.uint8
    assert bytes(file_bytes[GEOMETRY.data_offset :]) == b"".join(bytes([slot + 1]) * 128 for slot in range(5))
    assert not any(file_bytes[: GEOMETRY.data_offset])


@pytest.mark.parametrize("end", ["commit", "abort", "free", "none"])
def test_a_generation_is_never_written_twice(slots: ArenaSlots, end: str) -> None:
    slots.begin_write(0, 5)
    if end == "commit":
        slots.commit(0, 5, KEY, 1)
    elif end == "abort":
        slots.abort(0, 5)
    elif end == "free":
        slots.free(0, 5)
    before = slots.word(0)
    for stale in (5, 4, 0, -1):
        with pytest.raises(ProtocolError, match=rf"slot 0 .*generation {stale}\b.*newer than the slot's, 5"):
            slots.begin_write(0, stale)
    assert slots.word(0) == before
    slots.begin_write(0, 6)


def test_a_newer_generation_takes_the_slot_from_any_state(slots: ArenaSlots) -> None:
    store(slots, 0, 1)
    slots.begin_write(0, 2)
    assert not slots.holds(0, 1, KEY)
    slots.begin_write(0, 3)  # the writer of 2 is dead
    with pytest.raises(ProtocolError, match=r"WRITING\(3\), not WRITING\(2\)"):
        slots.commit(0, 2, KEY, 1)
    slots.commit(0, 3, OTHER_KEY, 1)
    assert slots.holds(0, 3, OTHER_KEY)


def test_the_largest_generation_fits_and_one_more_does_not(slots: ArenaSlots) -> None:
    store(slots, 0, MAX_GENERATION)
    assert slots.holds(0, MAX_GENERATION, KEY) and slots.is_committed(0, MAX_GENERATION)
    with pytest.raises(ProtocolError, match="at most"):
        slots.begin_write(1, MAX_GENERATION + 1)


@pytest.mark.parametrize("prepare", ["nothing", "committed", "freed", "newer"])
def test_commit_without_a_write_is_refused(slots: ArenaSlots, prepare: str) -> None:
    if prepare != "nothing":
        store(slots, 1, 4)
    if prepare == "freed":
        slots.free(1, 4)
    if prepare == "newer":
        slots.begin_write(1, 5)
    before = slots.word(1)
    with pytest.raises(ProtocolError, match=r"slot 1 cannot be committed"):
        slots.commit(1, 4, OTHER_KEY, 1)
    assert slots.word(1) == before


@pytest.mark.parametrize(("key", "num_tokens"), [(b"", 1), (b"x" * 31, 1), (b"x" * 33, 1), (KEY, 0), (KEY, 2**32)])
def test_what_a_record_cannot_hold_is_refused_and_can_still_be_committed(
    slots: ArenaSlots, key: bytes, num_tokens: int
) -> None:
    slots.begin_write(0, 1)
    with pytest.raises(ProtocolError, match=rf"{len(key)} bytes and {num_tokens} tokens"):
        slots.commit(0, 1, key, num_tokens)
    slots.commit(0, 1, KEY, 2**32 - 1)


def test_abort_ends_a_write_begun_or_not(slots: ArenaSlots) -> None:
    slots.begin_write(0, 3)
    assert slots.abort(0, 3) and slots.word(0) == SlotWord(3, WordState.FREE)
    assert slots.abort(0, 3)  # again
    assert slots.abort(1, 8)  # its plan never came, and is refused if it still does
    with pytest.raises(ProtocolError):
        slots.begin_write(1, 8)
    slots.begin_write(1, 9)
    assert slots.abort(1, 8) and slots.word(1) == SlotWord(9, WordState.WRITING)  # another's write is left alone


def test_abort_never_undoes_a_commit(slots: ArenaSlots) -> None:
    store(slots, 0, 3)
    assert not slots.abort(0, 3)
    assert slots.holds(0, 3, KEY)


def test_free_touches_only_its_own_generation(slots: ArenaSlots) -> None:
    store(slots, 0, 3)
    assert not slots.free(0, 2) and not slots.free(0, 4) and not slots.free(1, 0)
    assert slots.holds(0, 3, KEY)
    assert slots.free(0, 3) and not slots.free(0, 3)
    slots.begin_write(0, 4)
    assert slots.free(0, 4) and slots.word(0) == SlotWord(4, WordState.FREE)


@pytest.mark.parametrize("slot", [-1, 5, 2**40])
def test_a_slot_outside_the_arena_is_refused_everywhere(slots: ArenaSlots, slot: int) -> None:
    calls: list[Callable[[], object]] = [
        lambda: slots.begin_write(slot, 1),
        lambda: slots.data(slot),
        lambda: slots.commit(slot, 1, KEY, 1),
        lambda: slots.abort(slot, 1),
        lambda: slots.free(slot, 1),
        lambda: slots.is_committed(slot, 1),
        lambda: slots.holds(slot, 1, KEY),
        lambda: slots.word(slot),
    ]
    for call in calls:
        with pytest.raises(ProtocolError, match=rf"slot {slot} does not exist: the arena has 5 slots"):
            call()


RECORDS = GEOMETRY.records_offset


@pytest.mark.parametrize("damaged_byte", [RECORDS, RECORDS + 33, RECORDS + 40, RECORDS + 45])
def test_a_damaged_record_is_found_and_its_chunk_not_reported(
    slots: ArenaSlots, file_bytes: bytearray, damaged_byte: int
) -> None:
    store(slots, 0, 1)
    store(slots, 1, 2)
    slots.check_integrity()
    file_bytes[damaged_byte] ^= 0x10
    assert [chunk.slot for chunk in slots.committed()] == [1]
    with pytest.raises(IntegrityError, match=r"slot 0: COMMITTED\(1\).*record"):
        slots.check_integrity()


def test_a_record_of_another_generation_is_not_believed(slots: ArenaSlots, file_bytes: bytearray) -> None:
    store(slots, 0, 1)
    file_bytes[GEOMETRY.words_offset] = 2 << 2 | WordState.COMMITTED
    assert list(slots.committed()) == []


def test_check_integrity_lists_all_contradictions(slots: ArenaSlots, file_bytes: bytearray) -> None:
    store(slots, 0, 1)
    file_bytes[RECORDS] ^= 1
    file_bytes[GEOMETRY.words_offset + 8 * 4] = 3 << 2 | 3
    with pytest.raises(IntegrityError, match=r"slot 0: .*; slot 4: state 3\(3\)"):
        slots.check_integrity()


def test_what_is_damaged_is_freed_and_what_is_being_written_is_left_alone(
    slots: ArenaSlots, file_bytes: bytearray
) -> None:
    store(slots, 0, 10)
    store(slots, 1, 11)
    slots.begin_write(2, 12)
    file_bytes[GEOMETRY.words_offset + 8 * 3] = 13 << 2 | 3
    file_bytes[RECORDS + 64] ^= 1
    assert slots.free_damaged() == [1, 3]
    assert slots.unfinished() == [(2, 12)]
    assert [slots.word(slot) for slot in range(5)] == [
        SlotWord(10, WordState.COMMITTED),
        SlotWord(11, WordState.FREE),
        SlotWord(12, WordState.WRITING),
        SlotWord(13, WordState.FREE),
        SlotWord(0, WordState.FREE),
    ]
    slots.check_integrity()


def test_a_buffer_of_wrong_size_or_read_only_is_refused() -> None:
    for buffer in (memoryview(bytes(GEOMETRY.file_nbytes)), memoryview(bytearray(GEOMETRY.file_nbytes - 1))):
        with pytest.raises(ArenaError, match=f"{GEOMETRY.file_nbytes} writable bytes"):
            ArenaSlots(buffer, GEOMETRY)


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_agree_with_a_dictionary(slots: ArenaSlots, seed: int) -> None:
    """A model: per slot its newest generation, whether it is being written, and the chunk it holds."""
    rng = random.Random(seed)
    newest = [0] * 5
    writing: dict[int, int] = {}
    held: dict[int, tuple[int, bytes, int]] = {}
    for _ in range(400):
        slot, step = rng.randrange(5), rng.choice(["begin", "commit", "abort", "free"])
        generation = newest[slot] + rng.choice([-1, 0, 0, 0, 1])
        is_live = writing.get(slot) == generation
        if step == "begin" and generation > newest[slot]:
            slots.begin_write(slot, generation)
            slots.data(slot)[:] = generation % 251
            newest[slot], writing[slot] = generation, generation
            held.pop(slot, None)
        elif step == "commit" and is_live:
            key, num_tokens = rng.randbytes(32), rng.randrange(1, 300)
            slots.commit(slot, generation, key, num_tokens)
            del writing[slot]
            held[slot] = (generation, key, num_tokens)
        elif step in ("begin", "commit"):
            with pytest.raises(ProtocolError):
                slots.begin_write(slot, generation) if step == "begin" else slots.commit(slot, generation, KEY, 1)
        elif step == "abort" and generation >= newest[slot]:
            was_committed = slot in held and held[slot][0] == generation
            assert slots.abort(slot, generation) is not was_committed
            if not was_committed:
                newest[slot] = generation
                writing.pop(slot, None)
                held.pop(slot, None)
        elif step == "free":
            is_there = is_live or (slot in held and held[slot][0] == generation)
            assert slots.free(slot, generation) is is_there
            if is_there:
                writing.pop(slot, None)
                held.pop(slot, None)
        slots.check_integrity()
        assert list(slots.committed()) == [CommittedSlot(slot, *held[slot]) for slot in sorted(held)]
        assert [slots.word(slot).generation for slot in range(5)] == newest
        assert all(set(slots.data(slot).tolist()) == {held[slot][0] % 251} for slot in held)


# -- the floor --------------------------------------------------------------------------------------------------------


def test_below_the_floor_nothing_is_written_and_what_was_there_stays(slots: ArenaSlots) -> None:
    store(slots, 0, 10)
    slots.raise_floor(20)
    with pytest.raises(ProtocolError, match="generations begin at 20"):
        slots.begin_write(0, 19)
    assert slots.is_committed(0, 10), "whoever reads it goes on"
    store(slots, 0, 20)


def test_a_write_under_way_when_the_floor_rises_is_never_committed(slots: ArenaSlots) -> None:
    slots.begin_write(0, 10)
    slots.raise_floor(11)
    assert slots.unfinished() == [(0, 10)]
    with pytest.raises(ProtocolError, match="generations begin at 11"):
        slots.commit(0, 10, b"k" * 32, 5)
    assert slots.word(0) == SlotWord(10, WordState.FREE)


def test_a_floor_that_rises_between_a_writers_look_and_its_word_ends_it_before_a_byte(
    slots: ArenaSlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer was stopped there for as long as it takes to replace the coordinator."""

    class Stopped:
        looks = 0

        def __getitem__(self, index: int) -> int:
            self.looks += 1
            return 0 if self.looks == 1 else 50

    monkeypatch.setattr(slots, "_floor", Stopped())
    with pytest.raises(ProtocolError, match="generations begin at 50"):
        slots.begin_write(0, 10)
    assert slots.word(0) == SlotWord(10, WordState.FREE)


def test_the_floor_only_rises(slots: ArenaSlots) -> None:
    assert slots.floor == 0
    slots.raise_floor(7)
    slots.raise_floor(3)
    assert slots.floor == 7
