"""The cluster's speed on one machine: lookups, store and retrieve, batches, put and get, and how long a start takes.

    python benchmarks/cluster.py                                     # about 3 minutes, 5 GiB of memory
    python benchmarks/cluster.py --quick --parts lookups,batches
    python benchmarks/cluster.py --peer-python /path/to/python       # LMCache's lookup client beside ours

Prints one JSON document: first each promised number beside its bar, then everything that was measured for them.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.claims import Part, results_of
from benchmarks.cluster_parts.batches import measure_batches
from benchmarks.cluster_parts.direct import measure_direct
from benchmarks.cluster_parts.lookups import measure_lookups
from benchmarks.cluster_parts.rows import measure_rows
from benchmarks.cluster_parts.start import measure_start
from benchmarks.cluster_parts.worlds import local_ray
from benchmarks.measure import begin_run, emit

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: sizes per rank in bytes, and rounds of each part."""

    sizes: Sequence[int]
    lookup_rounds: int
    row_rounds: int
    batch_rounds: int
    direct_rounds: int
    starts: int
    world_sizes: tuple[int, ...]


_FULL = Scale((8 * _MIB, 64 * _MIB, 256 * _MIB), 400, 15, 15, 9, 2, (1, 2, 4))
_QUICK = Scale((8 * _MIB, 64 * _MIB), 40, 3, 3, 3, 1, (1, 4))


def main() -> None:
    arguments = _parse_arguments()
    torch.set_num_threads(arguments.threads)
    scale = _QUICK if arguments.quick else _FULL
    run = begin_run("cluster", {**vars(arguments), "parts": list(arguments.parts)})
    parts: dict[str, Part] = {}
    if "start" in arguments.parts:  # before this process has a Ray of its own
        parts["start"] = measure_start(starts=scale.starts)
    with local_ray():
        parts |= {name: measure() for name, measure in _parts(arguments, scale).items() if name in arguments.parts}
    emit(run, results_of(parts))


def _parts(arguments: argparse.Namespace, scale: Scale) -> dict[str, Callable[[], Part]]:
    return {
        "lookups": lambda: measure_lookups(
            num_tokens=arguments.lookup_tokens,
            world_sizes=scale.world_sizes,
            rounds=scale.lookup_rounds,
            peer_python=arguments.peer_python,
        ),
        "batches": lambda: measure_batches(num_requests=64, rounds=scale.batch_rounds),
        "rows": lambda: measure_rows(sizes=scale.sizes, rounds=scale.row_rounds),
        "direct": lambda: measure_direct(nbytes=max(scale.sizes), rounds=scale.direct_rounds),
    }


PARTS = ("start", "lookups", "batches", "rows", "direct")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The cluster's speed on one machine, against memory copies and peers.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes: a test of the script")
    parser.add_argument("--parts", type=_names, default=PARTS, metavar="NAMES", help=f"of {','.join(PARTS)} (all)")
    parser.add_argument("--peer-python", metavar="FILE", help="an interpreter that has LMCache, see README.md here")
    parser.add_argument("--lookup-tokens", type=int, default=32768, metavar="N", help="looked up (32768)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of torch in the driver (1)")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(PARTS)):
        raise argparse.ArgumentTypeError(f"{unknown} are no parts; there are {', '.join(PARTS)}")
    return names


if __name__ == "__main__":
    main()
