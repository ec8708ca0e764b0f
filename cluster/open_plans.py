"""The coordinator's memory of stores that were planned and not reported: of which prompt, and who may write.

The index itself needs neither: prompts are kept here so that a completion can answer how much of one is READY now, and
writers so that no slot is given away while a client process may still be writing to it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_ray.index.plans import StorePlan


@dataclass(frozen=True, slots=True)
class _OpenPlan:
    keys: Sequence[bytes]
    generations: tuple[int, ...]
    opened: float


class OpenPlans:
    """Thread-safe. `clock` gives seconds; plans never completed are forgotten after `keep_s`."""

    def __init__(self, *, clock: Callable[[], float], keep_s: float) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._plans: dict[int, _OpenPlan] = {}
        self._writers: dict[int, tuple[str, int]] = {}

    def open(self, plan: StorePlan, keys: Sequence[bytes], writer: str | None, *, call: int = 0) -> None:
        """Remember the plan of prompt `keys`; `writer` is the client process that may write its slots itself, in this
        call of its own."""
        generations = tuple(ref.generation for ref in plan.refs) if writer is not None else ()
        with self._lock:
            self._plans[plan.plan_id] = _OpenPlan(keys, generations, self._clock())
            if writer is not None:
                self._writers.update(dict.fromkeys(generations, (writer, call)))

    def close(self, plan_id: int) -> Sequence[bytes]:
        """The plan's caller has reported: it writes no more. The prompt's keys; none if the plan is not known."""
        with self._lock:
            plan = self._plans.pop(plan_id, None)
            if plan is None:
                return ()
            for generation in plan.generations:
                self._writers.pop(generation, None)
            return plan.keys

    def writer_of(self, generation: int) -> str | None:
        """The client process that may be writing this generation."""
        with self._lock:
            writer, _ = self._writers.get(generation, (None, 0))
            return writer

    def forget_writer(self, writer: str) -> None:
        """This client process has ended: it writes no more."""
        self._forget(lambda name, _: name == writer)

    def forget_calls(self, writer: str, *, before: int) -> None:
        """This client process has ended all its calls before that number, also those whose plans it never saw."""
        self._forget(lambda name, call: name == writer and call < before)

    def _forget(self, is_over: Callable[[str, int], bool]) -> None:
        with self._lock:
            theirs = {generation for generation, entry in self._writers.items() if is_over(*entry)}
            for plan_id in [key for key, plan in self._plans.items() if not theirs.isdisjoint(plan.generations)]:
                del self._plans[plan_id]
            for generation in theirs:
                del self._writers[generation]

    def prune(self) -> None:
        """Forget plans whose callers never reported, except those that a client may still be writing."""
        with self._lock:
            before = self._clock() - self._keep_s
            for plan_id in [key for key, plan in self._plans.items() if plan.opened < before and not plan.generations]:
                del self._plans[plan_id]
