"""Who does the chunks of one call: its caller's thread, and a second one if it is free.

Apart from `rank_tiers`, which says what is done to a chunk. That the caller takes part means that no call waits for
another one: a disk is read while a slow remote store keeps every helper busy. A helper that is stuck in a dead
filesystem does not keep the process from ending.
"""

from collections.abc import Callable
from typing import Final

from lmcache_ray.errors import ClosedError, StorageError
from lmcache_ray.storage.call_threads import CallThreads
from lmcache_ray.tiers.calls import ChunkOutcome, RankAnswer

_NUM_HELPERS: Final = 2


class ChunkThreads:
    """The threads of one rank's tiers, called `name` in errors. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._helpers = CallThreads(max_threads=_NUM_HELPERS, name=name)
        self._is_closed = False

    def each(self, number: int, run: Callable[[int], ChunkOutcome], *, with_help: bool) -> RankAnswer:
        """The outcomes of `run` for the positions 0 to `number`, begun in this order. It is over when all are.

        After the first problem (`StorageError`, `ClosedError`) nothing more is begun; what was not, is not done.
        """
        outcomes, problems = bytearray(number), list[str]()  # a zero: not done
        positions = iter(range(number))  # whoever is free takes the next one

        def work() -> None:
            for position in positions:
                try:
                    self.check_open()
                    outcomes[position] = run(position)
                except (StorageError, ClosedError) as error:
                    problems.append(str(error))
                if problems:
                    return

        if with_help and number > 1:
            self._work_together(work)
        else:
            work()
        return RankAnswer(outcomes=bytes(outcomes), problem=problems[0] if problems else None)

    def check_open(self) -> None:
        """:raises ClosedError: after `close`."""
        if self._is_closed:
            raise ClosedError(f"the {self._name} were closed")

    def close(self) -> None:
        """Begin nothing more; what has begun is not waited for. Idempotent."""
        self._is_closed = True
        self._helpers.close()

    def _work_together(self, work: Callable[[], None]) -> None:
        helper = self._helpers.begin(work)
        try:
            work()
        finally:
            if not helper.cancel():  # it has begun
                helper.result()
