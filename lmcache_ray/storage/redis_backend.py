"""Objects as strings of a Redis or Valkey server, through redis-py (the extra ``redis``).

A name is a key, as it is. Nothing is retried here: a call ends with the answer or with the first error, and whether
the server is asked again is decided above, by the guard.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from typing_extensions import Buffer

from lmcache_ray.errors import ConfigError, StorageError, StorageUnavailableError
from lmcache_ray.storage.base import StoredObject, check_names
from lmcache_ray.tiers.spec import masked

_NAMES_AT_ONCE: Final = 1000  # of one command, so that the server's other clients are not kept waiting
_DROPS_ANY_KEY: Final = "allkeys-"  # the eviction policies that drop keys without a time to live, as ours


class RedisBackend:
    """A `StorageBackend`. `place` names the server in messages; `clock` is the time of day."""

    def __init__(self, client: redis.Redis, *, place: str, clock: Callable[[], float] = time.time) -> None:
        self._client = client
        self._place = place
        self._clock = clock

    @property
    def evicts_itself(self) -> bool:
        """Whether the server has a memory limit and a policy that drops any key."""
        with self._translated("tell its memory limit"):
            memory = self._client.info("memory")
        return memory.get("maxmemory", 0) > 0 and str(memory.get("maxmemory_policy")).startswith(_DROPS_ANY_KEY)

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """As `StorageBackend`. Servers take at most 512 MiB, if they are not configured otherwise."""
        check_names([name])
        with self._translated(f"take {name}"):
            self._client.set(name, b"".join(parts))

    def get(self, name: str) -> Buffer | None:
        """As `StorageBackend`."""
        return self.get_many([name])[0]

    def get_many(self, names: Sequence[str]) -> list[Buffer | None]:
        """As `StorageBackend`, in one command."""
        check_names(names)
        if not names:
            return []
        with self._translated(f"give {names[0]}"):
            return cast("list[Buffer | None]", self._client.mget(names))  # text only if the client were to decode

    def exist(self, names: Sequence[str]) -> list[bool]:
        """As `StorageBackend`, in one round trip."""
        check_names(names)
        with self._translated("say what exists"), self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.exists(name)
            return [bool(answer) for answer in pipeline.execute()]

    def delete(self, names: Sequence[str]) -> None:
        """As `StorageBackend`. The server frees the memory in the background."""
        check_names(names)
        left = iter(names)
        while some := list(islice(left, _NAMES_AT_ONCE)):
            with self._translated("delete"):
                self._client.unlink(*some)

    def list(self, folder: str) -> Iterator[StoredObject]:
        """As `StorageBackend`. The server goes through all its keys, whatever the folder."""
        pattern = f"{folder}/*" if folder else "*"
        if folder:
            check_names([folder])  # so there is nothing in it that a pattern would understand
        cursor, seen = 0, set[str]()
        while True:
            with self._translated("list its keys"):
                cursor, keys = self._client.scan(cursor, match=pattern, count=_NAMES_AT_ONCE)
            names = [key if isinstance(key, str) else key.decode(errors="replace") for key in keys]
            new = [name for name in names if name not in seen]  # the server may name a key more than once
            seen.update(new)
            yield from self._described(new)
            if not cursor:
                return

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._client.close()

    def _described(self, names: Sequence[str]) -> Sequence[StoredObject]:
        """Size and age in one round trip, by the two commands that do not count as a use of the key."""
        with self._translated("describe its keys"), self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.memory_usage(name, samples=1)
                pipeline.object("IDLETIME", name)
            answers = pipeline.execute(raise_on_error=False)
        now = self._clock()
        described = []
        for name, nbytes, idle_s in zip(names, answers[::2], answers[1::2], strict=True):
            if isinstance(nbytes, int):  # else it is gone
                used_s = now - idle_s if isinstance(idle_s, int) else now  # some eviction policies keep no ages
                described.append(StoredObject(name, nbytes, used_s))
        return described

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            raise StorageUnavailableError(f"{self._place} did not {what}: {error}") from error
        except redis.RedisError as error:
            raise StorageError(f"{self._place} refused to {what}: {error}") from error


def open_redis(url: str, timeout_s: float) -> RedisBackend:
    """The backend of a ``redis://``, ``rediss://`` or ``unix://`` URL as redis-py reads it. Does not connect.

    `timeout_s` is for making a connection, and for each piece of an answer. Raises `ConfigError` for a URL that
    redis-py cannot read.
    """
    place = masked(url)
    parts = urlsplit(url)
    database = parts.path.strip("/")
    if parts.scheme != "unix" and database and not database.isdecimal():
        raise ConfigError(f"remote_url {place!r}: the path is the number of a database, not {database!r}")
    if parts.scheme == "unix" and not parts.path:
        raise ConfigError(f"remote_url {place!r} names no socket; accepted: unix:///path/of/the/socket")
    try:
        client = redis.Redis.from_url(
            url,
            socket_connect_timeout=timeout_s,
            socket_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        client.connection_pool.make_connection()  # opens nothing, but finds parameters that there are not
        if client.get_encoder().decode_responses:
            raise ValueError("decode_responses would make text of the bytes that are stored")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"remote_url {place!r} cannot be read: {error}") from error
    return RedisBackend(client, place=place)
