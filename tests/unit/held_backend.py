"""A store whose calls can be held, or made to fail, from outside."""

import threading
from collections.abc import Callable, Iterator, Sequence

from typing_extensions import Buffer

from lmcache_ray.storage.base import StorageBackend, StoredObject


class HeldBackend:
    """Passes calls on, but not while `gate` is closed; and each call meets `mishap` first."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self.gate = threading.Event()
        self.gate.set()
        self.mishap: Callable[[], None] = lambda: None
        self.calls: list[str] = []

    @property
    def evicts_itself(self) -> bool:
        self._meet("evicts_itself")
        return self._backend.evicts_itself

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self._meet(f"put {name}")
        self._backend.put(name, parts)

    def get(self, name: str) -> Buffer | None:
        self._meet(f"get {name}")
        return self._backend.get(name)

    def get_many(self, names: Sequence[str]) -> list[Buffer | None]:
        self._meet(f"get_many {len(names)}")
        return self._backend.get_many(names)

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._meet(f"exist {len(names)}")
        return self._backend.exist(names)

    def delete(self, names: Sequence[str]) -> None:
        self._meet(f"delete {len(names)}")
        self._backend.delete(names)

    def list(self, folder: str) -> Iterator[StoredObject]:
        self._meet(f"list {folder}")
        return self._backend.list(folder)

    def close(self) -> None:
        self._meet("close")
        self._backend.close()

    def _meet(self, call: str) -> None:
        self.calls.append(call)
        self.gate.wait()
        self.mishap()
