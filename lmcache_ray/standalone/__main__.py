"""``python -m lmcache_ray.standalone``: the standalone world as a process; and LMCache's names for who imports them.

The names load on first use, as those of the package do: help and errors in flags need no torch, and while torch loads,
a signal already ends the process in good order.
"""

import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

from lmcache_ray.errors import LMCacheRayError
from lmcache_ray.standalone.command_line import PROG, CommandLine, read_command_line
from lmcache_ray.standalone.stop_signals import StopRequest, ignore_stop_signals, leave_process, on_stop_signal

_POLL_S: Final = 0.05

__all__ = [
    "LMCacheStandaloneStarter",
    "LayerGroupSpec",
    "calculate_composite_kv_cache_shape",
    "get_composite_kv_dtype",
    "load_config",
    "main",
    "override_config_from_dict",
    "parse_kv_shape",
    "parse_kvcache_shape_spec",
]

if TYPE_CHECKING:
    from lmcache_ray.config import load_config, override_config_from_dict
    from lmcache_ray.shape_spec import (
        LayerGroupSpec,
        calculate_composite_kv_cache_shape,
        get_composite_kv_dtype,
        parse_kv_shape,
        parse_kvcache_shape_spec,
    )
    from lmcache_ray.standalone.starter import LMCacheStandaloneStarter
else:
    _HOMES: Final = {
        "LMCacheStandaloneStarter": "lmcache_ray.standalone.starter",
        "LayerGroupSpec": "lmcache_ray.shape_spec",
        "calculate_composite_kv_cache_shape": "lmcache_ray.shape_spec",
        "get_composite_kv_dtype": "lmcache_ray.shape_spec",
        "load_config": "lmcache_ray.config",
        "override_config_from_dict": "lmcache_ray.config",
        "parse_kv_shape": "lmcache_ray.shape_spec",
        "parse_kvcache_shape_spec": "lmcache_ray.shape_spec",
    }

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run what `argv` (default: the process's arguments) asks for, until SIGINT or SIGTERM.

    Raises `SystemExit`: 2 for bad input, 1 if it cannot run here, 0 after ``--help``.
    """
    stop_request = StopRequest()
    with on_stop_signal(stop_request):
        try:
            with on_stop_signal(leave_process):  # there is nothing to clean up yet
                starter = _make_starter(read_command_line(argv))
                print(starter.describe(), flush=True)
            _serve(starter, stop_request)
        except LMCacheRayError as error:
            print(f"{PROG}: error: {error}", file=sys.stderr)
            raise SystemExit(2 if isinstance(error, ValueError) else 1) from None
        except BrokenPipeError:  # nobody reads what it prints; without this, closing stdout would fail again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(1) from None


def _make_starter(command_line: CommandLine) -> "LMCacheStandaloneStarter":
    # Imported here because both load torch; see the opening note.
    from lmcache_ray.standalone.settings import read_settings
    from lmcache_ray.standalone.starter import LMCacheStandaloneStarter

    settings = read_settings(command_line)
    return LMCacheStandaloneStarter(settings.config, settings.metadata, settings.layer_groups, settings.device)


def _serve(starter: "LMCacheStandaloneStarter", stop_request: StopRequest) -> None:
    try:
        stop_request.run_until_received(starter.start)
        if not stop_request.is_received:
            print("ready", flush=True)
        while not stop_request.is_received:
            time.sleep(_POLL_S)
    finally:
        starter.stop()


if __name__ == "__main__":
    ignore_stop_signals()  # what main puts back in the end: nothing may break into the way out any more
    main()
    leave_process()  # everything is given back; to take torch apart would cost another half second
