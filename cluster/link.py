"""One process's tie to a cluster: whom to call, under which name, and what the world is.

Registers the process as a client; where it shares a node with a rank, a locked liveness file lets that rank see its
end, so that its leases and half-written slots are given back then.
"""

import itertools
import os
import uuid
from collections.abc import Sequence
from typing import Any, Final

import ray

from lmcache_ray.arena.liveness import LivenessFile
from lmcache_ray.errors import ClosedError, LMCacheRayError

from .deadline import Deadline
from .messages import ClientHello, RankHello
from .ray_calls import Actor, wait_for
from .world import WorldSpec

_FIRST_S: Final = 30.0  # the world, which has a deadline of its own, is not known before the first answer


class ClusterLink:
    """Handles and facts that do not change while the link is open. Thread-safe."""

    def __init__(self, coordinator: Actor) -> None:
        self.coordinator = coordinator
        self.client_id = f"client-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._closed = False
        self._numbers = itertools.count()
        self.world: WorldSpec = self._first("world")
        self.workers: list[Actor] = self._first("workers")
        self.hellos: list[RankHello] = self._first("hellos")
        self.hasher = self.world.hasher()
        self.node_id: str = ray.get_runtime_context().get_node_id()
        self._liveness = self._make_liveness()
        hello = ClientHello(
            self.client_id, self.node_id, os.getpid(), str(self._liveness.path) if self._liveness else None
        )
        self.ask("register_client", hello)

    @property
    def num_kv_rows(self) -> int:
        """Rows of the smallest rank's paged KV: what a slot mapping may name."""
        return min(hello.kv_rows for hello in self.hellos)

    def ask(self, method: str, *arguments: object, timeout_s: float | None = None) -> object:
        """Call the coordinator and wait. Raises `DeadlineError`, `ClusterError`, or what the call raised."""
        self.check_open()
        timeout_s = self.world.call_timeout_s if timeout_s is None else timeout_s
        reference = getattr(self.coordinator, method).remote(*arguments)
        return wait_for(reference, timeout_s=timeout_s, what=f"the coordinator of cluster {self.world.name!r}")

    def deadline(self) -> Deadline:
        """The deadline of a call that begins now."""
        return Deadline(self.world.call_timeout_s)

    def lease_id(self) -> str:
        """A lease id that nobody else uses."""
        return f"load/{self.client_id}/{next(self._numbers)}"

    def ranks_here(self) -> Sequence[int]:
        """Ranks on this process's node."""
        return [hello.worker_id for hello in self.hellos if hello.node_id == self.node_id]

    def check_open(self) -> None:
        """Raises `ClosedError` after `close`."""
        if self._closed:
            raise ClosedError(f"this connection to cluster {self.world.name!r} is closed")

    def close(self) -> None:
        """Unregister. Idempotent; a coordinator that is gone needs no goodbye."""
        if self._closed:
            return
        try:
            self.ask("unregister_client", self.client_id, timeout_s=min(5.0, self.world.call_timeout_s))
        except LMCacheRayError:
            pass
        finally:
            self._closed = True
            if self._liveness is not None:
                self._liveness.close()

    def _first(self, method: str) -> "Any":  # the coordinator's answer, of the type its method says
        return wait_for(getattr(self.coordinator, method).remote(), timeout_s=_FIRST_S, what="the coordinator")

    def _make_liveness(self) -> LivenessFile | None:
        if not self.ranks_here():
            return None
        return LivenessFile.create(self.world.arena_dir, self.world.namespace, self.world.name, self.client_id)
