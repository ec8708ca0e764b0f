"""A rank's disk tier: storing and retrieving chunks against plain Python, and the scan of a restart.

    python benchmarks/disk.py                                     # half a minute, 1 GiB of disk
    python benchmarks/disk.py --peer-python /path/to/python       # LMCache's local disk beside it
    python benchmarks/disk.py --quick

Prints one JSON document: first each promised number beside its bar, then everything that was measured for them.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.claims import Part, results_of
from benchmarks.disk_parts.chunks import ChunkKind, measure_chunks
from benchmarks.disk_parts.scan import measure_scan
from benchmarks.measure import Json, begin_run, emit
from benchmarks.peers.child import PeerError, PeerProcess

_BAR = 0.8
_SCAN_BAR_S_PER_FILE = 2 / 10_000


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    num_large: int
    num_small: int
    num_scanned: int
    turns: int
    scan_rounds: int


_FULL = Scale(num_large=16, num_small=256, num_scanned=10_000, turns=10, scan_rounds=5)
_QUICK = Scale(num_large=2, num_small=8, num_scanned=100, turns=1, scan_rounds=1)


def main() -> int:
    arguments = _parse_arguments()
    scale = _QUICK if arguments.quick else _FULL
    run = begin_run("disk", vars(arguments))
    facts: dict[str, Json] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="lmcache_ray-benchmark-", dir=arguments.directory) as folder:
            parts = _measure(arguments, scale, Path(folder), facts)
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    emit(run, {"lmcache": facts or None} | results_of(parts))
    return 0


def _measure(arguments: argparse.Namespace, scale: Scale, folder: Path, facts: dict[str, Json]) -> dict[str, Part]:
    kinds = (
        ChunkKind("8 MiB", num_layers=32, num_heads=2, head_size=128, count=scale.num_large, bar=_BAR),
        ChunkKind("64 KiB", num_layers=1, num_heads=1, head_size=64, count=scale.num_small, bar=None),
    )
    with ExitStack() as stack:
        peer = None
        if arguments.peer_python is not None:
            sizes = [f"{kind.name}={kind.layout.ranks[0].slot_nbytes}x{kind.count}" for kind in kinds]
            flags = ["--directory", str(folder / "lmcache"), *sizes]
            peer = stack.enter_context(PeerProcess(arguments.peer_python, "lmcache_disk.py", flags))
            facts.update(peer.facts)
        parts = {
            kind.name: measure_chunks(kind, folder / "chunks", turns=scale.turns, peer=peer) for kind in kinds
        }
    num_files = scale.num_scanned
    bar_s = num_files * _SCAN_BAR_S_PER_FILE
    return parts | {
        "scan": measure_scan(folder / "scan", num_files=num_files, bar_s=bar_s, rounds=scale.scan_rounds)
    }


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A rank's disk tier against plain Python's files.")
    parser.add_argument("--quick", action="store_true", help="few small rounds: a test of the script")
    parser.add_argument("--directory", metavar="DIR", help="on the disk that is meant (the system's for such files)")
    parser.add_argument("--peer-python", metavar="FILE", help="an interpreter that has LMCache, see README.md here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
