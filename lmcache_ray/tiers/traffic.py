"""What has moved between memory and one tier below it, and what was lost on the way: counts that only grow."""

from dataclasses import dataclass

from lmcache_ray.tiers.calls import ChunkOutcome


@dataclass(slots=True)
class TierTraffic:
    """Chunks of the world, each counted once whatever the number of ranks."""

    written: int = 0
    """Copied down, and confirmed by every rank."""
    failed: int = 0
    """That were to be copied down, and were not."""
    dropped: int = 0
    """That were never tried: no room, or the tier was out of order."""
    read: int = 0
    """Copied up, and confirmed by every rank."""
    missing: int = 0
    """Misses, since they were not where they should have been."""
    damaged: int = 0
    """Misses, since what was there was not what it should have been."""
    unreadable: int = 0
    """Misses, since what was there could not be read."""
    evicted: int = 0
    """That had to go for others."""

    def note_read(self, outcome: ChunkOutcome) -> None:
        """Count a chunk that was to be copied up, by the worst outcome on any rank."""
        if outcome is ChunkOutcome.DONE:
            self.read += 1
        elif outcome is ChunkOutcome.MISSING:
            self.missing += 1
        elif outcome is ChunkOutcome.DAMAGED:
            self.damaged += 1
        elif outcome is ChunkOutcome.UNREADABLE:
            self.unreadable += 1
