"""The protocol of a remote store of named objects: what a backend must do, and nothing about chunks. Pure.

A backend of your own has these seven methods; name it in an entry point of the group ``lmcache_ray.storage_backends``
(see `backends.py`). What a chunk's objects are called, when they are written and which are deleted is decided above,
in `remote.py`; deadlines and circuit breaking are added once for all backends, in `guarded.py`.

A *name* is ASCII parts joined by ``/``, such as ``lmcache_ray/5e0f/manifest.zstd``. A part has letters, digits and
``. _ -`` and begins with no dot, so that no name leads out of the backend's own place.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from typing_extensions import Buffer

from lmcache_ray.errors import InvalidRequestError, shown

MAX_NAME_LENGTH: Final = 512

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


class StoredObject(NamedTuple):
    """One object of a listing."""

    name: str
    nbytes: int
    """What it takes in the store: its length, or somewhat more where the store counts its own overhead."""
    modified_s: float
    """When it was written, or last used where the store knows that; seconds since 1970. Unknown ages count as now."""


class StorageBackend(Protocol):
    """Named objects in a store that other processes, and other clusters, use too.

    Thread-safe. Nothing is asked of the store before the first call, so a store that is absent then may come later.
    Every method may raise `StorageError`, as its subclass `StorageUnavailableError` where no answer came, and
    `InvalidRequestError` for what is no name.
    """

    @property
    def evicts_itself(self) -> bool:
        """Whether the store drops objects by itself when it is full. Files and buckets never do."""
        ...

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """Make an object of `parts`, one after the other, in place of any older one.

        All or nothing: a reader sees the older object or the whole new one, also if the writer dies half way.
        """
        ...

    def get(self, name: str) -> Buffer | None:
        """The object's bytes; None if there is none."""
        ...

    def get_many(self, names: Sequence[str]) -> list[Buffer | None]:
        """As `get`, for several small objects; in one round trip where the store can."""
        ...

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Which of them are there; in one round trip where the store can."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete them. Those that are not there are deleted already."""
        ...

    def list(self, folder: str) -> Iterator[StoredObject]:
        """The objects whose names begin with ``folder/``, or all with an empty `folder`, in any order.

        What is written or deleted meanwhile may be in it or not.
        """
        ...

    def close(self) -> None:
        """Give up connections. Calls after it may raise `StorageError`, or connect again."""
        ...


def check_names(names: Iterable[str]) -> None:
    """Raise `InvalidRequestError` for the first that is no name of an object."""
    for name in names:
        if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{shown(name)} cannot name an object; accepted: up to {MAX_NAME_LENGTH} letters, digits, '.', '_', "
                "'-' and '/', no part empty or beginning with '.'"
            )
