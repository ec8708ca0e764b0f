"""What has to outlive a coordinator: its epoch, where the ranks were, and what was cleared while one of them was away.

Everything else can be asked of the ranks. The record is one small value; a `RecordKeeper` keeps it for as long as the
Ray cluster lives. Pure but for the keeper, which is somebody else's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.tiers.spec import Tier

from .topology import RankPlace


@dataclass(frozen=True, slots=True)
class MissedClear:
    """A clear of `tiers` that some holder may not have carried out.

    In memory it is of all generations below `before`, or of `keys` among them; `kept` chunks (slot, generation) were
    leased and stay. On disk, where generations are others, it is of all keys or of these.
    """

    before: int
    keys: frozenset[bytes] | None
    kept: frozenset[tuple[int, int]] = frozenset()
    tiers: tuple[Tier, ...] = tuple(Tier)

    def covers(self, ref: ChunkRef) -> bool:
        """Whether the chunk was cleared from memory."""
        if Tier.CPU not in self.tiers:
            return False
        if ref.generation >= self.before or (ref.slot, ref.generation) in self.kept:
            return False
        return self.keys is None or ref.key in self.keys


@dataclass(frozen=True, slots=True)
class RankStart:
    """The latest process of a rank, where it is, and how many there have been."""

    place: RankPlace
    pid: int
    number: int


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """The record of a cluster's name: `epoch` only rises, over all lives of clusters of that name."""

    epoch: int = 0
    starts: Mapping[int, RankStart] = field(default_factory=dict)
    clears: Sequence[MissedClear] = ()

    def next_start(self) -> "ClusterRecord":
        """For a cluster that starts: nothing of an earlier one's is true of it."""
        return ClusterRecord(self.epoch + 1)

    def next_life(self) -> "ClusterRecord":
        """For a coordinator that comes back."""
        return replace(self, epoch=self.epoch + 1)

    @property
    def places(self) -> dict[int, RankPlace]:
        """Where each rank was last."""
        return {rank: start.place for rank, start in self.starts.items()}

    def with_start(self, rank: int, place: RankPlace, pid: int) -> "ClusterRecord":
        """This process serves the rank now; it may have done so before."""
        latest = self.starts.get(rank)
        if latest is not None and (latest.place, latest.pid) == (place, pid):
            return self
        number = 1 if latest is None else latest.number + 1
        return replace(self, starts={**self.starts, rank: RankStart(place, pid, number)})

    def with_clear(self, clear: MissedClear) -> "ClusterRecord":
        """A clear that is not complete; one of everything stands for those before it."""
        is_all = clear.keys is None and not clear.kept and len(clear.tiers) == len(Tier)
        earlier = () if is_all else self.clears
        return replace(self, clears=(*earlier, clear))

    def without(self, done: Sequence[MissedClear]) -> "ClusterRecord":
        """Every holder has carried these out."""
        return replace(self, clears=tuple(clear for clear in self.clears if clear not in done))

    def is_cleared(self, ref: ChunkRef) -> bool:
        """Whether the chunk was cleared, although a rank may still hold it."""
        return any(clear.covers(ref) for clear in self.clears)

    def is_cleared_on_disk(self, key: bytes) -> bool:
        """Whether the chunk's files were cleared, although a rank may still have its own."""
        return any(Tier.DISK in clear.tiers and (clear.keys is None or key in clear.keys) for clear in self.clears)


class RecordKeeper(Protocol):
    """Keeps the record of one cluster's name. Calls raise `ClusterError` if it cannot be reached."""

    def load(self) -> ClusterRecord:
        """The record; a new one if there is none."""
        ...

    def save(self, record: ClusterRecord) -> None:
        """Keep this one from now on."""
        ...
