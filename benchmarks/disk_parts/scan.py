"""How long a restarted rank looks through its directory: names, sizes and heads of many small chunk files."""

from pathlib import Path

from benchmarks.claims import Part, at_most
from benchmarks.disk_parts.chunks import ChunkKind
from benchmarks.disk_parts.plain import slots
from benchmarks.disk_parts.single import chunks_of, open_disk
from benchmarks.measure import interleaved, progress
from benchmarks.workload import CHUNK_SIZE

_KIND = ChunkKind("4 KiB", num_layers=1, num_heads=1, head_size=4, count=1, bar=None)


def measure_scan(folder: Path, *, num_files: int, bar_s: float, rounds: int) -> Part:
    """The inventory of a directory that is opened again, its names and heads in the page cache."""
    progress(f"scan of {num_files} files, {rounds} rounds")
    layout = _KIND.layout
    (slot,) = slots(1, layout.ranks[0].slot_nbytes)
    disk = open_disk(folder, layout)
    disk.inventory()
    for chunk in chunks_of(num_files):
        disk.write(chunk, CHUNK_SIZE, slot, lambda: True)
    disk.close()

    def scan() -> None:
        again = open_disk(folder, layout)
        found = len(again.inventory().entries)
        again.close()
        if found != num_files:
            raise RuntimeError(f"{found} of {num_files} chunks were found")

    samples = interleaved({"scan": scan}, rounds=rounds)["scan"]
    promise = at_most(f"disk scan, {num_files:,} chunk files", bar_s, "s", "names, sizes and heads")
    return Part([promise.of_spread(samples.spread)], {"num_files": num_files, "scan": samples.to_json()})
