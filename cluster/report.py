"""What a replay reports, and how it adds up. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

_PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class Latencies:
    """Seconds of single requests."""

    lookup: list[float] = field(default_factory=list)
    retrieve: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)

    def in_ms(self) -> dict[str, dict[str, float | None]]:
        """Percentiles in milliseconds; None where nothing was measured."""
        return {name: percentiles_ms(getattr(self, name)) for name in ("lookup", "retrieve", "store")}


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The outcome of one replay; its fields are the keys of the JSON that `--json` prints.

    `hit_blocks` counts the leading cached blocks of every request when it was looked up, and `hit_blocks_by_tier` the
    same by the tier that had them: what disk or remote had was brought into memory first. `stored_bytes` is the chunk
    bytes resident at the end, per rank. `latency_ms.lookup` is the planning message of a request's window, `retrieve`
    and `store` are the copies of one request on its slowest rank.
    """

    requests: int
    lookup_blocks: int
    hit_blocks: int
    hit_rate: float
    hit_blocks_by_tier: dict[str, int]
    world_size: int
    num_nodes: int
    use_mla: bool
    policy: str
    capacity_blocks: int
    window: int
    stored_bytes: list[int]
    verified_bytes: int
    byte_mismatches: int
    seconds: float
    latency_ms: dict[str, dict[str, float | None]]

    def to_json(self) -> dict[str, object]:
        """A JSON-ready dictionary."""
        return asdict(self)


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p95 and p99 by the nearest rank, in milliseconds."""
    ordered = sorted(seconds)

    def at(percent: int) -> float | None:
        if not ordered:
            return None
        rank = max(1, -(-len(ordered) * percent // 100))
        return round(ordered[rank - 1] * 1000, 4)

    return {f"p{percent}": at(percent) for percent in _PERCENTILES}
