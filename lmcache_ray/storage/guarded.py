"""A backend around another one: the same methods, each with a deadline, none asked while the store is out of order."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import Final

from typing_extensions import Buffer

from lmcache_ray.errors import ClosedError, StorageUnavailableError
from lmcache_ray.storage.base import StorageBackend, StoredObject
from lmcache_ray.storage.breaker import CircuitBreaker
from lmcache_ray.storage.guard import Guard, GuardCounts

_PROBED_NAME: Final = "lmcache_ray-probe"  # whether it exists does not matter, only that an answer comes
_LISTED_AT_ONCE: Final = 1000
_PATIENCE_WITH_LISTINGS: Final = 10  # a store may have to look at all its objects before it names the first


class GuardedBackend:
    """A `StorageBackend`. Every call returns within `timeout_s`; a step of a listing may take ten times as long.

    `place` names the store in messages. At most `max_threads` calls run at a time, and as many may be stuck in a store
    that never answers; then all further ones are refused at once. Something must call `probe` now and then: only it
    ends an outage.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        timeout_s: float,
        clock: Callable[[], float],
        place: str = "the remote store",
        breaker: CircuitBreaker | None = None,
        max_threads: int = 8,
    ) -> None:
        self._backend = backend
        self._timeout_s = timeout_s
        self._clock = clock
        breaker = breaker or CircuitBreaker()
        self._guard = Guard(place, timeout_s=timeout_s, clock=clock, breaker=breaker, max_threads=max_threads)
        self._until: float | None = None

    def within(self, timeout_s: float) -> "GuardedBackend":
        """The same backend under the same guard, whose calls must all have ended `timeout_s` from now.

        A caller that leaves early does not speak against the store: such a call is judged when it ends by itself.
        """
        view = copy(self)
        view._until = self._clock() + timeout_s
        return view

    @property
    def problem(self) -> str | None:
        """Why the store is not asked, and since when; None while it is."""
        return self._guard.problem

    @property
    def counts(self) -> GuardCounts:
        """What became of the calls so far, those of all views together."""
        return self._guard.counts

    def probe(self) -> bool:
        """Whether the store is in order, asked by one cheap call if it was not and it is time to try again.

        For a background thread, about once a second: a store that comes back is used again by this alone.
        """
        return self._guard.probe(lambda: self._backend.exist([_PROBED_NAME]))

    @property
    def evicts_itself(self) -> bool:
        """As `StorageBackend`."""
        return self._guard.call(lambda: self._backend.evicts_itself, until=self._until)

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        """As `StorageBackend`. After an error the object may appear later all the same.

        The bytes of `parts` must stay as they are for ever: a call that was given up may still be reading them.
        """
        self._guard.call(lambda: self._backend.put(name, parts), until=self._until)

    def get(self, name: str) -> Buffer | None:
        """As `StorageBackend`."""
        return self._guard.call(lambda: self._backend.get(name), until=self._until)

    def get_many(self, names: Sequence[str]) -> list[Buffer | None]:
        """As `StorageBackend`."""
        return self._guard.call(lambda: self._backend.get_many(names), until=self._until)

    def exist(self, names: Sequence[str]) -> list[bool]:
        """As `StorageBackend`."""
        return self._guard.call(lambda: self._backend.exist(names), until=self._until)

    def delete(self, names: Sequence[str]) -> None:
        """As `StorageBackend`."""
        self._guard.call(lambda: self._backend.delete(names), until=self._until)

    def list(self, folder: str) -> Iterator[StoredObject]:
        """As `StorageBackend`, some objects a call."""
        patience_s = _PATIENCE_WITH_LISTINGS * self._timeout_s
        objects = self._guard.call(lambda: self._backend.list(folder), timeout_s=patience_s, until=self._until)
        while some := self._guard.call(
            lambda: tuple(islice(objects, _LISTED_AT_ONCE)), timeout_s=patience_s, until=self._until
        ):
            yield from some

    def close(self) -> None:
        """Close the backend, unless it does not answer, and end the threads."""
        try:
            self._guard.call(self._backend.close)
        except (StorageUnavailableError, ClosedError):
            pass  # its connections end with the process
        self._guard.close()
