"""What a chaos run does: whom each blow hits, the prompts of its traffic, and whose KV rows are whose.

The seed decides all of it; when exactly a process dies within its work is up to the machine.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from .workload import BLOCK_SIZE, TraceRequest

NUM_DRIVERS: Final = 2
"""Driver processes; the process that kills has a share of the KV rows like each of them."""
NUM_PROMPTS: Final = 12
"""Prompts of each driver."""
PROMPT_BLOCKS: Final = 6
KV_ROWS: Final = (1 + (NUM_DRIVERS + 1) * 32) * PROMPT_BLOCKS * BLOCK_SIZE
"""Rows of each rank's paged KV: those that replays share, then 32 prompts' rows of each process."""
_FIRST_WATCHED_ID: Final = 1_000_000_000
_LONGEST_PAUSE_S: Final = 2.5
_OFTEN: Final = ("rank", "rank", "rank", "coordinator", "coordinator", "rank and coordinator", "driver", "stopped rank")
_SELDOM: Final = ("everybody", "rank killed when stopped", "stopped coordinator")


@dataclass(frozen=True, slots=True)
class Blow:
    """Kill these processes at once, after `pause_s` in which the cluster is whole.

    `ranks` and `coordinator` are of the cluster; `driver` is the number of a driver process, or None. With `stop_s`
    they are stopped for so long first; unless it `kills`, they go on after that.
    """

    kind: str
    pause_s: float
    ranks: tuple[int, ...] = ()
    coordinator: bool = False
    driver: int | None = None
    stop_s: float = 0.0
    kills: bool = True


def blows(seed: int, *, world_size: int, stop_s: float) -> Iterator[Blow]:
    """Without end. Each nine have all frequent kinds and one of the others, in an order of their own."""
    random = Random(seed)
    while True:
        kinds = [*_OFTEN, random.choice(_SELDOM)]
        random.shuffle(kinds)
        for kind in kinds:
            pause_s = random.uniform(0.2, _LONGEST_PAUSE_S)
            rank, driver = random.randrange(world_size), random.randrange(NUM_DRIVERS)
            if kind == "driver":
                yield Blow(kind, pause_s, driver=driver)
            elif kind == "everybody":
                yield Blow(kind, pause_s, tuple(range(world_size)), coordinator=True)
            else:
                yield Blow(
                    kind,
                    pause_s,
                    ranks=(rank,) if "rank" in kind else (),
                    coordinator="coordinator" in kind,
                    stop_s=stop_s if "stopped" in kind else 0.0,
                    kills=not kind.startswith("stopped"),
                )


def own_prompt(driver: int, number: int) -> TraceRequest:
    """A prompt of one driver; those of even numbers share their first blocks with all drivers."""
    shared = tuple(range(100, 100 + PROMPT_BLOCKS // 2)) if number % 2 == 0 else ()
    first = 10_000 * (driver + 1) + 100 * number
    return TraceRequest((*shared, *range(first, first + PROMPT_BLOCKS - len(shared))))


def watched_prompt(number: int) -> TraceRequest:
    """A prompt of the process that kills, which nobody else uses."""
    first = _FIRST_WATCHED_ID + 100 * number
    return TraceRequest(tuple(range(first, first + PROMPT_BLOCKS)))


def prompt_rows(process: int, turn: int) -> int:
    """The first KV row of a process's next prompt.

    Rows are used again late: a rank that was stopped may still write what it was told long ago.
    """
    return (1 + 32 * process + turn % 32) * PROMPT_BLOCKS * BLOCK_SIZE
