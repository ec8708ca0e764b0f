"""The file by which a client of the cluster shows that it lives, and which slots of arenas it looks at and writes.

A client that owns no arena still leases chunks and writes slots. Its death has to be *proven* before a slot that it
was writing is given to another; a lock that the kernel drops with the process is such a proof on the client's node.

Leases of views end with their client, not by time, so a coordinator that has lost its memory must learn of them from
somebody else. The file has a table for that: one 8-byte word for each slot, the generation that views show there, or 0.
Words are stored whole, so a reader never sees half of one. `hold` comes before a view is handed out, and is followed by
a look at the arenas' floor: a coordinator that begins raises the floor first and reads the tables then, so either it
finds the word, or the client finds the floor risen and hands nothing out.

A second table says in the same way what the client may be writing itself. It is noted before `begin_write`, which looks
at the floor; so whoever has raised the floor, and finds nothing noted, knows that the client writes nothing below it,
now or later, and that a slot that is WRITING all the same was left by somebody dead.
"""

import json
import mmap
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np

from lmcache_ray.arena.lock import OWNER_PATIENCE_S, FileLock, is_locked, lock_existing
from lmcache_ray.arena.names import cluster_digest, liveness_path, parse_file_name
from lmcache_ray.errors import ArenaError, ArenaLockedError, CapacityError

_TABLE_OFFSET: Final = 4096
_WORD_NBYTES: Final = 8

Held = tuple[int, int]
"""A slot and its generation."""


@dataclass(frozen=True, slots=True)
class LivingClient:
    """What the file of a client that lives says: whose it is, what its views show, and what it may be writing."""

    client_id: str
    path: Path
    held: tuple[Held, ...]
    writing: tuple[Held, ...]


class LivenessFile:
    """A file that is locked from `create` until `close` or the end of this process. Thread-safe."""

    def __init__(self, lock: FileLock, num_slots: int) -> None:
        """Use `create`."""
        self._lock = lock
        self._num_slots = num_slots
        self._changing = threading.Lock()  # guards what follows
        self._table: memoryview | None = None
        self._counts: Counter[Held] = Counter()
        self._let_go: deque[Sequence[Held]] = deque()  # appended to by finalizers, which must not wait for the lock

    @classmethod
    def create(
        cls, directory: str | Path, namespace: str, name: str, client_id: str, *, num_slots: int = 0
    ) -> "LivenessFile":
        """Make and lock the file of `client_id`; a dead one of the same id is taken over. Arenas have `num_slots`.

        :raises ArenaLockedError: a living process has that client id.
        :raises ArenaError: the directory cannot be used.
        """
        path = liveness_path(directory, namespace, name, client_id)
        try:
            lock = lock_existing(path, create=True, patience_s=OWNER_PATIENCE_S)
            if lock is None:
                raise ArenaLockedError(f"client {client_id!r} of cluster {name!r} is already alive: {path} is locked")
            about = json.dumps({"client": client_id, "cluster": name, "pid": os.getpid()})
            os.ftruncate(lock.fd, 0)
            os.pwrite(lock.fd, about.encode() + b"\n", 0)
        except ArenaError:
            raise
        except OSError as error:
            raise ArenaError(f"cannot make liveness file {path}: {error}") from error
        return cls(lock, num_slots)

    @staticmethod
    def is_alive(path: str | Path) -> bool:
        """True while the client that made `path` lives; False when it died or closed, also if the file is gone.

        :raises ArenaError: the file cannot be looked at, so nothing is proven.
        """
        try:
            return is_locked(Path(path))
        except OSError as error:
            raise ArenaError(f"cannot look at liveness file {path}: {error}") from error

    @property
    def path(self) -> Path:
        """Where others look for it."""
        return self._lock.path

    def hold(self, held: Sequence[Held]) -> None:
        """Views are about to show these; each `hold` is ended by one `let_go`.

        :raises CapacityError: there is no room for the table; nothing is held.
        """
        with self._changing:
            table = self._opened_table()
            self._take_let_go(table)
            for slot, generation in held:
                self._counts[slot, generation] += 1
                table[slot] = generation

    def let_go(self, held: Sequence[Held]) -> None:
        """No view shows these any more. Waits for nobody: it takes effect with the next `hold` or `tidy`."""
        self._let_go.append(held)

    @contextmanager
    def writing(self, slots: Sequence[Held]) -> Iterator[None]:
        """Around writing into these slots of any arena; no other call of this process writes them meanwhile.

        :raises CapacityError: there is no room for the table; then nothing may be written.
        """
        with self._changing:
            table = self._opened_table()
            for slot, generation in slots:
                table[self._num_slots + slot] = generation
        try:
            yield
        finally:
            for slot, _ in slots:
                table[self._num_slots + slot] = 0

    def tidy(self) -> None:
        """Let take effect what was let go."""
        if self._let_go:
            with self._changing:
                self._take_let_go(self._opened_table())

    def close(self) -> None:
        """Remove the file. Idempotent; in a process forked from the client's it does nothing."""
        self._lock.unlink()
        self._lock.release()

    def __enter__(self) -> "LivenessFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_let_go(self, table: memoryview) -> None:
        while self._let_go:
            for slot, generation in self._let_go.popleft():
                self._counts[slot, generation] -= 1
                if self._counts[slot, generation] == 0:
                    del self._counts[slot, generation]
                    if table[slot] == generation:
                        table[slot] = 0

    def _opened_table(self) -> memoryview:
        if self._table is None:
            nbytes = _TABLE_OFFSET + 2 * self._num_slots * _WORD_NBYTES
            try:
                os.posix_fallocate(self._lock.fd, 0, nbytes)  # a sparse file would kill its user when memory is full
                mapping = mmap.mmap(self._lock.fd, nbytes)
            except OSError as error:
                raise CapacityError(f"liveness file {self.path} cannot have {nbytes} bytes: {error}") from error
            self._table = memoryview(mapping)[_TABLE_OFFSET:].cast("Q")
        return self._table


def living_clients(directory: str | Path, namespace: str, name: str) -> list[LivingClient]:
    """The clients of a cluster that live on this node, and what their views show.

    :raises ArenaError: the directory cannot be read.
    """
    digest = cluster_digest(namespace, name)
    try:
        found = sorted(os.listdir(directory))
    except OSError as error:
        raise ArenaError(f"cannot list arena directory {directory}: {error}") from error
    clients: list[LivingClient] = []
    for file_name in found:
        parsed = parse_file_name(file_name)
        if parsed is None or parsed.cluster != digest or parsed.rank is not None or parsed.is_temporary:
            continue
        path = Path(directory) / file_name
        with suppress(FileNotFoundError):  # it has just ended
            if is_locked(path):
                clients.append(_read(path))
    return clients


def _read(path: Path) -> LivingClient:
    """Believes nothing: a file that says no client has none, but counts as living all the same."""
    content = path.read_bytes()
    try:
        about = json.loads(content[:_TABLE_OFFSET].partition(b"\n")[0])
        client_id = str(about["client"])
    except (ValueError, KeyError, TypeError):
        client_id = ""
    num_slots = max(0, len(content) - _TABLE_OFFSET) // (2 * _WORD_NBYTES)
    tables = np.frombuffer(content, np.uint64, 2 * num_slots, _TABLE_OFFSET if num_slots else 0)
    return LivingClient(client_id, path, _noted(tables[:num_slots]), _noted(tables[num_slots:]))


def _noted(table: np.ndarray) -> tuple[Held, ...]:
    return tuple((int(slot), int(table[slot])) for slot in np.flatnonzero(table))
