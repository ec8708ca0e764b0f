"""How the files of a disk directory are called, and how to tell ours from everybody else's. Pure.

::

    <root>/lmcache_ray.lock                                          whose the directory is
    <root>/<fingerprint, 32 hex>/rank-<r>/lmcache_ray.lock           which process has this rank's part
    <root>/<fingerprint, 32 hex>/rank-<r>/<x>/<y>/<key, 64 hex>.<generation, 16 hex>.kv
    <root>/<fingerprint, 32 hex>/rank-<r>/<x>/<y>/<as above>.<8 hex>.tmp    being written

x and y are the key's first two digits. Names have a fixed length, whatever cluster, model and prompt are called. What
has another name, or is in another place, is foreign: it is neither read, counted nor deleted.
"""

import re
from typing import Final, NamedTuple

LOCK_NAME: Final = "lmcache_ray.lock"
PROBE_NAME: Final = "lmcache_ray.probe"
"""In a rank's directory for an instant: whether a file can be written there."""
LEAF_DIGITS: Final = "0123456789abcdef"
"""The names of the directories of both levels."""

_FINGERPRINT_NBYTES: Final = 16  # of 32: enough for a name, the header has all
_FINGERPRINT: Final = re.compile(r"[0-9a-f]{32}")
_RANK: Final = re.compile(r"rank-(0|[1-9]\d{0,8})")
_CHUNK: Final = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16})\.kv(\.[0-9a-f]{8}\.tmp)?")


class StoredChunk(NamedTuple):
    """One writing of one chunk: its key, and the generation that the disk index gave to this writing."""

    key: bytes
    generation: int


class ChunkFileName(NamedTuple):
    """What the name of one of our files says."""

    chunk: StoredChunk
    is_temporary: bool


def rank_directory(fingerprint: bytes, rank: int) -> str:
    """The directory of one rank of one layout, below the root."""
    return f"{fingerprint_directory(fingerprint)}/rank-{rank}"


def fingerprint_directory(fingerprint: bytes) -> str:
    """The directory of one layout, below the root."""
    return fingerprint[:_FINGERPRINT_NBYTES].hex()


def leaf_directory(key: bytes) -> str:
    """The directory of a key's files, below the rank's."""
    digits = key[:1].hex()
    return f"{digits[0]}/{digits[1]}"


def chunk_path(chunk: StoredChunk) -> str:
    """The file of a chunk, below the rank's directory."""
    digits = chunk.key.hex()
    return f"{digits[0]}/{digits[1]}/{digits}.{chunk.generation:016x}.kv"


def temporary_path(path: str, suffix: bytes) -> str:
    """The name under which `path` is written before it is published; `suffix` is 4 random bytes."""
    return f"{path}.{suffix.hex()}.tmp"


def parse_chunk_name(leaf: str, name: str) -> ChunkFileName | None:
    """What is called `name` in the directory `leaf` ("x/y"); None if it is not ours."""
    match = _CHUNK.fullmatch(name)
    if match is None or f"{name[0]}/{name[1]}" != leaf:
        return None
    return ChunkFileName(StoredChunk(bytes.fromhex(match[1]), int(match[2], 16)), match[3] is not None)


def is_fingerprint_directory(name: str) -> bool:
    """Whether a directory below the root is called as a layout's is."""
    return _FINGERPRINT.fullmatch(name) is not None


def parse_rank_directory(name: str) -> int | None:
    """The rank whose directory below a layout's is called `name`; None if it is not ours."""
    match = _RANK.fullmatch(name)
    return None if match is None else int(match[1])
