"""Running worlds: one by its seed, and what it came to."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from tests.simulation.cooperative import installed
from tests.simulation.faults import Fault
from tests.simulation.mischief import Mischief
from tests.simulation.rest import come_to_rest
from tests.simulation.together import Together
from tests.simulation.workload import Workload
from tests.simulation.world import World

_CHECK_EVERY: Final = 20
_STEP_S: Final = 4.0


@dataclass(slots=True)
class Outcome:
    """What came of one seed. `failure` is None if all was well."""

    seed: int
    failure: str | None
    num_steps: int
    simulated_s: float
    faults: Counter[Fault]
    happened: Counter[str]
    story: list[str] = field(default_factory=list)


def run(seed: int, *, is_told: bool = False) -> Outcome:
    """Live through the world of this seed."""
    world = World(seed, is_told=is_told)
    failure: str | None = None
    with installed(world.scheduler):
        try:
            _live(world)
        except Exception as error:  # whatever it is, it is what this seed has shown
            failure = f"{type(error).__name__}: {error}"
            world.story.tell("world", "fails: %s", failure)
        finally:
            world.scheduler.close()
    return Outcome(
        seed, failure, world.scheduler.num_steps, world.scheduler.now, world.faults.happened, world.happened,
        world.story.lines,
    )  # fmt: skip


def _live(world: World) -> None:
    world.start()
    world.scheduler.after_step = lambda: _check_now_and_then(world)
    world.faults.begin()
    workload = Workload(world)
    for client in world.clients:
        workload.employ(client)
    Mischief(world, workload).begin()
    _step_together(world, workload, Together(world))
    world.scheduler.run_until(world.scheduler.now + world.shape.busy_s)
    workload.is_over = True
    world.story.tell("world", "from now on all goes well")
    come_to_rest(world)
    world.check()


def _step_together(world: World, workload: Workload, together: Together) -> None:
    """Now and then the ranks do something by themselves."""
    rng = world.rng
    if workload.is_over:
        return
    if rng.random() < 0.4:
        together.store(rng.choice(world.shape.prompts))
    else:
        together.broadcast(rng.randrange(len(world.ranks)), is_named=rng.random() < 0.3)
    world.scheduler.after(rng.random() * _STEP_S, lambda: _step_together(world, workload, together))


def _check_now_and_then(world: World) -> None:
    if world.scheduler.num_steps % _CHECK_EVERY == 0:
        world.check()
