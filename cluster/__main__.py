"""`python -m cluster`: replay, up, status and down.

Results go to stdout, progress and errors to stderr; with `--json` the last line of stdout is one JSON object.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from lmcache_ray.errors import LMCacheRayError

from .cli import build_parser

EXIT_FAILED = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command != "up":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        with _in_own_folder():
            return _run(arguments, rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except ValueError as error:
        if not isinstance(error, LMCacheRayError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (LMCacheRayError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    # Imported here, so that --help and wrong arguments need neither Ray nor torch.
    from . import commands

    if arguments.command == "up":
        outcome = commands.up(arguments, rest)
    else:
        run = {"replay": commands.replay, "status": commands.status, "down": commands.down}[arguments.command]
        outcome = run(arguments)
    if arguments.json:
        print(json.dumps(outcome.as_json), flush=True)
    return outcome.exit_status


@contextmanager
def _in_own_folder() -> Iterator[None]:
    """Ray puts a driver's current folder first on its workers' path: a `cluster` package there would win over ours."""
    callers = os.getcwd()
    os.chdir(Path(__file__).resolve().parent.parent)
    try:
        yield
    finally:
        os.chdir(callers)


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """End by SystemExit, so that every `with` is left in order."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
