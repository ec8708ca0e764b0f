"""The command line as text: which flags there are, and what ``--help`` teaches. What they mean says `settings.py`.

Apart from it because that needs torch, which takes seconds to load: too long to wait for help, or for a typing error.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NoReturn

PROG: Final = "python -m lmcache_ray.standalone"

_EPILOG: Final = f"""\
configuration:
  --<config-key> VALUE sets any key of the configuration (configs/full.yaml lists them), above the environment
  (LMCACHE_<KEY>) and the file. In all flags '-' and '_' are the same, and so are '=' and a blank before the value:
  --chunk-size 64, --chunk_size=64.

shape spec:
  (num_layers,kv_dim,num_blocks,num_heads,head_size):dtype:layer_count, one group after the other, joined by ';'.
  Heads are those of one rank. kv_dim is 2, or 1 with --use-mla. num_blocks blocks of block_size tokens are allocated.
  dtypes: float16, bfloat16, float32, float8_e4m3fn, float8_e5m2, uint8, int8.

examples:
  # one rank, all defaults, room for 64 chunks
  {PROG} --capacity-chunks 64

  # an 8B model's KV at TP=4, all four ranks in this process
  {PROG} --model-name my_model --world-size 4 \\
      --kvcache-shape-spec "(32,2,256,2,128):bfloat16:32" --max-local-cpu-size 1

  # two layer groups of different heads and dtypes
  {PROG} --kvcache-shape-spec "(2,2,256,4,16):float16:2;(3,2,256,8,16):bfloat16:3"

  # MLA: rank 0 keeps the one copy, two ranks read it
  {PROG} --use-mla --world-size 2 --kvcache-shape-spec "(2,1,256,1,576):bfloat16:2"

It prints what it runs, then a line "ready", and serves until SIGINT (Ctrl-C) or SIGTERM: then it ends with exit code 0.
Exit code 2: a flag, a shape or the configuration is wrong. 1: it cannot run here, for example for lack of memory.
"""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The flags as they were typed; None where one was not given. `overrides` are the words meant as configuration."""

    config: str | None
    model_name: str
    kvcache_shape_spec: str | None
    kv_shape: str | None
    kv_dtype: str | None
    use_mla: bool
    worker_id: str
    world_size: str
    device: str
    overrides: tuple[str, ...]


FLAG_NAMES: Final = tuple(field.name for field in fields(CommandLine) if field.name != "overrides")
"""This program's own flags, with ``_``."""


def read_command_line(argv: Sequence[str] | None = None) -> CommandLine:
    """The words of `argv` (default: the process's own). Leaves the process with 2 for bad flags, with 0 for help."""
    words = [_with_dashes(word) for word in (sys.argv[1:] if argv is None else argv)]
    namespace, rest = _parser().parse_known_args(words)
    return CommandLine(**{name: getattr(namespace, name) for name in FLAG_NAMES}, overrides=tuple(rest))


def _with_dashes(word: str) -> str:
    """``--kv_shape=1,2`` -> ``--kv-shape=1,2``; anything but a flag stays as it is."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence, where argparse would print the usage first."""
        self.exit(2, f"{PROG}: error: {message}; --help shows what is accepted\n")


class _Once(argparse.Action):
    """Stores the value; a flag given twice is an error, as it is for configuration keys."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        given = vars(namespace).get("given", frozenset())
        if self.dest in given:
            parser.error(f"{option_string} is given twice")
        namespace.given = given | {self.dest}
        setattr(namespace, self.dest, values)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROG,
        description="Run a whole world of cache ranks in this process, over paged KV filled with a fixed pattern.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def flag(name: str, metavar: str, text: str, default: str | None = None) -> None:
        parser.add_argument(f"--{name}", action=_Once, metavar=metavar, help=text, default=default)

    flag("config", "FILE", "YAML file of configuration keys (default: what LMCACHE_CONFIG_FILE names)")
    flag("model-name", "NAME", "part of every chunk's key (default: %(default)s)", "standalone_model")
    flag("kvcache-shape-spec", "SPEC", "paged KV of one rank, see below (default: (2,2,256,4,16):float16:2)")
    flag("kv-shape", "DIMS", "the five dimensions of an only group, without a spec (default: 2,2,256,4,16)")
    flag("kv-dtype", "DTYPE", "dtype of an only group, without a spec (default: float16)")
    parser.add_argument("--use-mla", action="store_true", help="all ranks' KV is equal: rank 0 stores it, kv_dim is 1")
    flag("worker-id", "RANK", "the rank that lmcache_engine is (default: %(default)s)", "0")
    flag("world-size", "RANKS", "number of ranks, all in this process (default: %(default)s)", "1")
    flag("device", "DEVICE", "where the paged KV is; only CPU memory can be copied (default: %(default)s)", "cpu")
    return parser
