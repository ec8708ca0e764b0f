"""What must be true of a world, told from outside: a few sets of keys beside the index that is under test.

It hears of each decision of the coordinator as it is made. A chunk that was cleared may not be found again unless
somebody has stored it again; one that was reported as stored is found in the end, where nothing took it away.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.messages import LoadItem, LookupItem, PlannedLoad, PlannedStore, StoreDone, StoreItem, unpack_keys
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import Tier
from tests.simulation.copying import Violation
from tests.simulation.values import short


@dataclass(slots=True)
class Watch:
    """One call while it is answered, and what was gone when it began."""

    name: str
    number: int
    gone: frozenset[bytes]
    answer: Any = None


@dataclass(slots=True)
class Oracle:
    """`all_tiers` are those that a clear must name to clear all; `every_key` all that there can be."""

    all_tiers: frozenset[Tier]
    every_key: frozenset[bytes]
    gone: set[bytes] = field(default_factory=set)
    """Cleared everywhere, and not planned to be stored since."""
    stored: set[bytes] = field(default_factory=set)
    """Reported as stored, and nothing has happened since that may have taken it away."""
    num_hits: int = 0
    num_clears: int = 0
    _number: int = 0
    _planned: dict[bytes, int] = field(default_factory=dict)
    _cleared: dict[bytes, int] = field(default_factory=dict)
    _prompts: dict[int, Sequence[bytes]] = field(default_factory=dict)
    _generations: dict[int, tuple[bytes, int]] = field(default_factory=dict)

    @contextmanager
    def watching(self, name: str, arguments: tuple[Any, ...]) -> Iterator[Watch]:
        """Around a call's answer."""
        self._number += 1
        watch = Watch(name, self._number, frozenset(self.gone))
        try:
            if name == "clear":
                self.num_clears += 1
                self._may_have_cleared(arguments[0])
            yield watch
        finally:
            if name == "clear":
                self._may_have_cleared(arguments[0])
        note = getattr(self, f"_note_{name}", None)
        if note is not None:
            note(watch, *arguments)

    def lose(self) -> None:
        """Bytes have gone that no other place has: nothing need be found any more."""
        self.stored.clear()
        self._number += 1
        self._cleared = dict.fromkeys(self.every_key, self._number)

    # -- hits ---------------------------------------------------------------------------------------------------------

    def _note_lookup(self, watch: Watch, client: str, items: Sequence[LookupItem], tiers: object) -> None:
        for item, count in zip(items, watch.answer, strict=True):
            self._found(watch, unpack_keys(item.keys)[:count])

    def _note_look_further(
        self, watch: Watch, client: str, prompts: Sequence[bytes], num_cached: Sequence[int], wait_s: float
    ) -> None:
        for keys, before, count in zip(prompts, num_cached, watch.answer, strict=True):
            self._found(watch, unpack_keys(keys)[before:count])

    def _note_prepare_loads(self, watch: Watch, client: str, items: Sequence[LoadItem]) -> None:
        plans: Sequence[PlannedLoad] = watch.answer
        for plan in plans:
            self._found(watch, [ref.key for ref in plan.refs.unpack()])

    def _note_promote_loads(self, watch: Watch, client: str, items: Sequence[LoadItem], wait_s: float) -> None:
        self._note_prepare_loads(watch, client, items)

    def _found(self, watch: Watch, keys: Sequence[bytes]) -> None:
        self.num_hits += len(keys)
        back = [key for key in keys if key in watch.gone and key in self.gone]
        if back:
            raise Violation(f"{watch.name} found {short(back)}, which was cleared and not stored again")

    # -- stores -------------------------------------------------------------------------------------------------------

    def _note_prepare_stores(
        self, watch: Watch, client: str, items: Sequence[StoreItem], direct: object = None, patient: bool = False
    ) -> None:
        plans: Sequence[PlannedStore] = watch.answer
        for item, plan in zip(items, plans, strict=True):
            if plan.plan_id is not None:
                self._prompts[plan.plan_id] = unpack_keys(item.keys)
            for key, slot, generation in plan.refs.unpack():
                self._planned[key] = self._number
                self.gone.discard(key)
                if self._generations.setdefault(generation, (key, slot)) != (key, slot):
                    raise Violation(f"generation {generation} was issued twice")

    def _note_complete(self, watch: Watch, stores: Sequence[StoreDone], releases: Sequence[str] = ()) -> None:
        for store, count in zip(stores, watch.answer, strict=True):
            for key in self._prompts.get(store.plan_id, ())[:count]:
                if self._cleared.get(key, 0) < watch.number:
                    self.stored.add(key)

    # -- clears -------------------------------------------------------------------------------------------------------

    def _may_have_cleared(self, keys: bytes | None) -> None:
        """What is reported as stored by calls that have begun by now may be gone."""
        for key in self._named(keys):
            self.stored.discard(key)
            self._cleared[key] = self._number

    def _note_clear(self, watch: Watch, keys: bytes | None, tiers: Sequence[Tier]) -> None:
        counts: TierClearCounts = watch.answer
        if counts.num_kept or not self.all_tiers.issubset(tiers):
            return
        self.gone.update(key for key in self._named(keys) if self._planned.get(key, 0) < watch.number)

    def _named(self, keys: bytes | None) -> Sequence[bytes]:
        return tuple(self.every_key) if keys is None else unpack_keys(keys)
