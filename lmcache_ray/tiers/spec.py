"""Which tiers a world has, as plain values. Pure.

Configuration stops where an engine is put together: `tier_spec` takes the values of its keys, and everything behind
it takes these classes. They are small enough to be sent to every rank. Which values contradict each other is said once,
by `tier_contradictions`, for the configuration and for `tier_spec` alike.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from lmcache_ray.errors import ConfigError

_GIB: Final = 2**30
_SECRETS: Final = (
    (re.compile(r"://(?!/).*@"), "://***@"),  # up to the last "@": a password may hold one that is not escaped
    (re.compile(r"^[^/@]*:[^/]*@"), "***@"),  # the scheme was forgotten
    (re.compile(r"(?i)((?:password|passwd|secret|token|key)=)[^&]+"), r"\1***"),
)


class Tier(str, Enum):
    """A place where chunks are kept, the fastest first. The value is its name in calls, reports and messages."""

    CPU = "cpu"
    """The arenas: memory of every rank that holds chunks."""
    DISK = "disk"
    """A directory of every rank that holds chunks, on its own node."""
    REMOTE = "remote"
    """One store that several clusters may share."""


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """The disk tier: every rank keeps at most `max_nbytes` of files in a directory of its own below `root`."""

    root: str
    max_nbytes: int

    def __post_init__(self) -> None:
        if not self.root.startswith("/"):
            raise ConfigError(f"local_disk is {self.root!r}; accepted: an absolute path")
        if self.max_nbytes < 1:
            raise ConfigError(f"max_local_disk_size comes to {self.max_nbytes} bytes; accepted: at least 1")


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    """The remote tier: the objects below `prefix` in the store at `url`.

    `serde` names how chunks are written, `timeout_s` ends one call, and `max_nbytes` is the limit of all objects
    together (None: the store's own). The representation shows no password.
    """

    url: str
    prefix: str
    serde: str
    timeout_s: float
    max_nbytes: int | None = None

    def __repr__(self) -> str:
        return (
            f"RemoteSpec(url={masked(self.url)!r}, prefix={self.prefix!r}, serde={self.serde!r}, "
            f"timeout_s={self.timeout_s!r}, max_nbytes={self.max_nbytes!r})"
        )


@dataclass(frozen=True, slots=True)
class TierSpec:
    """The tiers of a world. Without `keeps_in_memory` memory is where chunks of the lower tiers pass through."""

    keeps_in_memory: bool = True
    disk: DiskSpec | None = None
    remote: RemoteSpec | None = None

    def __post_init__(self) -> None:
        if not self.keeps_in_memory and not self.has_lower:
            raise ConfigError("local_cpu is false, and neither local_disk nor remote_url is set: there is no tier")

    @property
    def has_lower(self) -> bool:
        """Whether there is a tier below memory."""
        return self.disk is not None or self.remote is not None


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Values of `keys` that cannot be meant together. `text` names them and says what is accepted."""

    keys: tuple[str, ...]
    text: str


def tier_contradictions(
    *, local_cpu: bool, local_disk: str | None, max_local_disk_size: float, remote_url: str | None
) -> list[Contradiction]:
    """What is wrong with the values of these keys, of which each is right by itself."""
    found = []
    if local_disk is not None and int(max_local_disk_size * _GIB) < 1:
        text = (
            f"local_disk = {local_disk!r} is a disk tier without room: max_local_disk_size = {max_local_disk_size} GiB "
            "is less than a byte; accepted: max_local_disk_size above 0"
        )
        found.append(Contradiction(("local_disk", "max_local_disk_size"), text))
    if not local_cpu and local_disk is None and remote_url is None:
        text = (
            "local_cpu = false leaves no tier to cache in: local_disk = null and remote_url = null; "
            "accepted: local_cpu true, or one of the others set"
        )
        found.append(Contradiction(("local_cpu", "local_disk", "remote_url"), text))
    return found


def tier_spec(
    *,
    local_cpu: bool,
    local_disk: str | None,
    max_local_disk_size: float,
    remote_url: str | None,
    remote_prefix: str,
    remote_serde: str,
    blocking_timeout_secs: float,
    max_remote_size: float | None,
) -> TierSpec:
    """The tiers that the configuration's keys of these names describe; sizes are GiB.

    Raises `ConfigError`, one line for each contradiction, as the configuration's own `validate` does; here the lines
    know no origins.
    """
    contradictions = tier_contradictions(
        local_cpu=local_cpu, local_disk=local_disk, max_local_disk_size=max_local_disk_size, remote_url=remote_url
    )
    if contradictions:
        raise ConfigError("\n".join(contradiction.text for contradiction in contradictions))
    disk = None if local_disk is None else DiskSpec(local_disk, int(max_local_disk_size * _GIB))
    remote = None
    if remote_url is not None:
        max_nbytes = None if max_remote_size is None else int(max_remote_size * _GIB)
        remote = RemoteSpec(remote_url, remote_prefix, remote_serde, blocking_timeout_secs, max_nbytes)
    return TierSpec(local_cpu, disk, remote)


def masked(text: str) -> str:
    """`text` as it may be shown: who logs in to a URL, and what a query calls a password or a key, is ``***``."""
    for pattern, mask in _SECRETS:
        text = pattern.sub(mask, text)
    return text
