"""The processes that use a cluster, as its coordinator knows them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lmcache_ray.errors import UnknownClientError

from .messages import ClientHello


class Clients:
    """Thread-safe. ``forget(client_id)`` gives back what a client had; a client is either known or forgotten, so what
    is done under `while_known` is forgotten with it.
    """

    def __init__(self, forget: Callable[[str], None]) -> None:
        self._forget = forget
        self._lock = threading.RLock()
        self._known: dict[str, ClientHello] = {}

    def __len__(self) -> int:
        return len(self._known)

    def enter(self, hello: ClientHello) -> None:
        """A process begins to use the cluster."""
        with self._lock:
            self._known[hello.client_id] = hello

    def leave(self, client_id: str) -> None:
        """It has ended, by its own word or proven dead. Idempotent."""
        with self._lock:
            self._known.pop(client_id, None)
            self._forget(client_id)

    def all(self) -> list[ClientHello]:
        """The clients known now."""
        with self._lock:
            return list(self._known.values())

    @contextmanager
    def while_known(self, client_id: str) -> Iterator[ClientHello]:
        """The client, not forgotten within the block. Raises `UnknownClientError` if it is not known."""
        with self._lock:
            hello = self._known.get(client_id)
            if hello is None:
                raise UnknownClientError(f"client {client_id!r} is not registered with this coordinator")
            yield hello
