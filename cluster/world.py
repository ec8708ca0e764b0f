"""What a world is (`WorldSpec`, fixed at its start) and how it stands (`ClusterStatus`, a snapshot). Pure."""

from dataclasses import dataclass, field

from lmcache_ray.keys import ChunkHasher
from lmcache_ray.layout import WorldLayout
from lmcache_ray.tiers.spec import TierSpec

from .membership import RankRecord, RankState


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """Everything all processes of one cache cluster agree on.

    `num_slots` is the number of slots of every arena; `life` is random text that no other life of a cluster has;
    `lossy_serde` names what rounds the KV, if anything does.
    """

    namespace: str
    name: str
    model_name: str
    model_revision: str | None
    layout: WorldLayout
    num_slots: int
    save_unfull_chunk: bool
    min_retrieve_tokens: int
    block_size: int
    cache_policy: str
    arena_dir: str
    lease_timeout_s: float
    lookup_timeout_s: float
    call_timeout_s: float
    restart_window_s: float
    tiers: TierSpec
    life: str
    lossy_serde: str | None

    @property
    def max_viewed_slots(self) -> int:
        """How many slots views may hold together: stores must find room beside them, so a quarter is never held."""
        return self.num_slots * 3 // 4

    def hasher(self) -> ChunkHasher:
        """The keys of this world's model."""
        return ChunkHasher(
            self.model_name,
            model_revision=self.model_revision,
            chunk_size=self.layout.chunk_size,
            keep_partial=self.save_unfull_chunk,
            lossy=self.lossy_serde,
        )


def cluster_prefix(name: str) -> str:
    """How the names of all actors of a cluster begin, in its Ray namespace. Cluster names have no colon."""
    return f"lmcache_ray:{name}:"


def coordinator_name(name: str) -> str:
    """The coordinator's actor name."""
    return f"{cluster_prefix(name)}coordinator"


def rank_name(name: str, rank: int) -> str:
    """A rank's actor name."""
    return f"{cluster_prefix(name)}rank{rank}"


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Chunks of one tier by state; together they are its capacity. `waiting` for the tier are chunks above it.

    What is in a remote store is not counted: others use it too. `max_nbytes` is the limit of each rank's files, and
    `total_max_nbytes` that of all ranks'. `traffic` counts what has moved (`TierTraffic`).
    """

    ready: int
    writing: int
    quarantined: int
    free: int
    capacity: int
    waiting: int = 0
    max_nbytes: int | None = None
    total_max_nbytes: int | None = None
    traffic: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank. Fields that only a registered rank has are None or 0 before; `epoch` numbers its processes."""

    worker_id: int
    local_worker_id: int | None
    local_world_size: int | None
    node_id: str | None
    pid: int | None
    epoch: int
    alive: bool
    arena_path: str | None
    slots_used: int
    slots_total: int


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A cache cluster at one moment. `problems` says why the cluster is not whole; empty means healthy.

    Unless it `can_serve`, every lookup and retrieve is a miss and nothing is stored.

    `leases` counts all; `view_leases` are those of them that hold `viewed_slots` for a driver's views.
    """

    name: str
    namespace: str
    epoch: int
    coordinator_pid: int
    tiers: dict[str, TierStatus]
    leases: int
    view_leases: int
    viewed_slots: int
    clients: int
    can_serve: bool
    problems: tuple[str, ...]
    ranks: tuple[RankStatus, ...]


def rank_status(rank: int, record: RankRecord, slots_used: int) -> RankStatus:
    """The public form of what membership knows of a rank."""
    hello = record.hello
    return RankStatus(
        worker_id=rank,
        local_worker_id=hello.local_worker_id if hello else None,
        local_world_size=hello.local_world_size if hello else None,
        node_id=hello.node_id if hello else None,
        pid=hello.pid if hello else None,
        epoch=record.start,
        alive=record.state is RankState.ALIVE,
        arena_path=hello.arena_path if hello else None,
        slots_used=slots_used,
        slots_total=hello.slots_total if hello else 0,
    )
