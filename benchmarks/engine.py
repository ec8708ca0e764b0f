"""The engine's speed in one process: store and retrieve against memory copies, lookups and bookkeeping against LMCache.

    python benchmarks/engine.py                                     # about a minute, 4 GiB of memory
    python benchmarks/engine.py --peer-python /path/to/python       # LMCache beside it: two minutes, twice the memory
    python benchmarks/engine.py --quick

Prints one JSON document: first each promised number beside its bar, then everything that was measured for them.
"""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.claims import Part, results_of
from benchmarks.engine_parts.calls import measure_calls
from benchmarks.engine_parts.copies import measure_copies
from benchmarks.measure import begin_run, emit
from benchmarks.peers.child import PeerError, PeerProcess

_PEER_SCRIPT = "lmcache_engine.py"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: tokens, and rounds unless the command line says how many."""

    prompt_tokens: int
    lookup_tokens: int
    rounds: int
    calls_per_round: int


_FULL = Scale(prompt_tokens=8192, lookup_tokens=32768, rounds=20, calls_per_round=10)
_QUICK = Scale(prompt_tokens=1024, lookup_tokens=4096, rounds=3, calls_per_round=3)


def main() -> int:
    arguments = _parse_arguments()
    torch.set_num_threads(arguments.threads)
    scale = _QUICK if arguments.quick else _FULL
    rounds = scale.rounds if arguments.rounds is None else arguments.rounds
    run = begin_run("engine", vars(arguments) | {"rounds": rounds})
    try:
        with ExitStack() as stack:
            peer = None
            if arguments.peer_python is not None:
                peer = stack.enter_context(_peer(arguments.peer_python, scale, arguments.threads))
            parts = _measure(scale, rounds, peer)
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    emit(run, {"peer": peer.facts if peer is not None else None} | results_of(parts))
    return 0


def _measure(scale: Scale, rounds: int, peer: PeerProcess | None) -> dict[str, Part]:
    return {
        "copies": measure_copies(num_tokens=scale.prompt_tokens, rounds=rounds, peer=peer),
        "calls": measure_calls(
            prompt_tokens=scale.prompt_tokens,
            lookup_tokens=scale.lookup_tokens,
            rounds=rounds,
            calls_per_round=scale.calls_per_round,
            peer=peer,
        ),
    }


def _peer(python: str, scale: Scale, threads: int) -> PeerProcess:
    sizes = {
        "--prompt-tokens": scale.prompt_tokens,
        "--lookup-tokens": scale.lookup_tokens,
        "--threads": threads,
        "--calls-per-round": scale.calls_per_round,
    }
    return PeerProcess(python, _PEER_SCRIPT, [str(part) for pair in sizes.items() for part in pair])


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The engine's speed in one process, against memory copies and LMCache."
    )
    parser.add_argument("--quick", action="store_true", help="a small prompt and few rounds: a test of the script")
    parser.add_argument("--rounds", type=_positive, metavar="N", help=f"of each part ({_FULL.rounds})")
    parser.add_argument("--peer-python", metavar="FILE", help="an interpreter that has LMCache, see README.md here")
    parser.add_argument(
        "--threads", type=_positive, default=1, metavar="N", help="of torch, also for its memory copy (1)"
    )
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
