"""The commands' arguments: every flag of `python -m cluster`, with what it means and what it is by default."""

import argparse
import os
from collections.abc import Callable

from lmcache_ray import __version__
from lmcache_ray.errors import ConfigError

from .topology import parse_ranks_per_node

_DESCRIPTION = """\
lmcache_ray: a KV-cache cluster on Ray for serving large language models.

  python -m cluster replay                        run a generated chat workload on a local cluster of 2 ranks
  python -m cluster replay trace.jsonl --verify   run a Mooncake-format trace and check every byte that comes back
  python -m cluster up --name prod --world-size 4 start a cluster on the running Ray and leave it there
  python -m cluster status --name prod            how it stands
  python -m cluster down --name prod              end it
"""

_REPLAY = """\
Each request is looked up, its cached prefix is loaded on every rank, and what is new is stored, in file order.

A trace has one JSON object a line with "hash_ids", one id for each block of 512 tokens (an id stands for the whole
prefix up to its block), as in the traces that Mooncake publishes. Without a TRACE a multi-turn chat is made from a
seed. Exit status: 0, or 1 if a byte differed (with --verify) or the run failed, or 2 for wrong arguments.

examples:
  python -m cluster replay --requests 100 --world-size 4 --verify
  python -m cluster replay trace.jsonl --capacity-blocks 10000 --policy lfu --json
  python -m cluster replay trace.jsonl --world-size 4 --nodes 2 --ranks-per-node 3,1 --use-mla --verify
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; the chosen command is in `command`."""
    parser = argparse.ArgumentParser(
        prog="python -m cluster", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"lmcache_ray {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_replay(commands)
    _add_up(commands)
    for name, text in (("status", "show how a running cluster stands"), ("down", "end a running cluster")):
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        _add_identity(command)
        _add_json(command)
    return parser


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "replay",
        help="run a trace or a generated chat workload",
        description=_REPLAY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "trace", nargs="?", type=os.path.abspath, metavar="TRACE", help="JSON-lines file; omit it for a generated chat"
    )
    command.add_argument("--requests", type=_at_least(1), metavar="N", help="only the first N (chat: 300)")
    command.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="of the generated chat (0)")
    command.add_argument("--verify", action="store_true", help="compare every retrieved byte on every rank")
    command.add_argument("--window", type=_at_least(1), default=64, metavar="N", help="requests in one batch (64)")
    world = command.add_argument_group("the local cluster, unless --cluster names a running one")
    world.add_argument("--cluster", metavar="NAME", help="use the running cluster NAME")
    world.add_argument("--namespace", default="lmcache_ray", help="its Ray namespace (lmcache_ray)")
    world.add_argument("--world-size", type=_at_least(1), default=2, metavar="N", help="ranks (2)")
    world.add_argument("--nodes", type=_at_least(1), default=1, metavar="N", help="simulated nodes (1)")
    world.add_argument("--ranks-per-node", type=_counts, metavar="A,B", help="uneven nodes, as 3,1")
    world.add_argument("--use-mla", action="store_true", help="one copy of the KV, held by rank 0")
    world.add_argument("--policy", default="lru", metavar="NAME", help="lru, lfu or fifo (lru)")
    world.add_argument(
        "--capacity-blocks", type=_at_least(0), default=0, metavar="N", help="blocks the cache holds; 0: all (0)"
    )
    world.add_argument(
        "--kvcache-shape-spec",
        metavar="SPEC",
        help='one rank\'s layer groups, "(layers,kv,blocks,heads,size):dtype:layers;..." (16 bytes per token)',
    )
    _add_json(command)


def _add_up(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "up",
        help="start a cluster on the running Ray and leave it there",
        description="Start a detached cluster on the Ray that runs here or that RAY_ADDRESS names. Any option of the "
        "configuration can be given too, as --chunk-size 512.",
    )
    _add_identity(command)
    command.add_argument(
        "--config",
        type=os.path.abspath,
        metavar="FILE",
        help="YAML configuration; LMCACHE_* variables and flags win over it",
    )
    command.add_argument("--model-name", default="model", help="goes into every chunk key (model)")
    command.add_argument("--world-size", type=_at_least(1), default=2, metavar="N", help="ranks (2)")
    command.add_argument("--ranks-per-node", type=_counts, metavar="A,B", help="ranks on each node, as 3,1")
    command.add_argument("--use-mla", action="store_true", help="one copy of the KV, held by rank 0")
    command.add_argument("--kvcache-shape-spec", metavar="SPEC", help="one rank's layer groups (16 bytes per token)")
    command.add_argument("--num-blocks", type=_at_least(1), metavar="N", help="blocks of each rank's paged KV")
    _add_json(command)


def _add_identity(command: argparse.ArgumentParser) -> None:
    command.add_argument("--name", default="default", help="of the cluster (default)")
    command.add_argument("--namespace", default="lmcache_ray", help="its Ray namespace (lmcache_ray)")


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object as the last line of stdout")


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return int(text)

    return parse


def _counts(text: str) -> tuple[int, ...]:
    try:
        return parse_ranks_per_node(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
