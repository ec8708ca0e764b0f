"""On which machines the slot protocol holds by itself, and what is said on the others.

The protocol needs every process to see stores in the order in which they were made. Python has no fence to force that
with, so it is a property of the machine; one that lacks it is not refused, because the second look at a slot matters
only when a slot is reused under its reader, which leases prevent until they end by time or a clear overtakes them.
"""

import logging
from typing import Final

logger = logging.getLogger(__name__)

_ORDERED: Final = frozenset(("x86_64", "amd64"))


def warn_if_unordered(machine: str, path: object) -> None:
    """Log a warning about the arena at `path` unless processors like `machine` (`platform.machine`) order stores."""
    if machine.lower() not in _ORDERED:
        logger.warning(
            "arena %s is on a machine of type %s, which need not show stores to other processes in the order in which "
            "they were made (x86-64 does): a chunk that is replaced while it is read after its lease has ended may be "
            "taken for whole",
            path,
            machine,
        )
