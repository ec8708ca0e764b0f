"""`python -m cluster`: replay, chaos, up, status, restart, drain, down, check and inspect.

Results go to stdout, progress and errors to stderr; with `--json` the last line of stdout is one JSON object.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from lmcache_ray.errors import LMCacheRayError

from .cli import parse_command_line
from .outcome import Outcome

EXIT_FAILED = 1
EXIT_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = parse_command_line(argv)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        return _run(arguments)
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


def _run(arguments: argparse.Namespace) -> int:
    outcome = _command(arguments.command)(arguments)
    if arguments.json:
        print(json.dumps(outcome.as_json), flush=True)
    return outcome.exit_status


def _command(name: str) -> Callable[[argparse.Namespace], Outcome]:
    # Imported here, so that --help, wrong arguments and `inspect` need neither Ray nor torch.
    if name == "inspect":
        from .inspect_file import inspect

        return inspect
    from . import commands

    named = (
        commands.replay, commands.chaos, commands.up, commands.status, commands.restart, commands.drain,
        commands.down, commands.check,
    )  # fmt: skip
    return {command.__name__: command for command in named}[name]


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """End by SystemExit, so that every `with` is left in order."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
