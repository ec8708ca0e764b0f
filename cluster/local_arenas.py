"""The arenas of a client's own node: mapped once and kept open, and not given away while a call may be copying there.

What `put_path.py` and `get_path.py` share. Copies of one call run side by side as far as there are processors.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from lmcache_ray.arena.copy_on_write import CopyOnWriteMaps
from lmcache_ray.arena.mapped import ArenaMap
from lmcache_ray.errors import ArenaError, ClosedError
from lmcache_ray.index.slot_table import COUNTER_BITS
from lmcache_ray.shard import EngineShard

from .deadline import Deadline
from .link import ClusterLink

Result = TypeVar("Result")

WORTH_A_THREAD_NBYTES: Final = 4 * 2**20
"""A smaller copy is done before another thread has begun."""


@dataclass(frozen=True, slots=True)
class LocalArena:
    """One rank's arena as a client has it: the mapping, a door for writers, and mappings for those who look at it."""

    mapped: ArenaMap
    shard: EngineShard
    views: CopyOnWriteMaps


class LocalArenas:
    """The arenas that one link's process can map. Thread-safe."""

    def __init__(self, link: ClusterLink) -> None:
        self._link = link
        self._maps: dict[int, LocalArena] = {}
        self._changed = threading.Condition()
        self._num_calls = 0
        self._closing = False
        self.num_processors = len(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(self.num_processors, thread_name_prefix="copies")

    @contextmanager
    def call(self) -> Iterator[Deadline]:
        """Counts a call that may be copying, so that nobody gives the arenas away under it. Its deadline."""
        with self._changed:
            if self._closing:
                raise ClosedError(f"this connection to cluster {self._link.world.name!r} is closed")
            self._num_calls += 1
        try:
            yield self._link.deadline()
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def of_rank(self, rank: int) -> LocalArena:
        """The arena of a rank of this node. Raises `ArenaError` if it cannot be mapped.

        One that was made anew, since the rank could not take over its predecessor's, is mapped anew.
        """
        with self._changed:
            if rank in self._maps and not self._maps[rank].mapped.is_published():
                self._maps.pop(rank).mapped.close()
                self._link.suspect()
            if rank not in self._maps:
                path = self._link.hellos[rank].arena_path
                if path is None:
                    raise ArenaError(f"rank {rank} holds no arena")
                mapped = ArenaMap.open(path, expected_fingerprint=self._link.world.layout.fingerprint)
                self._maps[rank] = LocalArena(mapped, EngineShard(mapped.slots), CopyOnWriteMaps(mapped.copy_on_write))
            return self._maps[rank]

    def epochs(self) -> dict[int, int]:
        """Per rank of this node, the epoch of the coordinator that it serves; ranks out of reach are left out."""
        found: dict[int, int] = {}
        for rank in filter(self._link.is_here, self._link.world.layout.holders):
            with suppress(ArenaError):
                found[rank] = self.of_rank(rank).mapped.slots.floor >> COUNTER_BITS
        return found

    def run_together(self, jobs: Sequence[Callable[[], Result]], *, nbytes: int) -> list[Result]:
        """Run copies of `nbytes` in all side by side; their results, or the first error. All have ended then.

        An interrupt waits for them too: nobody may be told that a slot is not being written while it is.
        """
        if nbytes < WORTH_A_THREAD_NBYTES:
            return [job() for job in jobs]
        others: list[Future[Result]] = []
        try:
            for job in jobs[1:]:
                others.append(self._threads.submit(job))
            first = [job() for job in jobs[:1]]
        finally:
            _wait_for_all(others)
        return [*first, *(other.result() for other in others)]

    def close(self, *, timeout_s: float) -> bool:
        """Refuse new calls and wait for those under way. False if one is still copying: the maps stay open then."""
        with self._changed:
            self._closing = True
            is_idle = self._changed.wait_for(lambda: self._num_calls == 0, timeout_s)
            while is_idle and self._maps:
                _, arena = self._maps.popitem()
                arena.mapped.close()
        if is_idle:
            self._threads.shutdown(wait=False)
        return is_idle


def _wait_for_all(jobs: Sequence[Future[Result]]) -> None:
    interrupt: BaseException | None = None
    while not all(job.done() for job in jobs):
        try:
            wait(jobs)
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
