"""The remote tier of a world, seen from where the index is: what is there, and copying down and up on every rank.

The store is shared with other clusters and keeps its own time, so nothing of it is remembered here: it is asked when a
prompt goes on beyond what memory and disk have. A store that does not answer is left alone until a probe succeeds.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lmcache_ray.errors import StorageError, StorageUnavailableError
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index_service import IndexService
from lmcache_ray.storage.remote import RemoteChunk, RemoteStore
from lmcache_ray.tiers.calls import ChunkOutcome, RankAnswer, TierCall, TierRanks, problems_of, reading_s
from lmcache_ray.tiers.health import TierHealth
from lmcache_ray.tiers.promotion import Promotion
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.traffic import TierTraffic
from lmcache_ray.tiers.write_behind import complete_remote_writes, next_remote_writes

_SPARE_SHARE: Final = 20
"""Of the limit: one part in so many is freed beyond what is needed, since listing is slow; more is not put at once."""

_MANIFEST_NBYTES: Final = 2048  # at most


class RemoteTier:
    """Puts of one thread at a time; any thread may find, load and clear.

    `max_nbytes` is the limit of our own, if any, and `chunk_nbytes` what the objects of a chunk take at most.
    """

    def __init__(
        self,
        service: IndexService,
        ranks: TierRanks,
        store: RemoteStore,
        *,
        max_nbytes: int | None,
        chunk_nbytes: int,
        chunks_at_once: int,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.health: Final = TierHealth()
        self._traffic: Final = TierTraffic()
        self._service = service
        self._ranks = ranks
        self._store = store
        self._chunks = store.chunks
        self._max_nbytes = max_nbytes
        self._chunk_nbytes = chunk_nbytes
        self._chunks_at_once = chunks_at_once
        if max_nbytes is not None:
            self._chunks_at_once = max(1, min(chunks_at_once, max_nbytes // (_SPARE_SHARE * chunk_nbytes)))
        self._timeout_s = timeout_s
        self._clock = clock
        self._room_nbytes = 0
        self._is_out_of_reach = False  # of some rank
        self._committing = threading.Lock()  # a clear and a commit exclude each other; guards `_under_way`
        self._under_way: set[bytes] = set()  # keys that are being put and were not cleared since

    @property
    def is_asked(self) -> bool:
        """Whether the store answers here and on every rank, as far as is known."""
        return self._store.backend.problem is None and not self._is_out_of_reach

    @property
    def traffic(self) -> TierTraffic:
        """What has moved so far. A manifest that is damaged counts each time that it is found."""
        num_damaged = self._traffic.damaged + self._chunks.num_damaged_manifests
        return replace(self._traffic, damaged=num_damaged)

    # -- up -----------------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], *, timeout_s: float) -> dict[bytes, RemoteChunk]:
        """The leading chunks of `keys` that are there; none if the store does not answer in time."""
        if not keys or timeout_s <= 0:
            return {}
        found: dict[bytes, RemoteChunk] = {}
        try:
            for chunk in self._store.within(timeout_s).find(keys):
                if chunk is None:
                    break
                found[chunk.key] = chunk
        except StorageUnavailableError:
            pass  # too slow for this caller; whether it is out of order is for its guard to say
        except StorageError as error:
            self.health.failed(str(error), self._clock())
        return found

    def load(self, promotions: Sequence[Promotion[RemoteChunk]], timeout_s: float) -> dict[int, RankAnswer]:
        """Fill memory's slots of the promotions from the store, as one call to each rank; flags in their order.

        Ranks end in time to answer what came by then.
        """
        targets = [promotion.refs[at] for promotion in promotions for at in promotion.remote]
        sources = [promotion.remote[at] for promotion in promotions for at in promotion.remote]
        if not targets:
            return {}
        answers = self._ask(TierCall("load_remote", (targets, sources, reading_s(timeout_s))), timeout_s)
        problems = problems_of(answers, (), timeout_s)  # a rank that is silent says nothing of the store
        if problems:
            self._is_out_of_reach = True
            self.health.failed(problems[0], self._clock())
        return answers

    def note_loaded(self, outcomes: Mapping[RemoteChunk, ChunkOutcome]) -> None:
        """Count what became of chunks, the worst of each over all ranks, and remove those that are of no use."""
        useless = []
        for chunk, outcome in outcomes.items():
            self._traffic.note_read(outcome)
            if outcome in (ChunkOutcome.MISSING, ChunkOutcome.DAMAGED):
                useless.append(chunk)
        if useless:
            try:
                self._chunks.remove(useless)
            except StorageError as error:  # then the next one that finds them removes them
                self.health.failed(str(error), self._clock())

    # -- down ---------------------------------------------------------------------------------------------------------

    def put_some(self) -> bool:
        """Copy some of the chunks that wait for the store, as far as it has not got them; False if none does."""
        with self._committing, self._service.at_now() as (index, _):
            backlog = index.backlogs[Tier.REMOTE]
            waiting = next_remote_writes(index, most=self._chunks_at_once)
            self._under_way = {ref.key for ref in waiting}
        if not waiting:
            return False
        missed, num_put = set(waiting), 0
        try:
            is_there = self._chunks.has([ref.key for ref in waiting])
            missed.difference_update(ref for ref, there in zip(waiting, is_there, strict=True) if there)
            put = self._commit(self._put([ref for ref in waiting if ref in missed]))
            missed.difference_update(put)
            num_put = len(put)
        except StorageError as error:
            self.suspend(str(error))
        finally:
            with self._service.at_now() as (index, _):
                complete_remote_writes(index, waiting, missed=missed)
                self._traffic.dropped = backlog.num_dropped
        self._traffic.written += num_put
        self._traffic.failed += len(missed)
        self._service.tell_moved()
        return True

    def _put(self, refs: Sequence[ChunkRef]) -> list[ChunkRef]:
        """Have the ranks put their shards, some at a time since each call has its deadline; what all of them did.

        What stands behind the first that found no room, or that failed for all, is left out.
        """
        whole: list[ChunkRef] = []
        for begin in range(0, len(refs), self._chunks_at_once):
            some = refs[begin : begin + self._chunks_at_once]
            if not self._make_room(len(some) * self._chunk_nbytes, unseen_nbytes=len(whole) * _MANIFEST_NBYTES):
                break
            answers = self._ask(TierCall("put_remote", (some,)), self._timeout_s)
            done = [answers[rank].done if rank in answers else [] for rank in self._ranks.holders]
            whole += [ref for at, ref in enumerate(some) if all(at < len(flags) and flags[at] for flags in done)]
            problems = problems_of(answers, self._ranks.holders, self._timeout_s)
            if problems:
                self.suspend(problems[0])
                break
        return whole

    def suspend(self, problem: str) -> None:
        """Hold nothing back for the store until `resume`."""
        self.health.failed(problem, self._clock())
        with self._service.at_now() as (index, _):
            index.suspended.add(Tier.REMOTE)
            index.backlogs[Tier.REMOTE].drop_all()
            index.trim()

    def resume(self) -> None:
        """Ask the store how it is, if it was out of order and it is time: from here and from every rank.

        Whether it is time for a store that does not answer is known to what guards it, here and there.
        """
        problem = self._store.backend.problem
        if problem is not None and self.health.is_good:  # calls have failed for which nobody waited any more
            self.health.failed(problem, self._clock())
        if self.health.is_good or not self._store.backend.probe() or not self.health.may_try(self._clock()):
            return
        answers = self._ask(TierCall("probe_remote"), self._timeout_s)
        problems = problems_of(answers, self._ranks.holders, self._timeout_s)
        if problems:
            self.health.failed(problems[0], self._clock())
            return
        self.health.went_well()
        self._is_out_of_reach = False
        with self._service.at_now() as (index, _):
            index.suspended.discard(Tier.REMOTE)

    # -- away ---------------------------------------------------------------------------------------------------------

    def clear(self, keys: Sequence[bytes] | None) -> set[bytes]:
        """Delete these chunks, or all of this model and layout with None, whichever cluster stored them; which.

        What waits to go there, or is on its way, does not count when it comes. Raises `StorageError` if the store does
        not do it.
        """
        with self._committing:
            with self._service.at_now() as (index, _):
                index.withhold(Tier.REMOTE, keys)
            self._under_way.difference_update(list(self._under_way) if keys is None else keys)
            if keys is None:
                return self._chunks.remove_all()
            is_there = self._chunks.has(keys)
            present = [key for key, there in zip(keys, is_there, strict=True) if there]
            self._chunks.remove(present)
            return set(present)

    def close(self) -> None:
        """Give the connections up."""
        self._chunks.close()

    def _commit(self, refs: Sequence[ChunkRef]) -> Sequence[ChunkRef]:
        """Make those of `refs` count that have not been cleared since they were planned; which."""
        with self._committing:
            with self._service.at_now() as (index, _):
                current = [ref for ref in refs if ref.key in self._under_way and index.memory.table.is_ready(ref)]
            self._chunks.commit([(ref.key, ref.generation) for ref in current])
        return current

    def _make_room(self, nbytes: int, *, unseen_nbytes: int) -> bool:
        """Keep the limit of our own, if there is one; False if so much can never fit.

        `unseen_nbytes` are still to come for what has room already.
        """
        if self._max_nbytes is None:
            return True
        if self._room_nbytes < nbytes:
            spare = self._max_nbytes // _SPARE_SHARE
            limit_nbytes = self._max_nbytes - unseen_nbytes
            made = self._chunks.make_room(nbytes + spare, limit_nbytes)
            if not made.fits:
                made = self._chunks.make_room(nbytes, limit_nbytes)
            self._traffic.evicted += made.num_chunks
            self._room_nbytes = limit_nbytes - made.used_nbytes
            if not made.fits:
                return False
        self._room_nbytes -= nbytes
        return True

    def _ask(self, call: TierCall, timeout_s: float) -> dict[int, RankAnswer]:
        return self._ranks.ask(dict.fromkeys(self._ranks.holders, call), timeout_s=timeout_s)
