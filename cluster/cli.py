"""The commands' arguments: every flag of `python -m cluster`, what it means, and the configuration they make."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Final

from lmcache_ray import __version__
from lmcache_ray.config import COMMAND_LINE, LMCacheEngineConfig, load_config, parse_overrides
from lmcache_ray.config_sources import KNOWN_KEYS
from lmcache_ray.errors import ConfigError

from .topology import MAX_WORLD_SIZE, parse_ranks_per_node
from .workload import BLOCK_SIZE

_MAX_MINUTES = 24.0 * 60
_DESCRIPTION = """\
lmcache_ray: a KV-cache cluster on Ray for serving large language models.

  python -m cluster replay                        run a generated chat workload on a local cluster of 2 ranks
  python -m cluster replay trace.jsonl --verify   run a Mooncake-format trace and check every byte that comes back
  python -m cluster up --name prod --world-size 4 start a cluster on the running Ray and leave it there
  python -m cluster status --name prod            how it stands
  python -m cluster down --name prod              end it
  python -m cluster check --name prod             compare its files on disk with its index; --fix repairs
  python -m cluster inspect FILE                  what the file of a stored chunk says, and whether it is whole
"""

_REPLAY = """\
Each request is looked up, its cached prefix is loaded on every rank, and what is new is stored, in file order.

A trace has one JSON object a line with "hash_ids", one id for each block of 512 tokens (an id stands for the whole
prefix up to its block), as in the traces that Mooncake publishes. Without a TRACE a multi-turn chat is made from a
seed. The local cluster is configured as any other, by --config, LMCACHE_* variables and flags as --arena-dir DIR, but
its chunks are a trace's blocks, and it holds --capacity-blocks of them. Exit status: 0, or 1 if a byte differed (with
--verify) or the run failed, or 2 for wrong arguments.

examples:
  python -m cluster replay --requests 100 --world-size 4 --verify
  python -m cluster replay trace.jsonl --capacity-blocks 10000 --policy lfu --json
  python -m cluster replay trace.jsonl --world-size 4 --nodes 2 --ranks-per-node 3,1 --use-mla --verify
"""

_CHECK: Final = """\
Read every file of a running cluster's disk tier to its last byte, on every rank, and compare with what the index says:
files that are damaged, that nobody knows, or that are half written, and chunks without a file. Check while nothing is
stored: what is written meanwhile may be found unknown or missing. Exit status: 0 if all agree, or after --fix has made
them agree, else 1.
"""

_INSPECT: Final = """\
Print what the file of a chunk, on a disk or from a remote store, says of itself, and whether all of its lengths and
checksums hold. The file is read to its last byte and nothing in it is executed; no cluster is asked. Exit status: 0 if
it is sound, 1 if it is damaged or no chunk at all, 2 if it cannot be read.
"""

_LOCAL_WORLD: Final = {
    "world_size": 2,
    "nodes": None,
    "ranks_per_node": None,
    "use_mla": False,
    "policy": None,
    "capacity_blocks": 0,
    "kvcache_shape_spec": None,
}
"""What `replay` takes for the flags that describe a local cluster, where they are left out."""
_SHORT_FLAGS: Final = {"name": "cluster_name", "namespace": "cluster_namespace", "policy": "cache_policy"}
"""Flags that stand for a key of the configuration."""
_SHOWN_KEYS: Final = {
    "arena_dir": ("DIR", "directory of the arena files (/dev/shm)"),
    "local_disk": ("DIR", "keep chunks on disk too, below this directory"),
    "max_local_disk_size": ("GIB", "limit of each rank's disk files"),
    "remote_url": ("URL", "keep chunks in a shared store too: file:///dir, redis://host, s3://bucket, ..."),
}
"""Keys of the configuration that --help names; all others are flags as well."""
_NO_KEYS_OF_A_REPLAY: Final = {
    "chunk_size": f"a replay's chunks are a trace's blocks, {BLOCK_SIZE} tokens",
    "capacity_chunks": "a replay's capacity is --capacity-blocks",
    "max_local_cpu_size": "a replay's capacity is --capacity-blocks",
    "cluster_name": "a local replay names its cluster itself; --cluster uses a running one",
}


def parse_command_line(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The chosen command is in `command`, configuration given as `--<config-key> VALUE` in `overrides`, as words.

    `-` and `_` in flags are the same. Wrong arguments end the process with status 2 and a message.
    """
    words = [_spelled(word) for word in (sys.argv[1:] if argv is None else argv)]
    arguments, rest = build_parser().parse_known_args(words)
    if rest:
        arguments.parser.error(_unknown(rest, arguments))
    if arguments.command == "replay":
        _settle_local_world(arguments)
    return arguments


def _settle_local_world(arguments: argparse.Namespace) -> None:
    given = {name: getattr(arguments, name) for name in _LOCAL_WORLD if getattr(arguments, name) is not None}
    if arguments.cluster is not None and (given or arguments.overrides):
        flags = [COMMAND_LINE.spell(name) for name in given] + [word.partition("=")[0] for word in arguments.overrides]
        arguments.parser.error(f"--cluster uses a running cluster as it is; not together with {', '.join(flags)}")
    for name, default in _LOCAL_WORLD.items():
        setattr(arguments, name, given.get(name, default))


def read_config(arguments: argparse.Namespace) -> LMCacheEngineConfig:
    """What file, environment and flags make together. Raises `ConfigError`, also for two flags that disagree."""
    overrides = parse_overrides(arguments.overrides)
    for flag, key in _SHORT_FLAGS.items():
        given = getattr(arguments, flag, None)
        if given is not None and overrides.setdefault(key, given) != given:
            raise ConfigError(
                f"--{flag} {given!r} and {COMMAND_LINE.spell(key)} {overrides[key]!r} are one value and disagree"
            )
    refused = [key for key in overrides if arguments.command == "replay" and key in _NO_KEYS_OF_A_REPLAY]
    if refused:
        raise ConfigError(f"{COMMAND_LINE.spell(refused[0])}: {_NO_KEYS_OF_A_REPLAY[refused[0]]}")
    config = load_config(arguments.config)
    config.update(overrides, COMMAND_LINE)
    return config.validate()


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
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
        _add_common(command)
    _add_chaos(commands)
    _add_restart(commands)
    _add_drain(commands)
    _add_check(commands)
    _add_inspect(commands)
    return parser


def _add_replay(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "replay",
        help="run a trace or a generated chat workload",
        description=_REPLAY,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument("trace", nargs="?", metavar="TRACE", help="JSON-lines file; omit it for a generated chat")
    command.add_argument("--requests", type=_at_least(1), metavar="N", help="only the first N (chat: 300)")
    command.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="of the generated chat (0)")
    command.add_argument("--verify", action="store_true", help="compare every retrieved byte on every rank")
    command.add_argument("--window", type=_at_least(1), default=64, metavar="N", help="requests in one batch (64)")
    command.add_argument("--cluster", metavar="NAME", help="use the running cluster NAME instead of a local one")
    command.add_argument("--namespace", help="Ray namespace (cluster_namespace of the configuration)")
    world = command.add_argument_group("the local cluster")
    world.add_argument("--world-size", type=_at_least(1, MAX_WORLD_SIZE), metavar="N", help="ranks (2)")
    world.add_argument("--nodes", type=_at_least(1, MAX_WORLD_SIZE), metavar="N", help="simulated nodes (1)")
    world.add_argument("--ranks-per-node", type=_counts, metavar="A,B", help="uneven nodes, as 3,1")
    world.add_argument("--use-mla", action="store_true", default=None, help="one copy of the KV, held by rank 0")
    world.add_argument("--policy", metavar="NAME", help="lru, lfu or fifo (cache_policy of the configuration)")
    world.add_argument("--capacity-blocks", type=_at_least(0), metavar="N", help="blocks the cache holds; 0: all (0)")
    world.add_argument(
        "--kvcache-shape-spec",
        metavar="SPEC",
        help='one rank\'s layer groups, "(layers,kv,blocks,heads,size):dtype:layers;..." (16 bytes per token)',
    )
    _add_config_keys(world)
    _add_common(command)


def _add_up(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "up",
        help="start a cluster on the running Ray and leave it there",
        description="Start a detached cluster on the Ray that runs here or that RAY_ADDRESS names. Any option of the "
        "configuration can be given too, as --chunk-size 512.",
        allow_abbrev=False,
    )
    _add_identity(command)
    command.add_argument("--model-name", default="model", help="goes into every chunk key (model)")
    command.add_argument("--world-size", type=_at_least(1, MAX_WORLD_SIZE), default=2, metavar="N", help="ranks (2)")
    command.add_argument("--ranks-per-node", type=_counts, metavar="A,B", help="ranks on each node, as 3,1")
    command.add_argument("--use-mla", action="store_true", help="one copy of the KV, held by rank 0")
    command.add_argument("--kvcache-shape-spec", metavar="SPEC", help="one rank's layer groups (16 bytes per token)")
    command.add_argument("--num-blocks", type=_at_least(1), metavar="N", help="blocks of each rank's paged KV")
    _add_config_keys(command)
    _add_common(command)


def _add_chaos(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "kill processes of a cluster of its own at random while every byte that it serves is compared"
    command = commands.add_parser("chaos", help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    command.add_argument("--minutes", type=_minutes, default=1.0, metavar="M", help="how long (1)")
    command.add_argument("--seed", type=_at_least(0), default=0, metavar="S", help="whom it hits, and when (0)")
    command.add_argument("--world-size", type=_at_least(1, MAX_WORLD_SIZE), default=3, metavar="N", help="ranks (3)")
    command.add_argument("--use-mla", action="store_true", help="one copy of the KV, held by rank 0")
    command.add_argument("--kvcache-shape-spec", metavar="SPEC", help="one rank's layer groups (16 bytes per token)")
    _add_config_keys(command)
    _add_common(command)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes <= _MAX_MINUTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0, and at most {_MAX_MINUTES:g}")
    return minutes


def _add_restart(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "start the ranks of a running cluster anew, one by one; what is cached stays cached"
    command = commands.add_parser("restart", help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument("--rank", type=_at_least(0), metavar="N", help="only rank N")
    command.add_argument("--timeout", type=_at_least(1), default=60, metavar="SECONDS", help="for each rank (60)")
    _add_identity(command)
    _add_common(command)


def _add_drain(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "end a running cluster without losing anything: stores are finished, and copied to disk"
    command = commands.add_parser("drain", help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.add_argument("--timeout", type=_at_least(1), default=60, metavar="SECONDS", help="for both (60)")
    _add_identity(command)
    _add_common(command)


def _add_check(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "check",
        help="compare a running cluster's disk files with its index",
        description=_CHECK,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--fix", action="store_true", help="delete files of no use, forget chunks that are not whole")
    _add_identity(command)
    _add_common(command)


def _add_inspect(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "inspect",
        help="show what a stored chunk's file says and whether it is whole",
        description=_INSPECT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("file", metavar="FILE", help="a chunk's file")
    _add_json(command)


def _add_identity(command: argparse.ArgumentParser) -> None:
    command.add_argument("--name", help="of the cluster (cluster_name of the configuration)")
    command.add_argument("--namespace", help="its Ray namespace (cluster_namespace of the configuration)")


def _add_common(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", metavar="FILE", help="YAML; LMCACHE_* variables and flags win over it")
    _add_json(command)


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object as the last line of stdout")
    command.set_defaults(parser=command, overrides=[])


class _Override(argparse.Action):
    """Keeps configuration as the words that `parse_overrides` reads."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        word = str(option_string) if values is None else f"{option_string}={values}"
        namespace.overrides = [*namespace.overrides, word]


def _add_config_keys(command: argparse._ActionsContainer) -> None:
    """Every key is a flag that argparse knows: it would take the value of an unknown one for the TRACE."""
    for key in KNOWN_KEYS:
        metavar, text = _SHOWN_KEYS.get(key, ("VALUE", argparse.SUPPRESS))
        command.add_argument(
            COMMAND_LINE.spell(key),
            dest="overrides",
            action=_Override,
            nargs=None if key in _SHOWN_KEYS else "?",  # a boolean may stand alone
            metavar=metavar,
            help=text,
        )


def _unknown(rest: Sequence[str], arguments: argparse.Namespace) -> str:
    flag = rest[0].partition("=")[0]
    if flag.startswith("--") and arguments.command in ("replay", "up"):
        return COMMAND_LINE.unknown(flag.removeprefix("--").replace("-", "_"), vars(arguments))
    return f"unrecognized arguments: {' '.join(rest)}"


def _spelled(word: str) -> str:
    flag, equals, value = word.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def _at_least(minimum: int, maximum: int = 2**31 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(maximum))
        if not is_number or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} to {maximum}")
        return int(text)

    return parse


def _counts(text: str) -> tuple[int, ...]:
    try:
        return parse_ranks_per_node(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
