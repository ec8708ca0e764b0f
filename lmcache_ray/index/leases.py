"""Who is reading what: leases that pin slots against eviction and clearing.

Apart from the slots, because a pin is never a bare count: it belongs to one lease, which has an owner and an end. So a
second release does nothing, asking again does not pin twice, and a dead client leaves nothing behind.
"""

from collections.abc import Collection, Iterable, KeysView
from dataclasses import dataclass
from math import inf
from typing import Final

PINS_CLIENT: Final = "pins"
"""Stands for a client in the leases of pins: no process, since a pin outlives whoever asked for it."""


@dataclass(slots=True)
class _Lease:
    client: str
    slots: tuple[int, ...]
    expires: float
    timeout_s: float


class LeaseTable:
    """Leases by id. A lease lasts `timeout_s` seconds, or its own, from when it was last asked for or renewed.

    One that `keep` was called for lasts until it is released or its client ends.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._leases: dict[str, _Lease] = {}
        self._pins: dict[int, int] = {}
        self._none_ends_before = inf
        self._endless: set[str] = set()
        self._kept: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def pinned(self) -> KeysView[int]:
        """The slots that any lease holds: a view that follows every change."""
        return self._pins.keys()

    def hold(
        self, lease_id: str, client: str, slots: Iterable[int], now: float, *, timeout_s: float | None = None
    ) -> None:
        """Let the lease hold exactly these slots, from now on for `client`; no slots end it.

        A lease of that id, whoever had it, is replaced: ids are one name space for all clients.
        """
        held = tuple(slots)
        _count(self._pins, held)  # before the old ones go, so that a slot held twice over is never unpinned in between
        self.release(lease_id)
        if held:
            lasting = self._timeout_s if timeout_s is None else timeout_s
            expires = now + lasting
            self._leases[lease_id] = _Lease(client, held, expires, lasting)
            self._none_ends_before = min(self._none_ends_before, expires)

    def release(self, lease_id: str) -> bool:
        """End a lease; False if there is none of that id (any more)."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        _discount(self._pins, lease.slots)
        if lease_id in self._endless:
            self._endless.discard(lease_id)
            _discount(self._kept, lease.slots)
        return True

    def forget(self, slots: Collection[int]) -> None:
        """These slots hold nothing any more: leases go on without them, and one that held nothing else ends."""
        gone = self._pins.keys() & slots
        for lease_id, lease in list(self._leases.items()) if gone else ():
            lost = [slot for slot in lease.slots if slot in gone]
            if not lost:
                continue
            lease.slots = tuple(slot for slot in lease.slots if slot not in gone)
            _discount(self._pins, lost)
            if lease_id in self._endless:
                _discount(self._kept, lost)
            if not lease.slots:
                self.release(lease_id)

    def renew(self, lease_id: str, now: float) -> bool:
        """Let a lease last its full time from now; False if there is none of that id (any more)."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.expires = now + lease.timeout_s
        self._none_ends_before = min(self._none_ends_before, lease.expires)
        return True

    def keep(self, lease_id: str, *, max_slots: int) -> bool:
        """Let a lease end by release, or with its client, but never by time.

        False, and no change, if there is none of that id, or if more than `max_slots` slots would then be held so.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease_id in self._endless:
            return lease is not None
        if len(self._kept) + len(set(lease.slots) - self._kept.keys()) > max_slots:
            return False
        lease.expires = lease.timeout_s = inf
        self._endless.add(lease_id)
        _count(self._kept, lease.slots)
        return True

    @property
    def num_kept(self) -> int:
        """Leases that do not end by time."""
        return len(self._endless)

    @property
    def kept_slots(self) -> KeysView[int]:
        """The slots that such leases hold: a view that follows every change."""
        return self._kept.keys()

    def shown_slots(self) -> set[int]:
        """The slots that such leases of clients hold, whose views show them; pins are nobody's."""
        endless = [self._leases[lease_id] for lease_id in self._endless]
        return {slot for lease in endless if lease.client != PINS_CLIENT for slot in lease.slots}

    def expire(self, now: float) -> list[str]:
        """End the leases whose time is up; answers their ids."""
        if now < self._none_ends_before:
            return []
        ended = [lease_id for lease_id, lease in self._leases.items() if lease.expires <= now]
        for lease_id in ended:
            self.release(lease_id)
        self._none_ends_before = min((lease.expires for lease in self._leases.values()), default=inf)
        return ended

    def drop_client(self, client: str) -> list[str]:
        """End all leases of one client; answers their ids."""
        ended = [lease_id for lease_id, lease in self._leases.items() if lease.client == client]
        for lease_id in ended:
            self.release(lease_id)
        return ended

    def pinned_slots(self) -> set[int]:
        """Every slot that some lease holds, counted from the leases themselves."""
        return {slot for lease in self._leases.values() for slot in lease.slots}

    def contradictions(self) -> list[str]:
        """Where pins and leases disagree: empty when sound."""
        counted: dict[int, int] = {}
        kept: dict[int, int] = {}
        for lease_id, lease in self._leases.items():
            _count(counted, lease.slots)
            if lease_id in self._endless:
                _count(kept, lease.slots)
        slots = sorted(counted.keys() | self._pins.keys())
        found = [
            f"slot {slot} has {self._pins.get(slot, 0)} pins but {counted.get(slot, 0)} leases hold it"
            for slot in slots
            if self._pins.get(slot) != counted.get(slot)
        ]
        if kept != self._kept or not self._endless <= self._leases.keys():
            found.append(f"slots {sorted(self._kept)} count as held without end, but leases hold {sorted(kept)} so")
        return found


def _count(counts: dict[int, int], slots: Iterable[int]) -> None:
    """Each slot is held once more."""
    for slot in slots:
        counts[slot] = counts.get(slot, 0) + 1


def _discount(counts: dict[int, int], slots: Iterable[int]) -> None:
    """Each slot is held once less."""
    for slot in slots:
        if counts[slot] == 1:
            del counts[slot]
        else:
            counts[slot] -= 1
