"""An arena without a file: the same slots, and memory that really goes back."""

import os

import numpy as np
import pytest

from lmcache_ray.arena.private import PrivateArena
from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.errors import CapacityError

KEY = bytes(range(32))
MIB = 2**20


def resident_nbytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_slots_follow_the_protocol() -> None:
    slots = PrivateArena(ArenaGeometry(4, 128)).slots
    slots.begin_write(2, 7)
    slots.data(2)[:] = np.arange(128)
    slots.commit(2, 7, KEY, 16)
    assert slots.holds(2, 7, KEY)
    assert [tuple(chunk) for chunk in slots.committed()] == [(2, 7, KEY, 16)]
    slots.check_integrity()


def test_close_gives_the_memory_back_while_the_slots_are_still_held() -> None:
    arena = PrivateArena(ArenaGeometry(64, MIB))
    slots = arena.slots
    for slot in range(64):
        slots.begin_write(slot, 1)
        slots.data(slot)[:] = 255
        slots.commit(slot, 1, KEY, 1)
    before = resident_nbytes()
    arena.close()
    arena.close()
    assert before - resident_nbytes() > 48 * MIB
    assert slots.num_committed == 0
    assert not slots.is_committed(0, 1)
    assert not slots.data(0).any()


def test_more_than_the_address_space_is_refused_with_the_size() -> None:
    geometry = ArenaGeometry(2**40, 2**20)
    with pytest.raises(CapacityError, match=str(geometry.file_nbytes)):
        PrivateArena(geometry)
