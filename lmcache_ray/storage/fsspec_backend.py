"""Objects as files or bucket objects, through fsspec (the extra ``fsspec``; ``s3`` and ``gcs`` for those buckets).

fsspec has no deadlines, and its filesystems raise what they like: what is an `OSError` is translated here, all else
by the guard (`guard.py`).
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, Final
from uuid import uuid4

import fsspec
from fsspec.spec import AbstractFileSystem
from typing_extensions import Buffer

from lmcache_ray.errors import ConfigError, StorageError, StorageUnavailableError
from lmcache_ray.storage.base import StoredObject, check_names
from lmcache_ray.tiers.spec import masked

# Stores in which an object appears when its upload is complete. In all others it is written aside, then moved.
_BUCKETS: Final = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "tos"))
_PUTS_WHOLE: Final = _BUCKETS | {"memory"}
_LOCAL: Final = frozenset(("file", "local"))
_EXTRAS: Final = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}

_ASIDE: Final = ".parts"  # the folder of what is being written; no name of an object begins with a dot
_ABANDONED_S: Final = 3600.0  # the age at which such a file's writer is certainly gone
_MOVES: Final = 20  # tries, since others may remove a folder that is empty just before a file is moved there

_MODIFIED_KEYS: Final = ("mtime", "LastModified", "last_modified", "updated", "created")
_REFUSALS: Final = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError)
_REFUSAL_CODES: Final = frozenset((errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG))


class FsspecBackend:
    """A `StorageBackend` below the folder `root` of a filesystem, which `place` names in messages.

    `puts_whole` says that the filesystem itself never shows half an object; else objects are moved into place by
    `move`. `clock` is the time of day.
    """

    evicts_itself = False

    def __init__(
        self,
        filesystem: AbstractFileSystem,
        root: str,
        *,
        place: str,
        puts_whole: bool,
        move: Callable[[str, str], object] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._place = place
        self._puts_whole = puts_whole
        self._move = move or filesystem.mv
        self._clock = clock
        self._is_swept = False

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """As `StorageBackend`."""
        check_names([name])
        with self._translated(f"put {name}"):
            if self._puts_whole:
                self._filesystem.pipe_file(self._path(name), b"".join(parts))
            else:
                self._sweep_once()
                self._put_aside_and_move(name, parts)

    def get(self, name: str) -> Buffer | None:
        """As `StorageBackend`."""
        return self.get_many([name])[0]

    def get_many(self, names: Sequence[str]) -> list[Buffer | None]:
        """As `StorageBackend`; asynchronous filesystems get them at the same time."""
        check_names(names)
        with self._translated("get objects"):
            paths = [self._path(name) for name in names]
            answers = self._filesystem.cat_ranges(paths, None, None, on_error="return")
            return [_unless_absent(answer) for answer in answers]

    def exist(self, names: Sequence[str]) -> list[bool]:
        """As `StorageBackend`, one after the other."""
        check_names(names)
        with self._translated("say what exists"):
            return [self._is_file(self._path(name)) for name in names]

    def delete(self, names: Sequence[str]) -> None:
        """As `StorageBackend`, one after the other; folders that are left empty go too."""
        check_names(names)
        with self._translated("delete objects"):
            for name in names:
                try:
                    self._filesystem.rm_file(self._path(name))
                except FileNotFoundError:
                    pass
        if not self._puts_whole:
            self._remove_empty_folders({name.rpartition("/")[0] for name in names})

    def list(self, folder: str) -> Iterator[StoredObject]:
        """As `StorageBackend`."""
        if folder:
            check_names([folder])
        with self._translated("list objects"):
            for info in self._files_below(self._path(folder) if folder else self._root):
                name = info["name"][len(self._root) :].lstrip("/")
                if not name.startswith(f"{_ASIDE}/"):
                    yield StoredObject(name, int(info.get("size") or 0), self._modified_s(info))

    def close(self) -> None:
        """Nothing: fsspec shares its connections with the rest of the process."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _is_file(self, path: str) -> bool:
        try:
            return bool(self._filesystem.info(path)["type"] == "file")  # `exists` would call every error a no
        except FileNotFoundError:
            return False

    def _put_aside_and_move(self, name: str, parts: Sequence[Buffer]) -> None:
        filesystem, path = self._filesystem, self._path(name)
        aside = self._path(f"{_ASIDE}/{uuid4().hex}")
        filesystem.makedirs(self._path(_ASIDE), exist_ok=True)
        is_moved = False
        try:
            with filesystem.open(aside, "wb") as file:
                for part in parts:
                    file.write(memoryview(part).cast("B"))
            self._move_to(aside, path)
            is_moved = True
        finally:
            if not is_moved:
                self._remove_quietly(aside)

    def _move_to(self, aside: str, path: str) -> None:
        for tries_left in reversed(range(_MOVES)):
            try:
                self._filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._move(aside, path)
                return
            except (FileNotFoundError, FileExistsError):  # the folder has just been removed, or was just being made
                if not tries_left:
                    raise

    def _remove_quietly(self, path: str) -> None:
        try:
            self._filesystem.rm_file(path)
        except OSError:
            pass  # what went wrong before is told; this file is swept later

    def _sweep_once(self) -> None:
        """Remove what writers that died left half written."""
        if self._is_swept:
            return
        self._is_swept = True
        for info in self._files_below(self._path(_ASIDE)):
            if self._modified_s(info) < self._clock() - _ABANDONED_S:
                self._remove_quietly(info["name"])

    def _remove_empty_folders(self, folders: Iterable[str]) -> None:
        for folder in folders:
            while folder:
                try:
                    self._filesystem.rmdir(self._path(folder))
                except OSError:
                    break  # not empty, or gone
                folder = folder.rpartition("/")[0]

    def _files_below(self, path: str) -> Iterator[Mapping[str, Any]]:
        """What the filesystem says of each file; nothing if there is no such folder."""
        if self._filesystem.async_impl:
            yield from self._filesystem.find(path, detail=True).values()
            return
        for _, _, files in self._filesystem.walk(path, detail=True, on_error=_raise_unless_absent):
            yield from (info for info in files.values() if info["type"] == "file")

    def _modified_s(self, info: Mapping[str, Any]) -> float:
        for key in _MODIFIED_KEYS:
            modified = _seconds(info.get(key))
            if modified is not None:
                return modified
        return self._clock()

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, NotImplementedError) as error:
            reason = f"{self._place} could not {what}: {error or type(error).__name__}"
            refuses = isinstance(error, (*_REFUSALS, NotImplementedError)) or error.errno in _REFUSAL_CODES
            raise (StorageError if refuses else StorageUnavailableError)(reason) from error


def is_known(scheme: str) -> bool:
    """Whether fsspec has heard of it; its package may be missing all the same."""
    return scheme in fsspec.available_protocols() or scheme in fsspec.registry


def open_fsspec(url: str, timeout_s: float) -> FsspecBackend:
    """The backend of a URL that fsspec reads. Raises `ConfigError` for one that it cannot; `timeout_s` is not used."""
    scheme, _, path = url.partition("://")
    scheme, place = scheme.lower(), masked(url)
    if scheme in _LOCAL and not path.startswith("/"):
        raise ConfigError(f"remote_url {place!r} is not an absolute path; accepted: file:///path/of/a/folder")
    try:
        # Listings that fsspec remembers would not show what other clusters have written since.
        filesystem, root = fsspec.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        remedy = f": pip install 'lmcache-ray[{extra}]'" if extra else ""
        raise ConfigError(f"remote_url {place!r} needs a package that is missing{remedy} ({error})") from error
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"remote_url {place!r} cannot be read: {error}") from error
    if scheme in _BUCKETS and not root.strip("/"):
        raise ConfigError(f"remote_url {place!r} names no bucket")
    move = os.replace if scheme in _LOCAL else None
    return FsspecBackend(filesystem, root, place=place, puts_whole=scheme in _PUTS_WHOLE, move=move)


def _unless_absent(answer: Buffer | BaseException) -> Buffer | None:
    if isinstance(answer, FileNotFoundError):
        return None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _seconds(moment: object) -> float | None:
    """Seconds since 1970 from the forms in which filesystems tell a time; None for all others."""
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment.replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(moment, datetime):
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return moment.timestamp()
    return float(moment) if isinstance(moment, int | float) else None
