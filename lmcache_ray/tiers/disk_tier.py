"""The disk tier of a world, seen from where the index is: opens it, and carries out what was planned, on every rank.

Each method makes one round of calls to the ranks, without holding the index's lock, and reports what came of it. A
file that could not be deleted is remembered and deleted with the rank's next deletions: until then it is only room
that is taken, since nobody will ever ask for its generation again.
"""

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from lmcache_ray.errors import DirectoryTakenError
from lmcache_ray.index.cache_index import CacheIndex
from lmcache_ray.index.plans import ChunkRef
from lmcache_ray.index.slot_table import COUNTER_BITS, EPOCH_BITS
from lmcache_ray.index_service import IndexService
from lmcache_ray.storage.remote import RemoteChunk
from lmcache_ray.tiers.calls import RankAnswer, TierCall, TierRanks, problems_of, reading_s
from lmcache_ray.tiers.counts import UnseenClears
from lmcache_ray.tiers.health import TierHealth
from lmcache_ray.tiers.promotion import Promotion
from lmcache_ray.tiers.recovery import rejoin_disk
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.traffic import TierTraffic
from lmcache_ray.tiers.write_behind import DiskWrites, complete_disk_writes, next_disk_writes

_NEW_EPOCHS: Final = 1 << 20
"""Where nothing is found the epoch is drawn, so that files of a rank that is away now are not taken for new ones."""

_FAIR_S: Final = 1.0
"""A rank that is silent for less may just be busy."""
_LAST_EPOCH: Final = (1 << EPOCH_BITS) - 1

MakeDiskIndex = Callable[[int, int], CacheIndex]
"""``make_disk_index(capacity, epoch)``: an empty index of the disk's chunks."""


class DiskTier:
    """Calls of one thread at a time for writing; any thread may read, delete and look."""

    def __init__(
        self,
        service: IndexService,
        ranks: TierRanks,
        make_index: MakeDiskIndex,
        *,
        chunks_at_once: int,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.health: Final = TierHealth()
        self.traffic: Final = TierTraffic()
        self.directories: dict[int, str] = {}
        self.is_cleared: Callable[[bytes], bool] = lambda key: False
        self._service = service
        self._ranks = ranks
        self._make_index = make_index
        self._chunks_at_once = chunks_at_once
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()  # guards `_owed`
        self._unseen_clears = UnseenClears()  # under the index's lock
        self._owed: dict[int, set[ChunkRef]] = {rank: set() for rank in ranks.holders}

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self, timeout_s: float) -> None:
        """Have every rank look into its directory; what all have, and no clear has named, is cached, the rest deleted.

        A directory that cannot be used puts the tier out of order. Raises `DirectoryTakenError` if one belongs to
        another living cluster.
        """
        answers = self._ask(TierCall("open_disk"), timeout_s)
        for answer in answers.values():
            if answer.found.problem_with_owner is not None:
                raise DirectoryTakenError(answer.found.problem_with_owner)
        if not self._judge(answers):
            return
        found = {rank: answer.found for rank, answer in answers.items()}
        self.directories = {rank: one.directory for rank, one in found.items()}
        first, *others = ([entry for entry in one.entries if _epoch_of(entry) < _LAST_EPOCH] for one in found.values())
        everywhere = set(first).intersection(*others)
        everywhere = {entry for entry in everywhere if not self.is_cleared(entry[0])}
        common = [entry for entry in first if entry in everywhere]
        epochs = [_epoch_of(entry) for entries in (first, *others) for entry in entries]
        epoch = max(epochs, default=secrets.randbelow(_NEW_EPOCHS)) + 1
        disk = self._make_index(min(one.capacity for one in found.values()), epoch)
        left_out = {common[position] for position in disk.adopt(common)}
        with self._service.at_now() as (index, _):
            index.disk = disk
            cleared = disk.evict([ref for ref, _ in disk.entries() if self._unseen_clears.cover(ref.key)])
            self._unseen_clears = UnseenClears()
            left_out.update((ref.key, ref.generation) for ref in cleared)
        useless = {rank: set(one.entries).difference(everywhere - left_out) for rank, one in found.items()}
        for rank, entries in useless.items():
            self._owe([ChunkRef(key, 0, generation) for key, generation in entries], (rank,))
        if any(useless.values()):
            self.delete(())
            self._ask(TierCall("open_disk"), timeout_s)  # removes empty directories, if the limit needs it

    def note_cleared(self, keys: Sequence[bytes] | None) -> None:
        """These (None: all) are cleared before anybody has seen what there is. To be called under the index's lock."""
        self._unseen_clears.add(keys)

    def take_back(self, rank: int, timeout_s: float) -> None:
        """A rank's process is new: open its directory again; what it lacks is cached no more, what is unknown goes.

        A directory that cannot be used puts the tier out of order, as anywhere.
        """
        answers = self._ranks.ask({rank: TierCall("open_disk")}, timeout_s=timeout_s)
        answer = answers.get(rank)
        if answer is None or answer.problem is not None:
            problem = f"did not answer in {timeout_s:g} s" if answer is None else answer.problem
            return self.suspend(f"rank {rank}: {problem}")
        self.directories[rank] = answer.found.directory
        with self._service.at_now() as (index, _):
            rejoined = rejoin_disk(index, answer.found.entries)
        self._owe(rejoined.useless, (rank,))
        self.delete(rejoined.lost)
        self.health.try_soon()  # it was out of order at the latest when the rank died in the middle of a call
        self._service.tell_moved()

    # -- down ---------------------------------------------------------------------------------------------------------

    def write_some(self) -> bool:
        """Copy some of the chunks that wait for the disk; False if none does."""
        with self._service.at_now() as (index, now):
            writes = next_disk_writes(index, most=self._chunks_at_once, now=now)
            self.traffic.dropped = index.backlogs[Tier.DISK].num_dropped
        if writes is None:
            self._service.tell_moved()  # something may have been let go
            return False
        call = TierCall("write_disk", (writes.sources, writes.targets, writes.evicted))
        answers: dict[int, RankAnswer] = {}
        try:
            answers = self._ask(call, self._timeout_s)
        finally:
            unwritten = self._note_written(writes, answers)
        if not self._judge(answers):
            self._drop_backlog()
        if unwritten:
            self.delete(unwritten)
        self._service.tell_moved()
        return True

    def _note_written(self, writes: DiskWrites, answers: Mapping[int, RankAnswer]) -> tuple[ChunkRef, ...]:
        """Take in what the ranks have done; the chunks of which some file may be there for nothing, and is owed now."""
        undone = [rank for rank in self._ranks.holders if rank not in answers or answers[rank].problem is not None]
        self._owe(writes.evicted, undone)
        with self._service.at_now() as (index, _):
            unwritten = complete_disk_writes(index, writes, {rank: answer.done for rank, answer in answers.items()})
        self._owe(unwritten, self._ranks.holders)
        self.traffic.written += len(writes.targets) - len(unwritten)
        self.traffic.failed += len(unwritten)
        self.traffic.evicted += len(writes.evicted)
        return unwritten

    def suspend(self, problem: str) -> None:
        """Hold nothing back for the disk until `resume`: what waits is let go, and can be evicted from memory."""
        self.health.failed(problem, self._clock())
        self._drop_backlog()

    def _drop_backlog(self) -> None:
        with self._service.at_now() as (index, _):
            index.suspended.add(Tier.DISK)
            index.backlogs[Tier.DISK].drop_all()
            index.trim()
            self.traffic.dropped = index.backlogs[Tier.DISK].num_dropped
        self._service.tell_moved()

    def resume(self) -> None:
        """Where the disk is out of order, and it is time: see whether it can be used, and take what is stored then."""
        if self.health.is_good or not self.health.may_try(self._clock()):
            return
        with self._service.at_now() as (index, _):
            is_open = index.disk is not None
        if not is_open:
            self.open(self._timeout_s)
        elif not self._judge(self._ask(TierCall("probe_disk"), self._timeout_s)):
            return
        with self._service.at_now() as (index, _):
            if index.disk is None:
                return
            self.health.went_well()
            index.suspended.discard(Tier.DISK)
            index.is_disk_away = False

    # -- up -----------------------------------------------------------------------------------------------------------

    def read(self, promotions: Sequence[Promotion[RemoteChunk]], timeout_s: float) -> dict[int, RankAnswer]:
        """Fill memory's slots of the promotions from the files, as one call to each rank; flags in their order.

        Ranks begin with no file so late that they could not answer in time. What is on a disk that cannot be read are
        misses until `resume` has found it in order: nobody waits for it twice.
        """
        targets = [promotion.refs[at] for promotion in promotions for at in promotion.disk]
        sources = [promotion.disk[at] for promotion in promotions for at in promotion.disk]
        if not targets:
            return {}
        answers = self._ask(TierCall("read_disk", (targets, sources, reading_s(timeout_s))), timeout_s)
        problems = problems_of(answers, self._ranks.holders, timeout_s)
        has_failed = any(answer.problem is not None for answer in answers.values())
        if problems and (has_failed or timeout_s >= _FAIR_S):  # that it can be read says nothing of writing
            self.health.failed(problems[0], self._clock())
            with self._service.at_now() as (index, _):
                index.suspended.add(Tier.DISK)
                index.is_disk_away = True
        return answers

    # -- away ---------------------------------------------------------------------------------------------------------

    def delete(self, chunks: Sequence[ChunkRef], *, timeout_s: float | None = None) -> tuple[int, ...]:
        """Delete files on every rank, and what each owes besides; the ranks that could not delete all of `chunks` yet.

        Waits for `timeout_s` at most (None: as for any call). A file that cannot be deleted stays owed, and keeps no
        other.
        """
        ranks = tuple(self._ranks.holders)
        self._owe(chunks, ranks)
        with self._lock:
            owed = {rank: tuple(self._owed[rank]) for rank in ranks if self._owed[rank]}
        answers = self._ranks.ask(
            {rank: TierCall("delete_disk", (refs,)) for rank, refs in owed.items()},
            timeout_s=self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s),
        )
        with self._lock:
            for rank, answer in answers.items():
                done = zip(owed[rank], answer.done, strict=False)  # a rank with a problem may have answered no flags
                self._owed[rank].difference_update(ref for ref, is_done in done if is_done)
            return tuple(rank for rank in ranks if not self._owed[rank].isdisjoint(chunks))

    def check(self, *, repair: bool, timeout_s: float) -> list[str]:
        """Compare index and files in both directions, reading every file; what was found, a sentence each.

        With `repair`, files of no use are deleted, and chunks without a sound file on every rank are forgotten; those
        that are in memory are written anew when they are used. Meaningful while nothing is stored. Raises nothing: a
        rank that does not answer is a finding.
        """
        with self._service.at_now() as (index, _):
            refs = [] if index.disk is None else [ref for ref, _ in index.disk.entries()]
        expected = [(ref.key, ref.generation) for ref in refs]
        answers = self._ask(TierCall("check_disk", (expected, repair)), timeout_s)
        problems = problems_of(answers, self._ranks.holders, timeout_s)
        findings = [finding for rank in sorted(answers) for finding in answers[rank].checked.findings]
        lost = {chunk for answer in answers.values() for chunk in answer.checked.lost}
        if repair and lost:
            with self._service.at_now() as (index, _):
                assert index.disk is not None  # something was expected
                gone = [ref for ref in refs if (ref.key, ref.generation) in lost]
                forgotten = index.disk.evict(gone, even_leased=True)
                in_memory = [index.memory.table.ready_ref(ref.key) for ref in forgotten]
                index.backlogs[Tier.DISK].miss(ref for ref in in_memory if ref is not None)
            self.delete(forgotten)
        return problems + findings

    def close(self) -> None:
        """Tell the files when their chunks were last used, for the next life."""
        with self._service.at_now() as (index, _):
            refs = [] if index.disk is None else [ref for ref, _ in index.disk.entries()]
        if refs:
            self._ask(TierCall("touch_disk", ([(ref.key, ref.generation) for ref in refs],)), self._timeout_s)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _ask(self, call: TierCall, timeout_s: float) -> dict[int, RankAnswer]:
        return self._ranks.ask(dict.fromkeys(self._ranks.holders, call), timeout_s=timeout_s)

    def _owe(self, chunks: Sequence[ChunkRef], ranks: Sequence[int]) -> None:
        with self._lock:
            for rank in ranks:
                self._owed[rank].update(chunks)

    def _judge(self, answers: Mapping[int, RankAnswer]) -> bool:
        """Whether these answers are good; if not, the tier is out of order until `resume` finds otherwise."""
        problems = problems_of(answers, self._ranks.holders, self._timeout_s)
        if problems:
            self.health.failed(problems[0], self._clock())
        return not problems


def _epoch_of(entry: tuple[bytes, int]) -> int:
    return entry[1] >> COUNTER_BITS
