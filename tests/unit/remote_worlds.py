"""In-process worlds with a remote tier, and the store of a user who has written his own.

A `RemoteWorld` may have a disk as well, and is then a `DiskWorld` in every respect. `shared` makes a prompt one that
lies in the remote store alone.
"""

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final

import pytest
from typing_extensions import Buffer

from lmcache_ray.storage.backends import ENTRY_POINT_GROUP
from lmcache_ray.storage.base import StoredObject, check_names
from lmcache_ray.tiers.hits import TierHits
from lmcache_ray.tiers.remote_tier import RemoteTier
from lmcache_ray.tiers.traffic import TierTraffic
from tests.unit.disk_worlds import MIB, NUM_ROWS, WORLDS, DiskWorld, Prompt, spec_of
from tests.unit.engine_builders import make_world

QUICK_S: Final = 0.2
"""What a call to a store may take where it is to fail."""

_PATIENCE_S: Final = 20.0


@dataclass(frozen=True)
class RemoteWorld(DiskWorld):
    """A world with a remote tier; `root` is where its disk would be."""

    @property
    def remote(self) -> RemoteTier:
        """The remote tier."""
        assert self.tiers.remote is not None
        return self.tiers.remote

    @property
    def remote_traffic(self) -> TierTraffic:
        """What has moved to and from the store so far, as a copy."""
        return copy.copy(self.remote.traffic)

    def flush(self) -> None:
        """Wait until nothing waits for a tier below."""
        assert self.service.wait_until(lambda index: index.num_behind() == 0, _PATIENCE_S)

    def drop_local(self) -> None:
        """Forget all that is in memory and on disk."""
        assert self.world.engines[0].clear(locations=["cpu", "disk"]).num_kept == 0

    def shared(self, prompt: Prompt) -> Prompt:
        """Store it so that it lies in the remote store alone."""
        num_tokens = len(prompt.tokens)
        assert self.store(prompt) == num_tokens
        self.flush()
        self.drop_local()
        assert self.locate(prompt) == TierHits(num_tokens, 0, 0, num_tokens)
        return prompt

    def lookup(self, prompt: Prompt, *tiers: str) -> int:
        """What a lookup says, in all tiers or in these."""
        return self.world.engines[0].lookup(prompt.tokens, search_range=tiers or None)

    def index_is_empty(self) -> bool:
        """Whether no chunk is in memory."""
        with self.service.at_now() as (index, _):
            counts = index.memory.counts()
            return counts.free == counts.capacity

    def is_idle(self) -> bool:
        """Whether nothing is on its way up or down, and nothing is leased."""
        with self.service.at_now() as (index, _):
            return not index.coming_up and not index.num_behind() and index.memory.counts().leases == 0

    def check_idle(self) -> None:
        """Nothing is leased or unfinished, in any tier, when what was begun has come to its end."""
        wait_until(self.is_idle)
        self.world.check_idle()
        with self.service.at_now() as (index, _):
            index.check_integrity()


@contextmanager
def remote_world(
    directory: Path,
    url: str,
    kind: str = "1 rank",
    num_groups: int = 1,
    *,
    with_disk: bool = False,
    world_size: int | None = None,
    model: str = "m",
    spec: str | None = None,
    **config: object,
) -> Iterator[RemoteWorld]:
    """A world of `WORLDS` on the store at `url`; its disk, if it has one, is ``directory / "disk"``."""
    usual_size, use_mla = WORLDS[kind]
    root = directory / "disk"
    disk = {"local_disk": str(root), "max_local_disk_size": 4 * MIB} if with_disk else {}
    with make_world(
        directory,
        world_size or usual_size,
        use_mla=use_mla,
        spec=spec or spec_of(num_groups, use_mla=use_mla),
        num_rows=NUM_ROWS,
        model=model,
        **{"remote_url": url, **disk, **config},  # type: ignore[arg-type]
    ) as world:
        yield RemoteWorld(world, root)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Look again and again; fails when it has taken too long."""
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


class UsersStore:
    """A `StorageBackend` of somebody else's, over a dictionary.

    Calls wait while `gate` is closed, and meet `mishap` before they do anything.
    """

    evicts_itself = False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.written_s: dict[str, float] = {}
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.mishap: Callable[[str], None] = lambda call: None

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self._meet("put", name)
        self.objects[name] = b"".join(parts)
        self.written_s[name] = time.time()

    def get(self, name: str) -> Buffer | None:
        self._meet("get", name)
        return self.objects.get(name)

    def get_many(self, names: Sequence[str]) -> list[Buffer | None]:
        self._meet("get_many", *names)
        return [self.objects.get(name) for name in names]

    def exist(self, names: Sequence[str]) -> list[bool]:
        self._meet("exist", *names)
        return [name in self.objects for name in names]

    def delete(self, names: Sequence[str]) -> None:
        self._meet("delete", *names)
        for name in names:
            self.objects.pop(name, None)

    def list(self, folder: str) -> Iterator[StoredObject]:
        self._meet("list")
        named = [name for name in list(self.objects) if not folder or name.startswith(f"{folder}/")]
        return iter([StoredObject(name, len(self.objects[name]), self.written_s[name]) for name in named])

    def close(self) -> None:
        self._meet("close")

    def num_calls(self, kind: str) -> int:
        """How often one method was called."""
        return self.calls.count(kind)

    def _meet(self, call: str, *names: str) -> None:
        check_names(names)
        self.calls.append(call)
        self.gate.wait()
        self.mishap(call)


_STORES: Final[dict[str, UsersStore]] = {}


def open_users_store(url: str, timeout_s: float) -> UsersStore:
    """What the entry point names: two engines with one URL share a store, as they would share a server."""
    return _STORES.setdefault(url, UsersStore())


@pytest.fixture
def users_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL whose scheme an installed package has added; `users_store` is what it leads to."""
    metadata = tmp_path / "site" / "a_users_store-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: a-users-store\nVersion: 1.0\n")
    point = EntryPoint("mystore", f"{__name__}:open_users_store", ENTRY_POINT_GROUP)
    (metadata / "entry_points.txt").write_text(f"[{point.group}]\n{point.name} = {point.value}\n")
    monkeypatch.syspath_prepend(str(metadata.parent))
    url = f"mystore://me:se-cret@somewhere/{tmp_path.name}"
    yield url
    users_store(url).gate.set()
    del _STORES[url]


def users_store(url: str) -> UsersStore:
    """The store that an engine with this URL uses, or will use."""
    return open_users_store(url, 0.0)
