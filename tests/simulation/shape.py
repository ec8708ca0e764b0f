"""How one world is made: its size, its tiers, its room and its prompts, all drawn from the seed."""

from dataclasses import dataclass
from random import Random
from typing import Final

from cluster.world import WorldSpec
from lmcache_ray.layout import Placement
from lmcache_ray.tiers.spec import DiskSpec, RemoteSpec, TierSpec
from tests.simulation.values import CHUNK_SIZE, Prompt, draw_prompts, layout_of

CALL_S: Final = 5.0
_LEASE_S: Final = 12.0
_DISK_NBYTES: Final = (180_000, 250_000)
"""Room for a few chunks."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One world. In a roomy one nothing need ever be evicted."""

    spec: WorldSpec
    prompts: tuple[Prompt, ...]
    is_roomy: bool
    num_clients: int
    busy_s: float
    preemption: float

    @staticmethod
    def draw(rng: Random) -> "Shape":
        """The shape of a seed's world."""
        is_roomy = rng.random() < 0.4
        world_size = rng.choice((1, 2, 2, 3))
        placement = rng.choice((Placement.PER_RANK, Placement.PER_RANK, Placement.FIRST_RANK))
        with_disk, with_remote = rng.random() < 0.4, rng.random() < 0.2
        tiers = TierSpec(
            keeps_in_memory=not (with_disk or with_remote) or rng.random() < 0.7,
            disk=DiskSpec("/disk", rng.choice(_DISK_NBYTES)) if with_disk else None,
            remote=RemoteSpec("memory://simulated", "p", "naive", 1.0) if with_remote else None,
        )
        spec = WorldSpec(
            namespace="simulation", name="world", model_name="m", model_revision=None,
            layout=layout_of(world_size, placement), num_slots=32 if is_roomy else rng.randint(5, 8),
            save_unfull_chunk=False, min_retrieve_tokens=0, block_size=CHUNK_SIZE,
            cache_policy=rng.choice(("LRU", "LFU", "FIFO")), arena_dir="/dev/shm", lease_timeout_s=_LEASE_S,
            lookup_timeout_s=1.0, call_timeout_s=CALL_S, restart_window_s=60.0, tiers=tiers, life="life",
            lossy_serde=None,
        )  # fmt: skip
        return Shape(
            spec=spec,
            prompts=tuple(draw_prompts(rng, 4 if is_roomy else 7)),
            is_roomy=is_roomy,
            num_clients=2,
            busy_s=rng.choice((5.0, 9.0, 15.0)),
            preemption=rng.choice((0.0, 0.01, 0.05)),
        )
