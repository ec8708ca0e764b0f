"""What a coordinator tells whoever connects: the world, and who serves it."""

from dataclasses import dataclass

from .messages import RankHello
from .ray_calls import Actor
from .world import WorldSpec


@dataclass(frozen=True, slots=True)
class Introduction:
    """A started world: handle and first words of each rank, in rank order."""

    world: WorldSpec
    workers: tuple[Actor, ...]
    hellos: tuple[RankHello, ...]
