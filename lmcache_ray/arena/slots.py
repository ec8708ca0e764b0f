"""The slot protocol: how the bytes of one chunk get into a slot, and how a reader knows that they are still there.

Every process that maps an arena (owner, clients, readers) follows it through an `ArenaSlots`. A slot has

- a *word*, one aligned 64-bit value ``generation << 2 | state``, stored and loaded as a whole. The code touches it
  only through a ``memoryview`` of format ``Q`` or a NumPy uint64 array: both move 8 bytes at once, whereas `struct`
  and slices may move them one by one and let a reader see halves of two values.
- a *record*: key, number of tokens and generation of the chunk, with a CRC over the three.
- its *data*.

Writing, by the one process that holds the live plan for the slot::

    begin_write: WRITING(g)   ->   data   ->   commit: record, then COMMITTED(g)
                                              abort:  FREE(g)

Neither step is taken for a generation below the arena's *floor*, which its owner raises when those who planned such
writes have been replaced. `begin_write` looks at the floor once more after it has written the word: a writer that was
stopped between the two, however long, then writes no byte. One that was stopped later is still WRITING, for the owner
to see, and its slot is not used again before it has ended.

Reading, by anyone, with key and generation from a plan::

    holds(slot, g, key)   ->   copy the data   ->   is_committed(slot, g), else throw the copy away

The second look is what makes a copy valid: a slot may be given to another chunk at any time. Its writer changes the
word before it changes a byte and a generation is never used twice, so a word that is COMMITTED(g) before the first
and after the last byte means that every byte between belonged to g. This needs stores to be seen in the order in
which they were made. x86-64 shows them so, but for streaming stores, which whoever uses them must fence (`memcpy` and
our row copies do). Other machines need not, and the words are not fenced for them: `memory_order.py` says so when an
arena is made.

A slot that was freed or aborted keeps its generation: an older plan, however late, can never write it again.
"""

import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from lmcache_ray.arena.spec import FLOOR_OFFSET, RECORD_NBYTES, WORD_NBYTES, ArenaGeometry
from lmcache_ray.errors import ArenaError, IntegrityError, ProtocolError
from lmcache_ray.keys import KEY_NBYTES

MAX_GENERATION: Final = 2**62 - 1
MAX_TOKENS: Final = 2**32 - 1

# Plain integers for the hot path: arithmetic on enum members costs more than all the rest of a look.
_STATE_BITS: Final = 2
_STATE_MASK: Final = 3
_FREE: Final = 0
_WRITING: Final = 1
_COMMITTED: Final = 2

_BODY: Final = struct.Struct(f"<{KEY_NBYTES}sIQ")  # key, num_tokens, generation
_RECORD: Final = struct.Struct(f"<{_BODY.size}sI")  # body, CRC of the body


class WordState(IntEnum):
    """What a slot word says of its slot."""

    FREE = _FREE
    WRITING = _WRITING
    COMMITTED = _COMMITTED


class SlotWord(NamedTuple):
    """A slot word taken apart. `state` is an int because a damaged file may hold a fourth value."""

    generation: int
    state: int

    def __str__(self) -> str:
        name = WordState(self.state).name if self.state <= _COMMITTED else f"state {self.state}"
        return f"{name}({self.generation})"


class CommittedSlot(NamedTuple):
    """One chunk that an arena holds."""

    slot: int
    generation: int
    key: bytes
    num_tokens: int


class ArenaSlots:
    """The slots of one mapped arena. It keeps the mapping alive, so a view of it is never a dangling one.

    The methods do not lock: one writer per slot is what plans guarantee. A slot number outside the arena is a
    `ProtocolError` everywhere.
    """

    __slots__ = ("_data", "_floor", "_num_slots", "_records", "_slot_nbytes", "_word_array", "_words")

    def __init__(self, buffer: memoryview, geometry: ArenaGeometry) -> None:
        """`buffer` is the whole arena file, writable, its address a multiple of 8."""
        if buffer.readonly or buffer.nbytes != geometry.file_nbytes:
            raise ArenaError(f"slots need {geometry.file_nbytes} writable bytes; got {buffer.nbytes}")
        count, words, records = geometry.num_slots, geometry.words_offset, geometry.records_offset
        self._num_slots = count
        self._slot_nbytes = geometry.slot_nbytes
        self._words = buffer[words : words + count * WORD_NBYTES].cast("Q")
        self._floor = buffer[FLOOR_OFFSET : FLOOR_OFFSET + WORD_NBYTES].cast("Q")
        self._records = buffer[records : records + count * RECORD_NBYTES]
        self._word_array: npt.NDArray[np.uint64] = np.frombuffer(buffer, np.uint64, count, words)
        data = np.frombuffer(buffer, np.uint8, offset=geometry.data_offset)
        self._data: npt.NDArray[np.uint8] = data.reshape(count, geometry.slot_nbytes)

    @property
    def num_slots(self) -> int:
        """Slots of the arena, used or not."""
        return self._num_slots

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot."""
        return self._slot_nbytes

    @property
    def num_committed(self) -> int:
        """Slots that hold a chunk at this moment."""
        return int(np.count_nonzero(self._word_array & _STATE_MASK == _COMMITTED))

    @property
    def floor(self) -> int:
        """The lowest generation that may be written at this moment."""
        return self._floor[0]

    def raise_floor(self, generation: int) -> None:
        """Refuse all writes below `generation` from now on, in every process. For the arena's owner; never falls."""
        self._floor[0] = max(self._floor[0], generation)

    # -- writing ------------------------------------------------------------------------------------------------------

    def begin_write(self, slot: int, generation: int) -> None:
        """Make the slot WRITING(generation), whatever it was; its former content is gone for every reader.

        :raises ProtocolError: `generation` is not newer than the slot's, or below the floor.
        """
        current = self._word(slot) >> _STATE_BITS
        if not current < generation <= MAX_GENERATION:
            raise ProtocolError(
                f"slot {slot} cannot be written with generation {generation}: "
                f"it must be newer than the slot's, {current}, and at most {MAX_GENERATION}"
            )
        if generation < self._floor[0]:
            raise self._below_floor(slot, generation)
        self._words[slot] = generation << _STATE_BITS | _WRITING
        if generation < self._floor[0]:  # it rose between the look and the word
            self._words[slot] = generation << _STATE_BITS
            raise self._below_floor(slot, generation)

    def data(self, slot: int) -> npt.NDArray[np.uint8]:
        """The slot's bytes, ``[slot_nbytes]``, not copied. Write them only between `begin_write` and `commit`."""
        if not 0 <= slot < self._num_slots:
            raise self._no_such_slot(slot)
        row: npt.NDArray[np.uint8] = self._data[slot]
        return row

    def commit(self, slot: int, generation: int, key: bytes, num_tokens: int) -> None:
        """Publish the slot's data as the chunk `key` of `num_tokens` tokens.

        :raises ProtocolError: the slot is not WRITING(generation), or `key` or `num_tokens` cannot be recorded; nothing
            is changed then. Or the floor has risen above the generation; the slot is FREE then.
        """
        if self._word(slot) != generation << _STATE_BITS | _WRITING:
            raise ProtocolError(f"slot {slot} cannot be committed: it is {self.word(slot)}, not WRITING({generation})")
        if len(key) != KEY_NBYTES or not 1 <= num_tokens <= MAX_TOKENS:
            raise ProtocolError(
                f"slot {slot} cannot be committed: a chunk has a key of {KEY_NBYTES} bytes and 1 to {MAX_TOKENS} "
                f"tokens; got {len(key)} bytes and {num_tokens} tokens"
            )
        if generation < self._floor[0]:
            self._words[slot] = generation << _STATE_BITS
            raise self._below_floor(slot, generation)
        body = _BODY.pack(key, num_tokens, generation)
        _RECORD.pack_into(self._records, slot * RECORD_NBYTES, body, zlib.crc32(body))
        self._words[slot] = generation << _STATE_BITS | _COMMITTED

    def abort(self, slot: int, generation: int) -> bool:
        """End a write that will not be committed, begun or not, so that it cannot be any more.

        True: generation is not in the slot and never will be. False: it was committed before, and stays.
        """
        word = self._word(slot)
        if word == generation << _STATE_BITS | _COMMITTED:
            return False
        if word >> _STATE_BITS <= generation:
            self._words[slot] = generation << _STATE_BITS
        return True

    def free(self, slot: int, generation: int) -> bool:
        """Free the slot if it is COMMITTED or WRITING with this generation; False, and no change, if it is not."""
        word = self._word(slot)
        if word >> _STATE_BITS != generation or word & _STATE_MASK == _FREE:
            return False
        self._words[slot] = generation << _STATE_BITS
        return True

    # -- reading ------------------------------------------------------------------------------------------------------

    def is_committed(self, slot: int, generation: int) -> bool:
        """True while the slot is COMMITTED(generation): the look to take after the last byte was read."""
        return self._word(slot) == generation << _STATE_BITS | _COMMITTED

    def holds(self, slot: int, generation: int, key: bytes) -> bool:
        """True if the slot is COMMITTED(generation) with the chunk `key`: the look to take before the first byte."""
        word = generation << _STATE_BITS | _COMMITTED
        if self._word(slot) != word:
            return False
        offset = slot * RECORD_NBYTES
        return bytes(self._records[offset : offset + KEY_NBYTES]) == key and self._words[slot] == word

    def num_tokens(self, slot: int, generation: int) -> int:
        """Tokens of the chunk that the slot held when it was COMMITTED(generation); 0 if its record is another's."""
        self._word(slot)
        record = self._record(slot, generation)
        return 0 if record is None else record.num_tokens

    def chunk(self, slot: int, generation: int, key: bytes) -> npt.NDArray[np.uint8] | None:
        """The slot's bytes if it `holds` that chunk, else None."""
        return self._data[slot] if self.holds(slot, generation, key) else None

    def word(self, slot: int) -> SlotWord:
        """Generation and state of the slot at this moment."""
        word = self._word(slot)
        return SlotWord(word >> _STATE_BITS, word & _STATE_MASK)

    def committed(self) -> Iterator[CommittedSlot]:
        """Every chunk the arena holds, by slot number; slots whose record is damaged are left out."""
        for slot in self._used_slots():
            word = self._words[slot]
            record = self._record(slot, word >> _STATE_BITS)
            if record is not None and word & _STATE_MASK == _COMMITTED and self._words[slot] == word:
                yield record

    # -- repair and self-check ----------------------------------------------------------------------------------------

    def free_damaged(self) -> list[int]:
        """Free, keeping generations, every slot whose word or record contradicts itself; their numbers.

        For an owner that has just taken over the arena of a dead one. What is WRITING stays so: its writer may be
        another process, and live.
        """
        freed = [slot for slot in self._used_slots() if self._defect(slot)]
        for slot in freed:
            self._words[slot] &= ~_STATE_MASK
        return freed

    def unfinished(self) -> list[tuple[int, int]]:
        """(slot, generation) of every slot that is WRITING at this moment."""
        slots = [int(slot) for slot in np.flatnonzero(self._word_array & _STATE_MASK == _WRITING)]
        return [(slot, word.generation) for slot in slots if (word := self.word(slot)).state == _WRITING]

    def check_integrity(self) -> None:
        """Look at every slot. Meaningful while nobody writes.

        :raises IntegrityError: naming all slots that contradict themselves.
        """
        defects = [defect for slot in self._used_slots() if (defect := self._defect(slot))]
        if defects:
            raise IntegrityError("the arena contradicts itself: " + "; ".join(defects))

    def _word(self, slot: int) -> int:
        if not 0 <= slot < self._num_slots:
            raise self._no_such_slot(slot)
        return self._words[slot]

    def _used_slots(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self._word_array & _STATE_MASK != _FREE)]

    def _record(self, slot: int, generation: int) -> CommittedSlot | None:
        body, crc = _RECORD.unpack_from(self._records, slot * RECORD_NBYTES)
        key, num_tokens, recorded = _BODY.unpack(body)
        if zlib.crc32(body) != crc or recorded != generation or num_tokens < 1:
            return None
        return CommittedSlot(slot, generation, key, num_tokens)

    def _defect(self, slot: int) -> str:
        word = self.word(slot)
        if word.state > _COMMITTED:
            return f"slot {slot}: {word}, which no writer makes"
        if word.state == _COMMITTED and self._record(slot, word.generation) is None:
            return f"slot {slot}: {word}, but its record is damaged or of another generation"
        return ""

    def _below_floor(self, slot: int, generation: int) -> ProtocolError:
        return ProtocolError(
            f"slot {slot} is not written with generation {generation}: who planned that has been replaced, and "
            f"generations begin at {self.floor} now"
        )

    def _no_such_slot(self, slot: int) -> ProtocolError:
        return ProtocolError(f"slot {slot} does not exist: the arena has {self._num_slots} slots, counted from 0")
