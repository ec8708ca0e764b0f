"""What a user can say about chunks on disk: where they are, where to look, what to keep and what to forget; and a disk
without memory above it.
"""

import copy
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_ray.clearing import ClearResult
from lmcache_ray.tiers.hits import TierHits
from tests.unit.disk_worlds import MIB, NUM_ROWS, WORLDS, C, DiskWorld, Prompt, disk_world, wait_until
from tests.unit.engine_builders import poison

WHOLE = 3 * C
HOLDERS = {"1 rank": [True], "2 ranks": [True, True], "MLA": [True, False]}
ON_DISK, IN_MEMORY, BOTH = Prompt(1), Prompt(2), Prompt(3)


def spread_out(disk: DiskWorld) -> None:
    """One prompt on disk alone, one in memory alone, one in both."""
    disk.spilled(ON_DISK)
    for prompt in (IN_MEMORY, BOTH):
        assert disk.store(prompt) == WHOLE
        disk.flush()
    disk.world.engines[0].clear(IN_MEMORY.tokens, locations=["disk"])


@pytest.mark.parametrize("kind", WORLDS)
def test_where_chunks_are_and_where_to_look(tmp_path: Path, kind: str) -> None:
    with disk_world(tmp_path, kind) as disk:
        spread_out(disk)
        engine = disk.world.engines[0]
        assert disk.locate(ON_DISK) == TierHits(WHOLE, cpu=0, disk=WHOLE, remote=0)
        assert disk.locate(IN_MEMORY) == disk.locate(BOTH) == TierHits(WHOLE, cpu=WHOLE, disk=0, remote=0)
        everywhere = {"cpu": [0, WHOLE, WHOLE], "disk": [WHOLE, 0, WHOLE], "remote": [0, 0, 0]}
        for tier, wanted in everywhere.items():
            found = [engine.lookup(prompt.tokens, search_range=[tier]) for prompt in (ON_DISK, IN_MEMORY, BOTH)]
            assert found == wanted, tier
        assert engine.lookup(ON_DISK.tokens, search_range=[]) == 0
        assert engine.lookup(ON_DISK.tokens, search_range=["LocalCPUBackend", "LocalDiskBackend"]) == WHOLE
        assert disk.traffic.read == 0, "looking moves nothing"
        assert disk.retrieved(ON_DISK) == WHOLE
        assert disk.locate(ON_DISK) == TierHits(WHOLE, cpu=WHOLE, disk=0, remote=0)


def test_a_prompt_that_lies_in_both_by_turns(tmp_path: Path) -> None:
    """Its beginning in memory, its middle on disk, its end in memory: one hit, and only the middle is read."""
    long, middle = Prompt(4, num_chunks=6), Prompt(4, num_chunks=4)
    with disk_world(tmp_path, "2 ranks") as disk:
        assert disk.spilled(middle) and disk.store(Prompt(4, num_chunks=2)) == 2 * C
        disk.flush()
        assert disk.retrieved(Prompt(4, num_chunks=1)) == C
        assert disk.store(long) == 6 * C
        assert disk.locate(long) == TierHits(6 * C, cpu=3 * C, disk=3 * C, remote=0)
        before = disk.traffic.read
        assert disk.world.engines[0].lookup(long.tokens, search_range=["cpu"]) == C
        assert disk.retrieved(long) == 6 * C
        assert disk.traffic.read - before == 3
        disk.flush()
        disk.check_idle()


@pytest.mark.parametrize("kind", WORLDS)
def test_clear_counts_for_each_tier_and_rank_what_went_and_what_stayed(tmp_path: Path, kind: str) -> None:
    def per_rank(count: int) -> list[int]:
        return [count if holds else 0 for holds in HOLDERS[kind]]

    with disk_world(tmp_path, kind) as disk:
        spread_out(disk)
        engine, nothing = disk.world.engines[0], per_rank(0)
        none, all_three = {"cpu": nothing, "disk": nothing}, {"cpu": nothing, "disk": per_rank(3)}
        assert engine.clear(BOTH.tokens, locations=["disk"]) == ClearResult(all_three, none, (), 3, 0)
        assert not list(disk.root.rglob(f"{engine.prompt(BOTH.tokens).keys[0].hex()}*"))
        assert disk.retrieved(BOTH) == WHOLE, "in memory it stays"
        assert engine.lookup(ON_DISK.tokens, lookup_id="mine", pin=True) == WHOLE
        result = engine.clear()
        assert result.removed == {"cpu": per_rank(6), "disk": nothing}
        assert result.kept == all_three
        assert (result.num_removed, result.num_kept, result.pending) == (6, 3, ())
        engine.lookup_unpin("mine")
        assert disk.retrieved(ON_DISK) == WHOLE
        assert engine.clear() == ClearResult({"cpu": per_rank(3), "disk": per_rank(3)}, none, (), 3, 0)
        assert not list(disk.root.rglob("*.kv"))
    with disk_world(tmp_path, kind) as again:
        assert [again.retrieved(prompt) for prompt in (ON_DISK, IN_MEMORY, BOTH)] == [0, 0, 0], "cleared is cleared"


def test_what_is_cleared_while_it_is_written_does_not_appear(tmp_path: Path) -> None:
    with disk_world(tmp_path, "2 ranks", capacity_chunks=64) as disk:
        for round_ in range(20):
            prompts = [Prompt(100 * round_ + number) for number in range(10)]
            for prompt in prompts:
                assert disk.store(prompt) == WHOLE
            disk.world.engines[0].clear()  # some are written, some are being written, some wait
            assert [disk.locate(prompt).num_tokens for prompt in prompts] == [0] * 10
        disk.flush()
        disk.check_idle()
        wait_until(lambda: not [path for path in disk.root.rglob("*") if path.suffix in (".kv", ".tmp")])


@pytest.mark.parametrize("kind", WORLDS)
def test_what_is_pinned_stays_in_memory_and_on_disk_until_it_is_unpinned(tmp_path: Path, kind: str) -> None:
    with disk_world(tmp_path, kind, max_local_disk_size=0.25 * MIB) as disk:
        assert disk.store(ON_DISK) == WHOLE
        disk.flush()
        engine = disk.world.engines[0]
        assert engine.pin(ON_DISK.tokens) == WHOLE
        for number in range(100, 140):
            assert disk.store(Prompt(number)) == WHOLE
        disk.flush()
        assert disk.traffic.evicted > 0
        assert [engine.lookup(ON_DISK.tokens, search_range=[tier]) for tier in ("cpu", "disk")] == [WHOLE, WHOLE]
        assert engine.clear(ON_DISK.tokens).num_kept == 3
        assert disk.retrieved(ON_DISK) == WHOLE and disk.traffic.read == 0
        assert engine.unpin(ON_DISK.tokens) and not engine.unpin(ON_DISK.tokens)
        for number in range(200, 240):
            assert disk.store(Prompt(number)) == WHOLE
        disk.flush()
        assert disk.retrieved(ON_DISK) == 0
        disk.check_idle()


def test_what_was_used_last_stays_on_disk_the_longest(tmp_path: Path) -> None:
    """Uses count on disk too, also those that memory served."""
    used, old = [Prompt(number) for number in range(2)], [Prompt(number) for number in range(10, 15)]
    with disk_world(tmp_path, "2 ranks", max_local_disk_size=0.5 * MIB, capacity_chunks=100) as disk:
        for prompt in (*used, *old):
            assert disk.store(prompt) == WHOLE
        disk.flush()
        assert [disk.retrieved(prompt) for prompt in used] == [WHOLE] * 2
        assert disk.traffic.read == 0
        disk.drop_memory()
        number = 100
        while all(disk.locate(prompt).num_tokens for prompt in old):
            disk.spilled(Prompt(number := number + 1))
        assert [disk.locate(prompt).disk for prompt in used] == [WHOLE] * 2
        assert disk.locate(old[-1]).disk == WHOLE, "the first of the old ones went first"


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    used, old = [Prompt(number) for number in range(2)], [Prompt(number) for number in range(10, 15)]
    with disk_world(tmp_path, "2 ranks", max_local_disk_size=0.5 * MIB) as disk:
        for prompt in (*used, *old):
            disk.spilled(prompt)
        assert [disk.retrieved(prompt) for prompt in used] == [WHOLE] * 2
    with disk_world(tmp_path, "2 ranks", max_local_disk_size=0.5 * MIB) as again:
        number = 100
        while all(again.locate(prompt).num_tokens for prompt in old):
            again.spilled(Prompt(number := number + 1))
        assert [again.locate(prompt).num_tokens for prompt in used] == [WHOLE] * 2
        assert again.locate(old[-1]).num_tokens == WHOLE, "the first of the old ones went first"


# -- disk without memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("kind", WORLDS)
def test_without_local_cpu_memory_is_a_passage(tmp_path: Path, kind: str, num_groups: int) -> None:
    with disk_world(tmp_path, kind, num_groups, local_cpu=False, capacity_chunks=8) as disk:
        prompts = [Prompt(number) for number in range(10)]
        for prompt in prompts:
            assert disk.store(prompt) == WHOLE
        disk.flush()
        assert [disk.locate(prompt) for prompt in prompts] == [TierHits(WHOLE, 0, WHOLE, 0)] * 10
        for _ in range(2):
            assert [disk.retrieved(prompt) for prompt in prompts] == [WHOLE] * 10
            with disk.service.at_now() as (index, _):
                assert index.memory.counts().ready == 0
        assert disk.traffic.read >= 2 * 10 * 3
        disk.check_idle()
    with disk_world(tmp_path, kind, num_groups, local_cpu=False, capacity_chunks=8) as again:
        assert [again.retrieved(prompt) for prompt in prompts] == [WHOLE] * 10


def test_without_local_cpu_a_disk_that_is_lost_leaves_misses(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("mine")
    with disk_world(tmp_path, local_cpu=False, capacity_chunks=8) as disk:
        for number in range(10):
            disk.store(Prompt(number))
            assert disk.retrieved(Prompt(number)) in (0, WHOLE)
        (problem,) = disk.world.engines[0].problems()
        assert "Not a directory" in problem


# -- many at once -----------------------------------------------------------------------------------------------------

NUM_THREADS, NUM_OPERATIONS = 4, 60


class Worker(threading.Thread):
    """Stores and retrieves prompts of its own choice, rank by rank, in KV of its own.

    What a chunk's KV must be follows from all tokens up to its end, so any byte of another chunk shows.
    """

    def __init__(self, disk: DiskWorld, number: int) -> None:
        super().__init__()
        self._disk = disk
        self._random = random.Random(number)
        self._kvs = copy.deepcopy(disk.kvs)
        self.failures: list[str] = []
        self.num_hits = 0

    def run(self) -> None:
        try:
            for _ in range(NUM_OPERATIONS):
                head, tail = self._random.randrange(2), self._random.randrange(6)
                tokens = Prompt(head, self._random.randint(1, 3)).tokens + Prompt(10 + tail, 4).tokens
                self._random.choice([self._store, self._retrieve])(tokens)
        except BaseException as error:  # the outermost frame of a thread: recorded, and the test fails on it
            self.failures.append(repr(error))

    def _store(self, tokens: list[int]) -> None:
        rows = np.arange(len(tokens))
        for rank, (engine, kv) in enumerate(zip(self._disk.world.engines, self._kvs, strict=True)):
            for layer, tensor in enumerate(kv):
                raw(tensor)[:, rows] = bytes_of(tokens, rank, layer, tensor)
            engine.store(tokens, kvcaches=kv, slot_mapping=rows)

    def _retrieve(self, tokens: list[int]) -> None:
        rows = np.arange(len(tokens)) + 32
        for rank, (engine, kv) in enumerate(zip(self._disk.world.engines, self._kvs, strict=True)):
            poison(kv)
            num_hits = int(engine.retrieve(tokens, kvcaches=kv, slot_mapping=rows).sum())
            self.num_hits += num_hits
            for layer, tensor in enumerate(kv):
                wanted = bytes_of(tokens, rank, layer, tensor)[:, :num_hits]
                if not np.array_equal(raw(tensor)[:, rows[:num_hits]], wanted):
                    self.failures.append(f"rank {rank}, layer {layer}: other bytes than those of {tokens}")


def raw(tensor: torch.Tensor) -> np.ndarray:
    """uint8 ``[kv_size, num_rows, row_nbytes]``."""
    return tensor.view(torch.uint8).numpy().reshape(tensor.shape[0], NUM_ROWS, -1)


def bytes_of(tokens: list[int], rank: int, layer: int, tensor: torch.Tensor) -> np.ndarray:
    """What these tokens' rows of a layer are."""
    kv_size, _, row_nbytes = raw(tensor).shape
    chunks = [
        np.random.default_rng([*tokens[: begin + C], rank, layer]).integers(0, 256, (kv_size, C, row_nbytes), np.uint8)
        for begin in range(0, len(tokens), C)
    ]
    return np.concatenate(chunks, axis=1)


@pytest.mark.parametrize("local_cpu", [True, False])
@pytest.mark.parametrize("kind", ["1 rank", "2 ranks"])
def test_threads_over_a_memory_of_a_few_chunks(tmp_path: Path, kind: str, local_cpu: bool) -> None:
    """And over a disk of a few more, so that all of it moves all the time."""
    with disk_world(
        tmp_path, kind, 2, local_cpu=local_cpu, capacity_chunks=20, max_local_disk_size=0.4 * MIB, call_timeout_s=60
    ) as disk:
        workers = [Worker(disk, number) for number in range(NUM_THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.failures for worker in workers] == [[]] * NUM_THREADS
        assert sum(worker.num_hits for worker in workers) > 100
        assert min(disk.traffic.read, disk.traffic.evicted) > 0, "the test tests nothing"
        assert (disk.traffic.damaged, disk.traffic.unreadable, disk.tiers.problems()) == (0, 0, [])
        disk.flush()
        disk.check_idle()
