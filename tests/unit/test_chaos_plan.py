"""Whom a chaos run hits follows from its seed, and its processes keep out of each other's way."""

from itertools import islice

from cluster.chaos_plan import (
    KV_ROWS,
    NUM_DRIVERS,
    NUM_PROMPTS,
    PROMPT_BLOCKS,
    blows,
    own_prompt,
    prompt_rows,
    watched_prompt,
)
from cluster.workload import BLOCK_SIZE

_OFTEN = ["coordinator", "coordinator", "driver", "rank", "rank", "rank", "rank and coordinator", "stopped rank"]
_SELDOM = {"everybody", "rank killed when stopped", "stopped coordinator"}


def test_a_seed_decides_whom_each_blow_hits() -> None:
    def first(seed: int) -> list[object]:
        return list(islice(blows(seed, world_size=3, stop_s=9.0), 24))

    assert first(1) == first(1) != first(2)


def test_each_nine_blows_are_the_frequent_ones_and_one_that_is_seldom() -> None:
    found = list(islice(blows(7, world_size=3, stop_s=9.0), 90))
    seldom = set()
    for begin in range(0, len(found), 9):
        kinds = [blow.kind for blow in found[begin : begin + 9]]
        assert sorted(kind for kind in kinds if kind not in _SELDOM) == _OFTEN
        seldom.update(_SELDOM.intersection(kinds))
    assert seldom == _SELDOM


def test_a_blow_hits_what_it_is_called() -> None:
    for blow in islice(blows(7, world_size=3, stop_s=9.0), 90):
        assert (blow.driver is not None) == (blow.kind == "driver")
        assert blow.coordinator == ("coordinator" in blow.kind or blow.kind == "everybody")
        assert len(blow.ranks) == (3 if blow.kind == "everybody" else int("rank" in blow.kind))
        assert all(0 <= rank < 3 for rank in blow.ranks) and blow.driver in (None, 0, 1)
        assert (blow.stop_s == 9.0) == ("stopped" in blow.kind)
        assert blow.kills == (not blow.kind.startswith("stopped"))


def test_drivers_share_beginnings_and_nothing_else_and_nobody_has_what_is_watched() -> None:
    prompts = {(driver, n): own_prompt(driver, n) for driver in range(NUM_DRIVERS) for n in range(NUM_PROMPTS)}
    assert len(set(prompts.values())) == len(prompts)
    ids_of = [
        {block for (driver, _), prompt in prompts.items() if driver == one for block in prompt.hash_ids}
        for one in range(NUM_DRIVERS)
    ]
    assert ids_of[0] & ids_of[1] == set(prompts[0, 0].hash_ids[: PROMPT_BLOCKS // 2])
    watched = [watched_prompt(number).hash_ids for number in range(20)]
    assert len({block for prompt in watched for block in prompt}) == 20 * PROMPT_BLOCKS
    assert not {block for prompt in watched for block in prompt} & (ids_of[0] | ids_of[1])


def test_rows_of_a_prompt_are_nobody_elses_and_used_again_late() -> None:
    num_rows = PROMPT_BLOCKS * BLOCK_SIZE
    begins = [prompt_rows(process, turn) for process in range(NUM_DRIVERS + 1) for turn in range(32)]
    assert sorted(begins) == list(range(num_rows, KV_ROWS, num_rows))  # from 0 on are a replay's
    assert prompt_rows(1, 40) == prompt_rows(1, 8)
