"""What the ranks do together, each by itself: stores that the first opens and the others join, and broadcasts.

As in an SPMD program every rank takes its steps in the same order, and a step that fails on one of them does not keep
the others from their next.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from cluster.messages import StoreDone, StoreItem, pack_flags, pack_keys
from lmcache_ray.broadcast.tags import Aborted, Call, Payload, Tag
from lmcache_ray.errors import DeadlineError, LMCacheRayError
from lmcache_ray.index_service import rank_client
from tests.simulation.copying import Violation
from tests.simulation.ranks import SimulatedRank
from tests.simulation.shape import CALL_S
from tests.simulation.values import Prompt
from tests.simulation.world import World

_STEP_S: Final = CALL_S / 3
_POLL_S: Final = 0.5

Step = Callable[[int, SimulatedRank], object]
"""What one rank does in one step."""


class Together:
    """The steps of one world's ranks. A rank whose process is new begins with the next step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._num_steps = 0
        self._has_failed = False
        self._waiting: dict[int, tuple[SimulatedRank, deque[tuple[str, Step]]]] = {}

    def store(self, prompt: Prompt) -> None:
        """Every rank stores its part."""
        self._begin(f"store together {prompt.name}", lambda rank, serving: self._store(rank, serving, prompt))

    def broadcast(self, src: int, *, is_named: bool) -> None:
        """One rank sends, the others receive."""
        self._num_steps += 1
        what, name = f"step {self._num_steps}", f"tag {self._num_steps}" if is_named else None
        self._begin(f"broadcast {what}", lambda rank, serving: self._broadcast(rank, serving, src, name, what))

    # -- one rank's part ----------------------------------------------------------------------------------------------

    def _store(self, rank: int, serving: SimulatedRank, prompt: Prompt) -> object:
        network, coordinator = self._world.network, self._world.coordinator
        item = StoreItem(pack_keys(prompt.keys), 0, rank)
        (plan,) = network.call(coordinator, "decide", "prepare_stores", rank_client(rank), [item], timeout_s=_STEP_S)
        refs = plan.refs.unpack()
        if plan.plan_id is None or not refs:
            return plan.num_ready
        done = StoreDone(plan.plan_id, {rank: pack_flags(serving.store(refs))})
        (count,) = network.call(coordinator, "decide", "complete", [done], timeout_s=_STEP_S)
        return count

    def _broadcast(self, rank: int, serving: SimulatedRank, src: int, name: str | None, what: str) -> object:
        call = None
        if name is None:
            call = Call(serving.pid, serving.num_untagged)
            serving.num_untagged += 1
        if rank == src:
            self._ask("publish", rank, name, what, call)
            return what
        return self._receive(rank, src, name, call, what)

    def _receive(self, rank: int, src: int, name: str | None, call: Call | None, what: str) -> str:
        until = self._world.scheduler.now + _STEP_S
        tag: Tag | None = None
        while True:
            wait_s = max(0.0, min(_POLL_S, until - self._world.scheduler.now))
            tag, result = self._ask("take", rank, src, name, tag, wait_s, call)
            if isinstance(result, Payload):
                return self._checked(str(result.value), what, rank, is_named=name is not None)
            if isinstance(result, Aborted):
                self._has_failed = True
                return f"aborted: {result.reason}"
            if self._world.scheduler.now >= until:
                raise self._ask("give_up_broadcast", rank, tag)

    def _checked(self, received: str, what: str, rank: int, *, is_named: bool) -> str:
        """What was received. Ranks that have once been out of step tell by the object that they are so again."""
        if received == what:
            return what
        if is_named or not self._has_failed:
            raise Violation(f"rank {rank} was sent {received} where {what} was due")
        self._world.happened["an object of another step was refused"] += 1
        self._ask("break_broadcasts", f"rank {rank} was sent {received} where {what} was due")
        return f"refused {received}"

    def _ask(self, method: str, *arguments: object) -> Any:
        pending = self._world.network.send(self._world.coordinator, method, *arguments, reliably=True)
        return pending.wait(_STEP_S)

    # -- in order -----------------------------------------------------------------------------------------------------

    def _begin(self, what: str, step: Step) -> None:
        for rank, handle in enumerate(self._world.ranks):
            serving, process = handle.serving, handle.process
            assert isinstance(serving, SimulatedRank) and process is not None
            if not process.is_alive:
                continue
            known = self._waiting.get(rank)
            if known is not None and known[0] is serving:
                known[1].append((what, step))
                continue
            steps = deque([(what, step)])
            self._waiting[rank] = (serving, steps)
            self._world.scheduler.spawn(process, "steps", partial(self._work, rank, serving, steps))

    def _work(self, rank: int, serving: SimulatedRank, steps: deque[tuple[str, Step]]) -> None:
        name = self._world.ranks[rank].name
        while steps:
            what, step = steps.popleft()
            try:
                outcome = step(rank, serving)
                self._world.happened[what.rsplit(maxsplit=1)[0]] += 1
                self._world.story.tell(name, "%s: %s", what, outcome)
            except (LMCacheRayError, DeadlineError) as error:
                self._has_failed = True
                self._world.happened[type(error).__name__] += 1
                self._world.story.tell(name, "%s: %s: %s", what, type(error).__name__, error)
        del self._waiting[rank]
