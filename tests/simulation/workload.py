"""What clients do while a world is busy: one call after the other, drawn from the seed."""

from collections.abc import Callable, Sequence
from typing import Final

from lmcache_ray.tiers.spec import Tier
from tests.simulation.clients import Client
from tests.simulation.values import Prompt
from tests.simulation.world import World

_THINK_S: Final = 1.0
_LONG_VIEW_S: Final = 20.0

_WEIGHTS: Final = {
    "store": 5, "put": 5, "retrieve": 4, "get": 4, "view": 2, "lookup": 3, "hold": 1, "clear": 1, "clear all": 0.3,
    "clear memory": 0.5, "pin": 0.5,
}  # fmt: skip


class Workload:
    """The clients' calls of one world, until `end`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_over = False
        self._num_leases = 0

    def employ(self, client: Client) -> None:
        """A client begins to make calls, two at a time."""
        for number in (1, 2):
            self._world.scheduler.spawn(client.process, f"work {number}", lambda: self._work(client))

    def _work(self, client: Client) -> None:
        world = self._world
        while not self.is_over and not world.timed(client, "register", client.register):
            world.scheduler.sleep(world.rng.random() * _THINK_S)
        while not self.is_over:
            world.scheduler.sleep(world.rng.random() * _THINK_S)
            (what,) = world.rng.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))
            prompt = world.rng.choice(world.shape.prompts)
            if not self.is_over:
                world.timed(client, f"{what} {prompt.name}", self._call(client, what, prompt))

    def _call(self, client: Client, what: str, prompt: Prompt) -> Callable[[], object]:
        world = self._world
        if what == "view":
            open_s = world.rng.choice((0.1, 3.0, _LONG_VIEW_S)) * world.rng.random()
            return lambda: client.view(prompt, open_s)
        if what == "hold":
            self._num_leases += 1
            lease_id = f"lookup/{client.name}/{self._num_leases}"
            return lambda: self._hold(client, prompt, lease_id)
        return {
            "store": lambda: client.store(prompt),
            "put": lambda: client.put(prompt),
            "retrieve": lambda: client.retrieve(prompt),
            "get": lambda: client.get(prompt),
            "lookup": lambda: client.lookup(prompt),
            "clear": lambda: self._clear(client, prompt.keys, tuple(Tier)),
            "clear all": lambda: self._clear(client, None, tuple(Tier)),
            "clear memory": lambda: self._clear(client, prompt.keys, (Tier.CPU,)),
            "pin": lambda: client.pin(prompt, is_wanted=world.rng.random() < 0.5),
        }[what]

    def _clear(self, client: Client, keys: Sequence[bytes] | None, tiers: Sequence[Tier]) -> str:
        counts = client.clear(keys, tiers)
        if counts.pending_ranks:
            self._world.happened["a clear was pending on a rank"] += 1
        if counts.num_kept:
            self._world.happened["a clear kept what was leased"] += 1
        return f"{counts.num_removed} removed, {counts.num_kept} kept, pending on {list(counts.pending_ranks)}"

    def _hold(self, client: Client, prompt: Prompt, lease_id: str) -> int:
        """A lookup whose lease is ended by hand, or by time."""
        count = client.lookup(prompt, lease_id=lease_id)
        if self._world.rng.random() < 0.5:
            client.release(lease_id)  # nobody waits for it
        else:
            self._world.happened["a lease was left to its time"] += count > 0
        return count
