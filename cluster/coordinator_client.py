"""The coordinator as its callers see it: one typed method per call, each with a deadline."""

from collections.abc import Sequence
from typing import Any

from lmcache_ray.broadcast.tags import Tag, TakeResult
from lmcache_ray.errors import DeadlineError
from lmcache_ray.index_service import ClearCounts

from .introduction import Introduction
from .messages import (
    ClientHello,
    LoadItem,
    LookupItem,
    Parcel,
    PlannedLoad,
    PlannedStore,
    StoreDone,
    StoreItem,
)
from .packed_calls import pack_call, unpack
from .ray_calls import Actor, Ref, calling, wait_for
from .world import ClusterStatus


class CoordinatorClient:
    """Calls of one `client` to a coordinator. Thread-safe.

    Every method raises `DeadlineError` after `timeout_s` (its own or the client's), `ClusterError` if the coordinator
    cannot be reached, or what the call itself raised.
    """

    def __init__(self, actor: Actor, client: str, *, timeout_s: float) -> None:
        self.actor = actor
        self._client = client
        self._timeout_s = timeout_s

    # -- membership -----------------------------------------------------------------------------------------------

    def introduce(self) -> Introduction | None:
        """What the world is and who serves it; None while it is being started."""
        answer: Introduction | None = self._ask("introduce")
        return answer

    def register(self, hello: ClientHello) -> None:
        """Begin to use the cluster."""
        self._ask("register_client", hello)

    def unregister(self, *, timeout_s: float) -> None:
        """Use it no more: leases end."""
        self._ask("unregister_client", self._client, timeout_s=timeout_s)

    def status(self) -> ClusterStatus:
        """How the cluster stands."""
        answer: ClusterStatus = self._ask("status")
        return answer

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the index contradicts itself."""
        self._ask("check_integrity")

    # -- index ----------------------------------------------------------------------------------------------------

    def lookup(self, items: Sequence[LookupItem], *, timeout_s: float) -> list[int]:
        """Leading READY chunks of each prompt."""
        answer: list[int] = self._decide("lookup", self._client, items, timeout_s=timeout_s)
        return answer

    def prepare_loads(self, items: Sequence[LoadItem], *, timeout_s: float | None = None) -> list[PlannedLoad]:
        """Pin what each prompt can load."""
        answer: list[PlannedLoad] = self._decide("prepare_loads", self._client, items, timeout_s=timeout_s)
        return answer

    def prepare_stores(
        self, items: Sequence[StoreItem], *, direct: bool = False, timeout_s: float | None = None
    ) -> list[PlannedStore]:
        """Reserve slots for what each prompt has that nobody has yet; `direct` if this process writes them itself."""
        answer: list[PlannedStore] = self._decide(
            "prepare_stores", self._client, items, direct, timeout_s=timeout_s
        )
        return answer

    def prepare_window(
        self, prompts: Sequence[bytes], lease_ids: Sequence[str]
    ) -> list[tuple[PlannedLoad, PlannedStore]]:
        """Plan load and store of the leading prompts that can be planned now."""
        answer: list[tuple[PlannedLoad, PlannedStore]] = self._decide(
            "prepare_window", self._client, prompts, lease_ids
        )
        return answer

    def complete(
        self, stores: Sequence[StoreDone], releases: Sequence[str] = (), *, timeout_s: float | None = None
    ) -> list[int]:
        """Report stores and end leases; per store its prompt's leading READY chunks."""
        answer: list[int] = self._decide("complete", stores, releases, timeout_s=timeout_s)
        return answer

    def release_soon(self, lease_ids: Sequence[str]) -> Ref:
        """End leases; not waited for, but by the reference. Raises `ClusterError` if the message is not taken."""
        with calling("the coordinator (complete)"):
            reference: Ref = self.actor.decide.remote(pack_call("complete", [], lease_ids))
        return reference

    def clear(self, keys: bytes | None) -> ClearCounts:
        """Forget chunks; None is all."""
        answer: ClearCounts = self._ask("clear", keys)
        return answer

    # -- broadcast ------------------------------------------------------------------------------------------------

    def publish(self, rank: int, name: str | None, parcel: Parcel) -> None:
        """As the source: an object for the others."""
        self._ask("publish", rank, name, parcel)

    def fail_broadcast(self, rank: int, name: str | None, reason: str) -> None:
        """As the source: its failure."""
        self._ask("fail_broadcast", rank, name, reason)

    def take(self, rank: int, src: int, name: str | None, tag: Tag | None, wait_s: float) -> tuple[Tag, TakeResult]:
        """As a receiver: what the source sent, waiting there at most `wait_s`."""
        answer: tuple[Tag, TakeResult] = self._ask("take", rank, src, name, tag, wait_s)
        return answer

    def give_up_broadcast(self, rank: int, tag: Tag) -> DeadlineError:
        """As a receiver: its deadline has passed; the error to raise."""
        answer: DeadlineError = self._ask("give_up_broadcast", rank, tag)
        return answer

    def break_broadcasts(self, reason: str) -> None:
        """This rank's untagged calls are out of step."""
        self._ask("break_broadcasts", reason)

    def _decide(self, name: str, *arguments: object, timeout_s: float | None = None) -> Any:
        """A call of the index, which is asked most often: packed, as that is fastest."""
        return unpack(self._ask("decide", pack_call(name, *arguments), what=name, timeout_s=timeout_s))

    def _ask(
        self, method: str, *arguments: object, what: str | None = None, timeout_s: float | None = None
    ) -> Any:
        what = f"the coordinator ({what or method})"
        with calling(what):
            reference = getattr(self.actor, method).remote(*arguments)
        return wait_for(reference, timeout_s=self._timeout_s if timeout_s is None else timeout_s, what=what)
