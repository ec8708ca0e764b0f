"""Bringing chunks up: what a prompt has in the tiers below is copied into memory before somebody loads it.

It happens in the thread of whoever is about to load, who waits for it no longer than its call may take; a lookup may
start it beforehand. What is read is planned in `promotion.py`; what is of no use is forgotten here, and counted.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from lmcache_ray.index.plans import Deferred
from lmcache_ray.index_service import IndexService
from lmcache_ray.storage.remote import RemoteChunk
from lmcache_ray.tiers.calls import ChunkOutcome, RankAnswer
from lmcache_ray.tiers.disk_tier import DiskTier
from lmcache_ray.tiers.promotion import (
    Promotion,
    complete_promotion,
    is_coming_up,
    plan_promotion,
    stop_waiting,
)
from lmcache_ray.tiers.remote_tier import RemoteTier
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tiered_index import TieredIndex

_MOST_ROUNDS: Final = 4
_MOST_PREFETCHES: Final = 16  # begun or waiting; more would come too late to be of use
_NUM_PREFETCHES: Final = 2
_REPAIR_S: Final = 1.0  # what is not deleted by then is deleted with the next that is
_POLL_S: Final = 0.02
_READERS_S: Final = 0.5  # how long to wait for readers to make room


@dataclass(frozen=True, slots=True)
class Promoted:
    """How many chunks of a prompt were brought into memory, by where they came from."""

    disk: int = 0
    remote: int = 0


class Promoter:
    """The way up from `disk` and `remote`, as far as there are any. Thread-safe.

    `pin_s` is how long promoted chunks stay pinned for the load that follows.
    """

    def __init__(
        self,
        service: IndexService,
        *,
        disk: DiskTier | None,
        remote: RemoteTier | None,
        pin_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._service = service
        self._disk = disk
        self._remote = remote
        self._pin_s = pin_s
        self._clock = clock
        self._is_closed = False
        self._lock = threading.Lock()  # guards `_coming`
        self._coming: set[str] = set()
        self._prefetching = ThreadPoolExecutor(_NUM_PREFETCHES, thread_name_prefix="prefetch")

    def close(self) -> None:
        """Begin no more prefetches."""
        with self._lock:
            self._is_closed = True
        self._prefetching.shutdown(wait=False, cancel_futures=True)

    def may_have_more(self, index: TieredIndex, keys: Sequence[bytes], start: int = 0) -> bool:
        """Whether `promote` might bring chunks of this prompt from number `start` on into memory.

        For who has the index, so that nothing changes between the question and what follows from it.
        """
        if self._disk is None and self._remote is None:
            return False
        tiers = index.run(keys)
        return Tier.DISK in tiers[start:] or self.may_find_more(keys, len(tiers))

    def may_find_more(self, keys: Sequence[bytes], num_cached: int) -> bool:
        """Whether the remote store is there to be asked for what comes behind the first `num_cached` keys."""
        return self._remote is not None and num_cached < len(keys) and self._remote.is_asked

    def locate(self, keys: Sequence[bytes], *, timeout_s: float) -> list[Tier]:
        """The fastest tier that has each of the leading keys, the remote store included."""
        tiers = self._service.locate(keys)
        return tiers + [Tier.REMOTE] * len(self._find(keys, len(tiers), timeout_s))

    def look_further(self, keys: Sequence[bytes], num_cached: int, *, client: str, timeout_s: float) -> int:
        """The leading keys that are cached, the remote store included; what is there begins to come up.

        Not where memory only stages: it would be gone again before somebody loads it.
        """
        found = self._find(keys, num_cached, timeout_s)
        num_cached = min(num_cached + len(found), self._service.capacity)
        if found and self._service.keeps_in_memory:
            self._begin_prefetch(keys[:num_cached], client)
        return num_cached

    def _begin_prefetch(self, keys: Sequence[bytes], client: str) -> None:
        lease_id = f"prefetch/{client}/{keys[-1].hex()}"
        with self._lock:
            if lease_id in self._coming or len(self._coming) >= _MOST_PREFETCHES or self._is_closed:
                return
            self._coming.add(lease_id)
            self._prefetching.submit(self._prefetch, keys, lease_id, client)

    def _prefetch(self, keys: Sequence[bytes], lease_id: str, client: str) -> None:
        try:
            self.promote([keys], [lease_id], client=client, timeout_s=self._pin_s)
        finally:
            self._service.release([lease_id])  # they are the latest in memory: nobody may ever come for them
            with self._lock:
                self._coming.discard(lease_id)

    def _find(self, keys: Sequence[bytes], num_cached: int, timeout_s: float) -> Mapping[bytes, RemoteChunk]:
        """The run from number `num_cached` on that the remote store has; nothing if it does not answer."""
        if self._remote is None or not self.may_find_more(keys, num_cached):
            return {}
        return self._remote.find(keys[num_cached:], timeout_s=timeout_s)

    def promote(
        self,
        prompts: Sequence[Sequence[bytes]],
        lease_ids: Sequence[str],
        *,
        client: str,
        timeout_s: float,
        starts: Sequence[int] | None = None,
    ) -> list[Promoted]:
        """Bring the cached run of the leading prompts into memory, as many as fit there together: at least one.

        Prompt i is pinned under ``lease_ids[i]`` for a load that follows, from chunk number ``starts[i]`` on (0). What
        cannot be read in time, or at all, is left where it is, or forgotten if it is of no use there.
        """
        deadline = self._clock() + timeout_s
        wanted = [self._from(keys, start) for keys, start in zip(prompts, starts or [0] * len(prompts), strict=True)]
        promoted = self._promote_once(wanted, lease_ids, client, deadline)
        return [self._with_others(promotion, counts, deadline) for promotion, counts in promoted]

    def _from(self, keys: Sequence[bytes], start: int) -> Sequence[bytes]:
        """The keys to bring up: those before `start` need not be in memory, if they are cached here at all."""
        return keys[start:] if start and len(self._service.locate(keys[:start])) == start else keys

    def _promote_once(
        self, prompts: Sequence[Sequence[bytes]], lease_ids: Sequence[str], client: str, deadline: float
    ) -> list[tuple[Promotion[RemoteChunk], Promoted]]:
        """One round of reading."""
        promotions = self._plan(prompts, lease_ids, client, deadline)
        on_disk = self._disk.read(promotions, self._left_s(deadline)) if self._disk is not None else {}
        from_remote = self._remote.load(promotions, self._left_s(deadline)) if self._remote is not None else {}
        promoted = [
            (promotion, self._complete(promotion, _part_of(promotions, promotion, on_disk, from_remote)))
            for promotion in promotions
        ]
        self._service.tell_moved()
        return promoted

    def _left_s(self, deadline: float) -> float:
        return max(_POLL_S, deadline - self._clock())

    def _with_others(self, promotion: Promotion[RemoteChunk], promoted: Promoted, deadline: float) -> Promoted:
        """Chunks that another caller was bringing up are waited for, and brought up again if they are gone by then."""
        for _ in range(_MOST_ROUNDS):
            if not self._await_others(promotion, deadline):
                break
            again = self._promote_once([promotion.keys], [promotion.lease_id], promotion.client, deadline)
            for promotion, more in again:  # noqa: B007 - there is one, and it is the next to wait for
                promoted = Promoted(promoted.disk + more.disk, promoted.remote + more.remote)
        return promoted

    def wait_for_room(self, timeout_s: float) -> None:
        """Return when chunks have been copied down, so that a store may find room now, or after `timeout_s`."""
        with self._service.at_now() as (index, _):
            num_behind = index.num_behind()
        self._service.wait_until(lambda index: index.num_behind() < max(1, num_behind), timeout_s)

    def _plan(
        self, prompts: Sequence[Sequence[bytes]], lease_ids: Sequence[str], client: str, deadline: float
    ) -> list[Promotion[RemoteChunk]]:
        promotions: list[Promotion[RemoteChunk]] = []
        patient_until = min(deadline, self._clock() + _READERS_S)
        for keys, lease_id in zip(prompts, lease_ids, strict=True):
            found: dict[bytes, RemoteChunk] = {}
            num_cached = -1
            while True:
                num_cached = self._find_missing(keys, found, num_cached, deadline)
                looked_at = self._clock()
                with self._service.at_now() as (index, now):
                    if self._remote is not None and len(index.run(keys)) < num_cached and looked_at < deadline:
                        continue  # some of them have gone since the store was asked for the others
                    is_moving = index.num_behind((Tier.DISK,)) or index.coming_up
                    is_patient = looked_at < (deadline if is_moving else patient_until)
                    planned = plan_promotion(
                        index,
                        keys,
                        found,
                        lease_id=lease_id,
                        client=client,
                        now=now,
                        timeout_s=self._pin_s,
                        whole=bool(promotions) or is_patient,
                    )
                if not isinstance(planned, Deferred):
                    promotions.append(planned)
                    break
                if promotions:
                    return promotions
                self._service.wait_until(lambda _: False, _POLL_S)
        return promotions

    def _find_missing(
        self, keys: Sequence[bytes], found: dict[bytes, RemoteChunk], num_known: int, deadline: float
    ) -> int:
        """Add to `found` what the remote store has behind the first chunks that are here, if these have become fewer.

        `num_known` of them were here when that was last asked; how many there are now.
        """
        num_cached = len(self._service.locate(keys))
        if num_known < 0 or num_cached < num_known:
            found.update(self._find(keys, num_cached, max(0.0, deadline - self._clock()) / 2))
        return num_cached

    def _complete(
        self, promotion: Promotion[RemoteChunk], outcomes: Mapping[int, Sequence[ChunkOutcome]]
    ) -> Promoted:
        """Take in what the ranks have done, and forget what was of no use to any of them."""
        positions = range(len(promotion.refs))
        worst = [max((of_rank[at] for of_rank in outcomes.values()), default=ChunkOutcome.NOT_DONE) for at in positions]
        flags = {rank: [one is ChunkOutcome.DONE for one in of_rank] for rank, of_rank in outcomes.items()}
        gone = [at for at in positions if worst[at].is_gone]
        with self._service.at_now() as (index, now):
            lost = complete_promotion(index, promotion, flags, gone=gone, now=now, timeout_s=self._pin_s)
            is_up = [index.memory.table.is_ready(ref) for ref in promotion.refs]
        for at in positions:
            if not is_up[at] and not worst[at].is_gone:
                worst[at] = ChunkOutcome.NOT_DONE  # some rank has not done it, or is silent
        if self._disk is not None:
            for at in promotion.disk:
                self._disk.traffic.note_read(worst[at])
            if lost:
                self._disk.delete(lost, timeout_s=_REPAIR_S)
        if self._remote is not None and promotion.remote:
            self._remote.note_loaded({promotion.remote[at]: worst[at] for at in promotion.remote})
        return Promoted(sum(is_up[at] for at in promotion.disk), sum(is_up[at] for at in promotion.remote))

    def _await_others(self, promotion: Promotion[RemoteChunk], deadline: float) -> bool:
        """Wait while other callers bring up chunks of this prompt, and pin them for it too; False if none does."""
        with self._service.at_now() as (index, _):
            must_wait = is_coming_up(index, promotion.keys)
        if must_wait:
            remaining_s = max(0.0, deadline - self._clock())
            self._service.wait_until(lambda index: not is_coming_up(index, promotion.keys), remaining_s)
        with self._service.at_now() as (index, _):
            stop_waiting(index, promotion)
        return must_wait


def _part_of(
    promotions: Sequence[Promotion[RemoteChunk]],
    wanted: Promotion[RemoteChunk],
    on_disk: Mapping[int, RankAnswer],
    from_remote: Mapping[int, RankAnswer],
) -> dict[int, list[ChunkOutcome]]:
    """Per rank that answered, the outcome of each of the wanted promotion's refs."""
    before = promotions[: promotions.index(wanted)]
    disk_begin, remote_begin = sum(len(one.disk) for one in before), sum(len(one.remote) for one in before)
    ranks = set(on_disk) | set(from_remote)
    if wanted.disk:
        ranks &= set(on_disk)
    if wanted.remote:
        ranks &= set(from_remote)
    outcomes: dict[int, list[ChunkOutcome]] = {}
    for rank in ranks:
        of_rank = dict.fromkeys(range(len(wanted.refs)), ChunkOutcome.NOT_DONE)
        for positions, answers, begin in (
            (wanted.disk, on_disk, disk_begin),
            (wanted.remote, from_remote, remote_begin),
        ):
            if positions:  # a rank that could do nothing answered without outcomes
                of_rank_here = answers[rank].outcomes[begin : begin + len(positions)]
                of_rank.update(zip(positions, map(ChunkOutcome, of_rank_here), strict=False))
        outcomes[rank] = list(of_rank.values())
    return outcomes
