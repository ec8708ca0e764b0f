"""How the files of one cluster on one node are called, and how to tell them from everybody else's. Pure.

Cluster names may hold any characters, so a file is named by a digest of (namespace, name)::

    lmcache_ray-<hex16>-r<rank>.arena             the arena of one rank
    lmcache_ray-<hex16>-c<hex16>.alive            the liveness file of one client
    <either of these>.<hex8>.tmp                  one that is being made and not published yet

The sweep looks at nothing else.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FILE_NAME: Final = re.compile(
    r"lmcache_ray-(?P<cluster>[0-9a-f]{16})-(?:r(?P<rank>\d{1,9})\.arena|c[0-9a-f]{16}\.alive)(?P<tmp>\.[0-9a-f]{8}\.tmp)?"
)


@dataclass(frozen=True, slots=True)
class FileName:
    """What the name of one of our files says. `rank` is None for a liveness file."""

    cluster: str
    rank: int | None
    is_temporary: bool


def cluster_digest(namespace: str, name: str) -> str:
    """The 16 hexadecimal digits that stand for a cluster in its files' names."""
    return _digest((namespace, name))


def arena_path(directory: str | Path, namespace: str, name: str, rank: int) -> Path:
    """Where the arena of `rank` is published."""
    return Path(directory) / f"lmcache_ray-{cluster_digest(namespace, name)}-r{rank}.arena"


def liveness_path(directory: str | Path, namespace: str, name: str, client_id: str) -> Path:
    """Where a client of the cluster shows that it lives."""
    return Path(directory) / f"lmcache_ray-{cluster_digest(namespace, name)}-c{_digest((client_id,))}.alive"


def temporary_path(path: Path, suffix: bytes) -> Path:
    """The name under which `path` is made before it is published; `suffix` is 4 random bytes."""
    return path.with_name(f"{path.name}.{suffix.hex()}.tmp")


def parse_file_name(file_name: str) -> FileName | None:
    """The parts of one of our file names; None if the file is not ours."""
    match = _FILE_NAME.fullmatch(file_name)
    if match is None:
        return None
    rank = match["rank"]
    return FileName(match["cluster"], None if rank is None else int(rank), match["tmp"] is not None)


def _digest(texts: Iterable[str]) -> str:
    # Each text goes in with its length: ("a", "bc") and ("ab", "c") must not meet.
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in encoded)).hexdigest()[:16]
