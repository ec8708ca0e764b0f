"""The tiers below memory as a whole: opening and closing them, copying chunks down, and clearing.

Chunks are copied down behind the stores, by one thread for each tier below; the way up is in `promoting.py`. What is
decided about them is decided by the pure planners, and the ranks move the bytes: here stand the threads.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Final, NamedTuple

from lmcache_ray.errors import DirectoryTakenError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index_service import IndexService
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.disk_tier import DiskTier
from lmcache_ray.tiers.promoting import Promoter
from lmcache_ray.tiers.remote_tier import RemoteTier
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import EVERYWHERE

_ROUND_S: Final = 1.0


class _Cleared(NamedTuple):
    """What a clear did in one tier."""

    removed: set[bytes]
    kept: set[bytes]
    pending: Sequence[int]


class TierService:
    """The tiers below the memory of `service`, if there are any. Thread-safe.

    `call_timeout_s` is the time of one round of calls to ranks, and that for which promoted chunks stay pinned.
    `settle`, called now and then, frees slots whose rank did not answer in time, if nobody else does that.
    """

    def __init__(
        self,
        service: IndexService,
        *,
        disk: DiskTier | None,
        remote: RemoteTier | None,
        call_timeout_s: float,
        clock: Callable[[], float],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.disk: Final = disk
        self.remote: Final = remote
        self._service = service
        self.promoter: Final = Promoter(service, disk=disk, remote=remote, pin_s=call_timeout_s, clock=clock)
        self._clock = clock
        self._settle = settle
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._closing = threading.Lock()  # held while closing: ranks of one process may all do so at once

    # -- life ---------------------------------------------------------------------------------------------------------

    def open(
        self,
        timeout_s: float,
        *,
        may_be_taken: bool = False,
        is_cleared: Callable[[bytes], bool] = lambda key: False,
    ) -> None:
        """Look at what earlier lives left, and begin. Of what is on disk, keys that `is_cleared` names are deleted.

        Raises `DirectoryTakenError` unless the directory `may_be_taken`; that and all else is a problem to show.
        """
        if self.disk is not None:
            self.disk.is_cleared = is_cleared
            try:
                self.disk.open(timeout_s)
            except DirectoryTakenError as error:
                if not may_be_taken:
                    raise
                self.disk.suspend(str(error))
            self._start("disk", self._keep_disk)
        if self.remote is not None:
            self._start("remote", self._keep_remote)

    def close(self, *, flush_s: float) -> None:
        """Copy down what waits, for `flush_s` at most, and end. Idempotent."""
        with self._closing:
            if not self._stopping.is_set():
                self._close(flush_s)

    def _close(self, flush_s: float) -> None:
        deadline = self._clock() + flush_s
        if self._threads:
            self._service.wait_until(lambda index: not any(map(len, index.backlogs.values())), flush_s)
        self._stopping.set()
        self._service.tell_moved()
        for thread in self._threads:
            thread.join(max(0.0, deadline + _ROUND_S - self._clock()))
        self._threads.clear()
        self.promoter.close()
        if self.disk is not None:
            self.disk.close()
        if self.remote is not None:
            self.remote.close()

    def problems(self) -> list[str]:
        """Why a tier is out of order, a sentence each."""
        tiers = {"disk": self.disk, "remote": self.remote}
        problems = {name: tier.health.problem(self._clock()) for name, tier in tiers.items() if tier is not None}
        return [f"the {name} tier is out of order: {problem}" for name, problem in problems.items() if problem]

    # -- away ---------------------------------------------------------------------------------------------------------

    def clear(self, keys: Sequence[bytes] | None, tiers: Collection[Tier] = EVERYWHERE) -> TierClearCounts:
        """Forget these chunks, or all with None, in `tiers`, except leased ones; and have the ranks drop the bytes.

        Memory is cleared first, so that nothing goes down any more, and once more at the end, since something may have
        come up meanwhile. Raises `StorageError` if the remote store does not do its part; the other tiers have then.
        """
        removed = {tier: set[bytes]() for tier in Tier if self._has(tier)}
        kept = {tier: set[bytes]() for tier in removed}
        pending: set[int] = set()
        lower = [tier for tier in (Tier.DISK, Tier.REMOTE) if tier in tiers and tier in removed]
        for tier in [Tier.CPU, *lower, *([Tier.CPU] if lower else [])]:
            if tier in tiers:
                cleared = self._clear_tier(tier, keys)
                removed[tier] |= cleared.removed
                kept[tier] = cleared.kept
                pending.update(cleared.pending)
        all_kept = set(chain.from_iterable(kept.values()))
        all_removed = set(chain.from_iterable(removed.values())) - all_kept
        return TierClearCounts(
            removed={tier: len(found) for tier, found in removed.items()},
            kept={tier: len(found) for tier, found in kept.items()},
            num_removed=len(all_removed),
            num_kept=len(all_kept),
            pending_ranks=tuple(sorted(pending)),
        )

    def _clear_tier(self, tier: Tier, keys: Sequence[bytes] | None) -> _Cleared:
        if tier is Tier.CPU:
            plan, silent = self._service.clear_memory(keys)
            return _Cleared(_keys_of(plan.refs), _keys_of(plan.kept), silent)
        if tier is Tier.DISK and self.disk is not None:
            with self._service.at_now() as (index, _):
                if index.disk is None:
                    self.disk.note_cleared(keys)
                    return _Cleared(set(), set(), index.memory.holders)
                plan = index.clear_disk(keys)
            silent = self.disk.delete((*plan.refs, *plan.aborted))
            return _Cleared(_keys_of(plan.refs), _keys_of(plan.kept), silent)
        return _Cleared(self.remote.clear(keys) if self.remote is not None else set(), set(), ())

    def _has(self, tier: Tier) -> bool:
        return {Tier.CPU: True, Tier.DISK: self.disk is not None, Tier.REMOTE: self.remote is not None}[tier]

    # -- threads ------------------------------------------------------------------------------------------------------

    def _start(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=f"tier-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _keep_disk(self) -> None:
        assert self.disk is not None  # it is what this thread is for
        while not self._stopping.is_set():
            with self._noting_faults(self.disk.suspend):
                self.disk.resume()
                if not self.disk.write_some():
                    self._wait_for_work(Tier.DISK)

    def _keep_remote(self) -> None:
        assert self.remote is not None  # it is what this thread is for
        while not self._stopping.is_set():
            with self._noting_faults(self.remote.suspend):
                self.remote.resume()
                if not self.remote.put_some():
                    self._wait_for_work(Tier.REMOTE)

    def _wait_for_work(self, tier: Tier) -> None:
        self._settle()
        self._service.wait_until(lambda index: self._stopping.is_set() or index.backlogs[tier].is_waiting, _ROUND_S)

    @contextmanager
    def _noting_faults(self, suspend: Callable[[str], None]) -> Iterator[None]:
        """The outermost frame of a thread that must not end: what is wrong stands in the tier's health."""
        try:
            yield
        except Exception as error:
            suspend(f"{type(error).__name__}: {error}")
            self._stopping.wait(_ROUND_S)


def _keys_of(refs: Sequence[ChunkRef]) -> set[bytes]:
    return {ref.key for ref in refs}
