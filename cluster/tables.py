"""What the commands show to a person."""

from typing import Final

from rich.table import Table

from .chaos_report import ChaosReport
from .report import ReplayReport
from .world import ClusterStatus, TierStatus

_GIB: Final = 2**30


def replay_table(report: ReplayReport) -> Table:
    """A replay's numbers, one a line."""
    table = Table(title="replay", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in report.to_json().items():
        if name == "latency_ms":
            continue
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    for name, values in report.latency_ms.items():
        shown = ", ".join(f"{percentile} {value}" for percentile, value in values.items() if value is not None)
        table.add_row(f"{name} ms", shown or "none")
    return table


def chaos_table(report: ChaosReport) -> Table:
    """What a chaos run did and found, one a line."""
    table = Table(title="chaos", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in report.to_json().items():
        shown = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
        table.add_row(name, "\n".join(shown) if isinstance(shown, list) else str(shown))
    return table


def status_table(status: ClusterStatus) -> Table:
    """A cluster's ranks, one a row, below its tiers."""
    memory = status.tiers["cpu"]
    title = [
        f"cluster {status.name} in {status.namespace}: {memory.ready} of {memory.capacity} chunks, "
        f"{status.leases} leases, {status.view_leases} of views",
        *(_described(name, tier) for name, tier in status.tiers.items() if tier is not memory),
    ]
    table = Table(title="\n".join(title))
    for column in ("rank", "local", "node", "pid", "alive", "slots"):
        table.add_column(column)
    for rank in status.ranks:
        table.add_row(
            str(rank.worker_id),
            f"{rank.local_worker_id} of {rank.local_world_size}",
            (rank.node_id or "?")[:12],
            str(rank.pid),
            "yes" if rank.alive else "NO",
            f"{rank.slots_used}/{rank.slots_total}",
        )
    return table


def _described(name: str, tier: TierStatus) -> str:
    """A tier below memory in a line."""
    held = f"{tier.ready} of {tier.capacity} chunks" if tier.capacity else "shared with others"
    each = f", {tier.max_nbytes / _GIB:.2f} GiB a rank" if tier.max_nbytes is not None else ""
    total = f", {tier.total_max_nbytes / _GIB:.2f} GiB in all" if tier.total_max_nbytes is not None else ""
    moved = ", ".join(f"{count} {what}" for what, count in tier.traffic.items() if count)
    return f"{name}: {held}{each}{total}, {tier.waiting} waiting for it" + (f"; {moved}" if moved else "")
