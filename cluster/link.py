"""One process's tie to a cluster: whom to call, under which name, what the world is, and where its ranks are now.

Registers the process as a client; where it shares a node with a rank, a locked liveness file lets that rank see its
end, so that its leases and half-written slots are given back then.
"""

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import ray

from lmcache_ray.arena.liveness import LivenessFile
from lmcache_ray.errors import ClosedError, ClusterError, LMCacheRayError
from lmcache_ray.index_service import LeaseNames

from .coordinator_client import CoordinatorClient
from .deadline import Deadline
from .introduction import Introduction
from .messages import ClientHello, DirectWrites
from .ray_calls import Actor, Ref, wait_for

_INTRODUCTION_S: Final = 30.0  # the world, which has a deadline of its own, is not known before the first answer
_POLL_S: Final = 0.1
_GOODBYE_S: Final = 5.0
_RELEASE_S: Final = 0.5
_REFRESH_S: Final = 0.5


class ClusterLink:
    """Handles, which stay the same while the link is open, and facts, asked for again once suspect. Thread-safe."""

    def __init__(self, coordinator: Actor) -> None:
        """Raises `ClusterError` or `DeadlineError` if the cluster does not answer, or is never done starting."""
        self.client_id = f"client-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._closed = False
        self._is_suspect = False
        self._numbering = threading.Lock()  # guards the two that follow
        self._next_call = 0
        self._writing: set[int] = set()
        self._abandoned: deque[str] = deque()
        self._releases: deque[Ref] = deque()
        introduction = _introduction(coordinator, self.client_id)
        self.world = introduction.world
        self.workers = introduction.workers
        self.hellos = introduction.hellos
        self.hasher = self.world.hasher()
        self.node_id: str = ray.get_runtime_context().get_node_id()
        self.lease_names = LeaseNames(self.client_id, self.client_id)
        self.liveness = self._make_liveness()
        path = str(self.liveness.path) if self.liveness else None
        hello = ClientHello(self.client_id, self.node_id, os.getpid(), path)
        self._coordinator = CoordinatorClient(
            coordinator,
            self.client_id,
            timeout_s=self.world.call_timeout_s,
            introduce_again=lambda client: client.register(hello),
        )
        self._coordinator.register(hello)

    @property
    def coordinator(self) -> CoordinatorClient:
        """The coordinator. Raises `ClosedError` after `close`."""
        self.check_open()
        if self._is_suspect:
            self._refresh()
        if self._abandoned:
            self._release_abandoned()
        if self.liveness is not None:
            self.liveness.tidy()
        if self._releases:
            self._wait_for_releases()
        return self._coordinator

    def release(self, lease_ids: Sequence[str]) -> None:
        """End leases before anything else that this link asks for, and without waiting for it. Never fails."""
        if self._closed or not ray.is_initialized():
            return  # they have ended with the client
        try:
            self._releases.append(self._coordinator.release_soon(lease_ids))
        except ClusterError:
            self._abandoned.extend(lease_ids)

    def abandon(self, lease_id: str) -> None:
        """Let a lease end with the next call of this link. Makes no call itself, so that a finalizer may say it."""
        self._abandoned.append(lease_id)

    @property
    def num_kv_rows(self) -> int:
        """Rows of the smallest rank's paged KV: what a slot mapping may name."""
        return min(hello.kv_rows for hello in self.hellos)

    def suspect(self) -> None:
        """What is known of the ranks may be out of date: ask again where they are, with the next call."""
        self._is_suspect = True

    def _refresh(self) -> None:
        """While the ranks are not all there, nothing changes, and they are asked about again."""
        try:
            introduction = self._coordinator.introduce(timeout_s=_REFRESH_S)
        except LMCacheRayError:
            return  # the call that comes next says what is wrong
        if introduction is not None:
            self.hellos = introduction.hellos
            self._is_suspect = False

    @contextmanager
    def writing(self) -> Iterator[int]:
        """Around a call that writes into arenas itself: its number. Nothing of it is written after the block."""
        with self._numbering:
            call = self._next_call
            self._next_call += 1
            self._writing.add(call)
        try:
            yield call
        finally:
            with self._numbering:
                self._writing.discard(call)

    def direct_writes(self, call: int) -> DirectWrites:
        """What the coordinator must know to plan for this call."""
        with self._numbering:
            return DirectWrites(call, min(self._writing))

    def deadline(self) -> Deadline:
        """The deadline of a call that begins now."""
        return Deadline(self.world.call_timeout_s)

    def is_here(self, rank: int) -> bool:
        """Whether the rank runs on this process's node. By node id: several nodes may share one file system."""
        return self.hellos[rank].node_id == self.node_id

    def check_open(self) -> None:
        """Raises `ClosedError` after `close`."""
        if self._closed:
            raise ClosedError(f"this connection to cluster {self.world.name!r} is closed")

    def close(self, *, is_idle: bool = True) -> None:
        """Unregister, unless the process may still be writing to arenas (`is_idle` False): then its end will tell.

        Idempotent; a coordinator that is gone needs no goodbye.
        """
        if self._closed:
            return
        self._closed = True
        if not is_idle:
            return
        try:
            self._coordinator.unregister(timeout_s=min(_GOODBYE_S, self.world.call_timeout_s))
        except LMCacheRayError:
            pass
        finally:
            if self.liveness is not None:
                self.liveness.close()

    def _release_abandoned(self) -> None:
        """One message for all."""
        lease_ids = []
        while self._abandoned:
            with suppress(IndexError):  # another thread took the last
                lease_ids.append(self._abandoned.popleft())
        self.release(lease_ids)

    def _wait_for_releases(self) -> None:
        """Calls of an actor may overtake each other; what this client has released must be free when it asks again."""
        deadline = Deadline(min(_RELEASE_S, self.world.lookup_timeout_s))  # no call has less time than a lookup
        for reference in tuple(self._releases):
            try:
                wait_for(reference, timeout_s=deadline.remaining_s(), what="the coordinator (complete)")
            except LMCacheRayError:  # a release that is not answered in time does not stand in the way
                pass
            finally:
                with suppress(ValueError):  # another thread has waited for it as well
                    self._releases.remove(reference)

    def _make_liveness(self) -> LivenessFile | None:
        if not any(self.is_here(rank) for rank in range(len(self.hellos))):
            return None
        return LivenessFile.create(
            self.world.arena_dir,
            self.world.namespace,
            self.world.name,
            self.client_id,
            num_slots=self.world.num_slots,
        )


def _introduction(coordinator: Actor, client_id: str) -> Introduction:
    """Who serves; a cluster that another process is just starting is waited for."""
    deadline = Deadline(_INTRODUCTION_S)
    client = CoordinatorClient(coordinator, client_id, timeout_s=_INTRODUCTION_S)
    while True:
        introduction = client.introduce()
        if introduction is not None:
            return introduction
        if deadline.remaining_s() == 0:
            raise ClusterError(f"the cluster is still being started after {_INTRODUCTION_S:g} s")
        time.sleep(_POLL_S)
