"""Ray itself: joining the one that is there, or starting a local one that ends with this process.

A local Ray can consist of several simulated nodes: real raylets on one machine, each with its own object store.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Final

import ray

from lmcache_ray.errors import ClusterError

_OBJECT_STORE_NBYTES: Final = 256 * 2**20
_CONNECT_TIMEOUT_S: Final = 10.0
_NODE_CPUS: Final = 4  # more than this project asks for: its actors reserve memory, not cores


@dataclass(slots=True)
class RaySession:
    """This process's tie to Ray. `close` ends what `open_*` started, and nothing else."""

    owns_ray: bool
    simulated: object | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        """Where other processes find this Ray, as RAY_ADDRESS."""
        return str(ray.get_runtime_context().gcs_address)

    def close(self) -> None:
        """Shut Ray down if this session started it. Idempotent."""
        if self.owns_ray and ray.is_initialized():
            ray.shutdown()
        if self.simulated is not None:
            self.simulated.shutdown()  # type: ignore[attr-defined]  # ray's test cluster has no types
        self.owns_ray, self.simulated = False, None


def open_session(namespace: str, *, num_nodes: int = 1) -> RaySession:
    """Use the Ray this process is connected to, else the one that RAY_ADDRESS names, else start a local one.

    More than one node is simulated, and only in a local Ray. Raises `ClusterError` if that cannot be.
    """
    if ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
        session = join_session(namespace)
        try:
            _check_has_nodes(num_nodes)
        except BaseException:
            session.close()
            raise
        return session
    if num_nodes == 1:
        _be_quiet()
        with _own_sigterm():
            ray.init(
                address="local",
                namespace=namespace,
                include_dashboard=False,
                num_cpus=_NODE_CPUS,
                object_store_memory=_OBJECT_STORE_NBYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        return RaySession(owns_ray=True)
    return _simulate(namespace, num_nodes)


def join_session(namespace: str) -> RaySession:
    """Connect to a Ray that is already running on this machine or that RAY_ADDRESS names.

    Raises `ClusterError` if there is none.
    """
    if ray.is_initialized():
        return RaySession(owns_ray=False)
    _connect(namespace, os.environ.get("RAY_ADDRESS") or "auto")
    return RaySession(owns_ray=True)


def alive_node_ids() -> list[str]:
    """Ids of the nodes that live now; this process's own node first, the others in a fixed order."""
    own = ray.get_runtime_context().get_node_id()
    others = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own)
    return [own, *others]


def _check_has_nodes(num_nodes: int) -> None:
    if num_nodes > 1 and len(alive_node_ids()) < num_nodes:
        raise ClusterError(
            f"{num_nodes} nodes were asked for; the Ray that this process is connected to has {len(alive_node_ids())}"
        )


def _simulate(namespace: str, num_nodes: int) -> RaySession:
    from ray.cluster_utils import Cluster

    _be_quiet()
    sizes = {"num_cpus": _NODE_CPUS, "object_store_memory": _OBJECT_STORE_NBYTES}
    simulated = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    session = RaySession(owns_ray=True, simulated=simulated)
    try:
        for _ in range(num_nodes - 1):
            simulated.add_node(num_cpus=_NODE_CPUS, object_store_memory=_OBJECT_STORE_NBYTES)
        _connect(namespace, simulated.address)
        simulated.wait_for_nodes()
    except BaseException:
        session.close()
        raise
    return session


def _connect(namespace: str, address: str) -> None:
    _be_quiet()
    try:
        _check_answers(address)
        with _own_sigterm():
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        raise ClusterError(
            f"no running Ray answers at {address!r}: start one with `ray start --head`, or set RAY_ADDRESS to one; if "
            "it asks for a token, set RAY_AUTH_MODE=token too"
        ) from error


def _check_answers(address: str) -> None:
    """Raises `OSError` if nobody listens at "host:port", where Ray would try for 13 minutes."""
    host, separator, port = address.rpartition(":")
    if separator and "/" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _be_quiet() -> None:
    """No usage statistics unless the user asked for them: Ray reads this when it starts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Within it Ray is initialised; after it SIGTERM means what it did before, or an end in order if it had no handler.

    The handlers that Ray installs abort a process 3 s after the signal, in the middle of its cleaning up.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, _exit_in_order if before in (signal.SIG_DFL, None) else before)


def _exit_in_order(number: int, frame: FrameType | None) -> None:
    """End by SystemExit: every `with` is left, every atexit function runs."""
    sys.exit(128 + number)
