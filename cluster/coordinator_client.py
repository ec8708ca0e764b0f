"""The coordinator as its callers see it: one typed method per call, each with a deadline."""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Final

from lmcache_ray.broadcast.tags import Call, Tag, TakeResult
from lmcache_ray.errors import CoordinatorUnavailableError, DeadlineError, UnknownClientError
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import Tier

from .deadline import Deadline
from .health import ClusterHealth
from .introduction import Introduction
from .messages import (
    ClientHello,
    DirectWrites,
    LoadItem,
    LookupItem,
    Parcel,
    PlannedLoad,
    PlannedStore,
    PlannedWindow,
    StoreDone,
    StoreItem,
)
from .packed_calls import pack_call, unpack
from .ray_calls import Actor, Ref, calling, wait_for
from .world import ClusterStatus

_ANSWER_S: Final = 1.0
_PAUSE_S: Final = 0.1


class CoordinatorClient:
    """Calls of one `client` to a coordinator. Thread-safe.

    Every method but `wait_for_room` raises `DeadlineError` after `timeout_s` (its own or the client's); each raises
    `ClusterError` if the coordinator cannot be reached, or what the call itself raised.

    A call that the coordinator's death has caught is made again, within its time: each may be carried out twice, since
    ids of plans, leases and broadcasts make the second one the same, and what a lost plan reserved is ended by time.
    One that does not know this client has a successor's memory: ``introduce_again(client)`` registers it once more.
    """

    def __init__(
        self,
        actor: Actor,
        client: str,
        *,
        timeout_s: float,
        introduce_again: "Callable[[CoordinatorClient], None]" = lambda client: None,
    ) -> None:
        self.actor = actor
        self._client = client
        self._timeout_s = timeout_s
        self._introduce_again = introduce_again

    # -- membership -----------------------------------------------------------------------------------------------

    def introduce(self, *, timeout_s: float | None = None) -> Introduction | None:
        """What the world is and who serves it; None while it is being started, or is not whole again."""
        answer: Introduction | None = self._ask("introduce", timeout_s=timeout_s)
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

    def health(self) -> ClusterHealth:
        """Whether it is whole."""
        answer: ClusterHealth = self._ask("health")
        return answer

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if the index contradicts itself."""
        self._ask("check_integrity")

    def drain(self, *, timeout_s: float) -> tuple[int, int]:
        """Plan no more stores, let those that are planned end, and fill the disk; what is left over in the end."""
        answer: tuple[int, int] = self._ask("drain", max(0.0, timeout_s - _ANSWER_S), timeout_s=timeout_s)
        return answer

    # -- index ----------------------------------------------------------------------------------------------------

    def lookup(self, items: Sequence[LookupItem], tiers: Collection[Tier], *, timeout_s: float) -> list[int]:
        """Leading chunks of each prompt that memory and disk, as far as they are among `tiers`, have."""
        answer: list[int] = self._decide("lookup", self._client, items, tuple(tiers), timeout_s=timeout_s)
        return answer

    def look_further(self, prompts: Sequence[bytes], num_cached: Sequence[int], *, timeout_s: float) -> list[int]:
        """The same with the remote store behind what is known to be cached; what is there begins to come up."""
        answer: list[int] = self._decide_patiently(
            "look_further", self._client, prompts, num_cached, timeout_s=timeout_s
        )
        return answer

    def locate(self, keys: bytes, *, timeout_s: float) -> list[Tier]:
        """The fastest tier that has each of the leading chunks."""
        answer: list[Tier] = self._decide_patiently("locate", keys, timeout_s=timeout_s)
        return answer

    def pin(self, keys: bytes) -> int:
        """Pin the leading cached chunks until `unpin`; their number. Raises `CapacityError`."""
        answer: int = self._decide("pin", keys)
        return answer

    def unpin(self, keys: bytes) -> bool:
        """End a pin."""
        answer: bool = self._decide("unpin", keys)
        return answer

    def prepare_loads(self, items: Sequence[LoadItem], *, timeout_s: float | None = None) -> list[PlannedLoad]:
        """Pin what each prompt can load; one that must wait has to be promoted first."""
        answer: list[PlannedLoad] = self._decide("prepare_loads", self._client, items, timeout_s=timeout_s)
        return answer

    def promote_loads(self, items: Sequence[LoadItem], *, timeout_s: float) -> list[PlannedLoad]:
        """Bring up and pin what the leading items can load, at least one's; the others must wait until it is loaded."""
        answer: list[PlannedLoad] = self._decide_patiently("promote_loads", self._client, items, timeout_s=timeout_s)
        return answer

    def promote(
        self, prompts: Sequence[bytes], lease_ids: Sequence[str], *, timeout_s: float
    ) -> list[tuple[int, int]]:
        """Bring the leading prompts up, at least one: of each, how many chunks came from disk and from the remote."""
        answer: list[tuple[int, int]] = self._decide_patiently(
            "promote", self._client, prompts, lease_ids, timeout_s=timeout_s
        )
        return answer

    def prepare_stores(
        self,
        items: Sequence[StoreItem],
        *,
        direct: DirectWrites | None = None,
        patient: bool = False,
        timeout_s: float | None = None,
    ) -> list[PlannedStore]:
        """Reserve slots for what each prompt has that nobody has yet; `direct` if this process writes them itself.

        With `patient` an item may have to wait for room, which `wait_for_room` does.
        """
        answer: list[PlannedStore] = self._decide(
            "prepare_stores", self._client, items, direct, patient, timeout_s=timeout_s
        )
        return answer

    def wait_for_room(self, *, timeout_s: float) -> None:
        """Return when chunks have been copied down, so that a store may find room now, or after `timeout_s`."""
        with suppress(DeadlineError):  # all its threads for patient calls are busy: whoever asked looks again
            self._decide_patiently("wait_for_room", timeout_s=timeout_s)

    def prepare_window(
        self,
        prompts: Sequence[bytes],
        lease_ids: Sequence[str],
        *,
        promoted: Sequence[str] = (),
        patient: bool = False,
    ) -> PlannedWindow:
        """Plan load and store of the leading prompts that can be planned now."""
        answer: PlannedWindow = self._decide(
            "prepare_window", self._client, prompts, lease_ids, promoted, patient
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

    def clear(self, keys: bytes | None, tiers: Collection[Tier]) -> TierClearCounts:
        """Forget chunks in `tiers`; None is all. Raises `StorageError` if a remote store does not do it."""
        answer: TierClearCounts = unpack(
            self._ask("decide_patiently", pack_call("clear", keys, tuple(tiers)), what="clear")
        )
        return answer

    def check_tiers(self, *, repair: bool, timeout_s: float) -> list[str]:
        """Compare the disk's index and files in both directions; what was found, a sentence each."""
        answer: list[str] = self._decide_patiently("check_tiers", repair, timeout_s=timeout_s)
        return answer

    # -- broadcast ------------------------------------------------------------------------------------------------

    def publish(self, rank: int, name: str | None, parcel: Parcel, *, call: Call | None) -> None:
        """As the source: an object for the others."""
        self._ask("publish", rank, name, parcel, call)

    def fail_broadcast(self, rank: int, name: str | None, reason: str, *, call: Call | None) -> None:
        """As the source: its failure."""
        self._ask("fail_broadcast", rank, name, reason, call)

    def take(
        self, rank: int, src: int, name: str | None, tag: Tag | None, wait_s: float, *, call: Call | None
    ) -> tuple[Tag, TakeResult]:
        """As a receiver: what the source sent, waiting there at most `wait_s`."""
        answer: tuple[Tag, TakeResult] = self._ask("take", rank, src, name, tag, wait_s, call)
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

    def _decide_patiently(self, name: str, *arguments: object, timeout_s: float) -> Any:
        """A call that waits there for as long as it says: a little less than here, so that there is an answer."""
        wait_s = max(0.0, timeout_s - min(_ANSWER_S, timeout_s / 4))
        call = pack_call(name, *arguments, wait_s)
        return unpack(self._ask("decide_patiently", call, what=name, timeout_s=timeout_s))

    def _ask(
        self, method: str, *arguments: object, what: str | None = None, timeout_s: float | None = None
    ) -> Any:
        what = f"the coordinator ({what or method})"
        deadline = Deadline(self._timeout_s if timeout_s is None else timeout_s)
        is_known = True
        while True:
            with calling(what):
                reference = getattr(self.actor, method).remote(*arguments)
            try:
                return wait_for(reference, timeout_s=deadline.remaining_s(), what=what)
            except CoordinatorUnavailableError:
                if deadline.remaining_s() <= _PAUSE_S:
                    raise
                time.sleep(_PAUSE_S)
            except UnknownClientError:
                if not is_known:
                    raise
                is_known = False
                self._introduce_again(self)
