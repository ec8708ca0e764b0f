"""What a world's objects in a remote store are called, and what a name tells of its object. Pure. ::

    <prefix>/<scope>/<key, 64 hex digits>/manifest.<serde>                                  the commit
    <prefix>/<scope>/<key, 64 hex digits>/<origin>-<generation, hex>.r<rank>.<serde>        one rank's shard

The *scope* stands for all that must agree for bytes to be shared (model and layout), the *origin* for the cluster that
wrote a shard, so that no two writings of a chunk ever have one name. Each serde has manifests of its own: a world
never even sees what another serde wrote.
"""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from lmcache_ray.errors import ConfigError, InvalidRequestError, shown

KEY_NBYTES: Final = 32

_PART: Final = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_PREFIX: Final = re.compile(rf"{_PART}(/{_PART})*")
_WORD: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_BELOW_SCOPE: Final = re.compile(
    r"(?P<key>[0-9a-f]{64})/"
    r"(manifest|(?P<origin>[A-Za-z0-9_-]{1,128})-(?P<generation>[0-9a-f]{16})\.r(?P<rank>[0-9]{1,9}))"
    r"\.(?P<serde>[A-Za-z0-9_-]{1,128})"
)


class Writing(NamedTuple):
    """One writing of a chunk, in the store: by which cluster, and that cluster's number of it."""

    origin: str
    generation: int


class ChunkPlace(NamedTuple):
    """Where everything of a chunk lies that one serde wrote."""

    scope: str
    key: bytes
    serde: str


class ObjectName(NamedTuple):
    """What a name says: a shard's writing and rank, or a chunk's manifest, which has neither."""

    place: ChunkPlace
    writing: Writing | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class RemoteNames:
    """The names of one scope and serde. Raises `ConfigError` for words of which no name can be made."""

    prefix: str
    scope: str
    serde: str

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix) or len(self.prefix) > 200:
            raise ConfigError(
                f"the prefix of a remote's objects must be up to 200 letters, digits, '.', '_', '-' and '/', no part "
                f"empty or beginning with '.'; got {shown(self.prefix)}"
            )
        check_word("scope", self.scope)
        check_word("serde", self.serde)

    @property
    def folder(self) -> str:
        """The folder of everything in this scope."""
        return f"{self.prefix}/{self.scope}"

    def manifest(self, key: bytes) -> str:
        """The object that commits a chunk."""
        return self.manifest_at(self.place(key))

    def shard(self, key: bytes, writing: Writing, rank: int) -> str:
        """The object with one rank's part of one writing of a chunk."""
        self.place(key)
        name = f"{writing.origin}-{writing.generation:016x}.r{rank}.{self.serde}"
        return f"{self.folder}/{key.hex()}/{name}"

    def place(self, key: bytes) -> ChunkPlace:
        """Where a chunk of this scope and serde lies. Raises `InvalidRequestError` for what is no chunk key."""
        if len(key) != KEY_NBYTES:
            raise InvalidRequestError(f"a chunk key has {KEY_NBYTES} bytes; got {shown(key)}")
        return ChunkPlace(self.scope, key, self.serde)

    def manifest_at(self, place: ChunkPlace) -> str:
        """The object that commits a chunk of any scope and serde below the prefix."""
        return f"{self.prefix}/{place.scope}/{place.key.hex()}/manifest.{place.serde}"

    def parse(self, name: str) -> ObjectName | None:
        """What a name below the prefix says, of any scope and serde; None for a name that is none of ours."""
        inside = name.removeprefix(f"{self.prefix}/")
        scope, _, rest = inside.partition("/")
        found = _BELOW_SCOPE.fullmatch(rest)
        if inside == name or found is None or not _WORD.fullmatch(scope):
            return None
        place = ChunkPlace(scope, bytes.fromhex(found["key"]), found["serde"])
        if found["origin"] is None:
            return ObjectName(place, None, None)
        return ObjectName(place, Writing(found["origin"], int(found["generation"], 16)), int(found["rank"]))


def check_word(what: str, word: str) -> None:
    """Raise `ConfigError` unless `word` can be a part of a name; `what` says what it is."""
    if not _WORD.fullmatch(word):
        raise ConfigError(
            f"the {what} of a remote's objects must be 1 to 128 letters, digits, '_' or '-'; got {shown(word)}"
        )
