"""A world that is closed and built again on the same disk: what is found, what is not, and the limit in real bytes."""

import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lmcache_ray.build import build_world
from lmcache_ray.errors import DirectoryTakenError
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from tests.unit.disk_builders import du
from tests.unit.disk_worlds import MIB, WORLDS, C, DiskWorld, Prompt, disk_world, small_device, spec_of, wait_until
from tests.unit.engine_builders import make_config, make_metadata

__all__ = ("small_device",)

WHOLE = 3 * C
PROMPTS = [Prompt(number) for number in range(4)]


def fill(disk: DiskWorld) -> None:
    """Store the prompts, the first being the least recently used."""
    for prompt in PROMPTS:
        assert disk.store(prompt) == WHOLE


@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("kind", WORLDS)
def test_the_next_life_hits_on_its_first_pass(tmp_path: Path, kind: str, num_groups: int) -> None:
    with disk_world(tmp_path, kind, num_groups) as disk:
        fill(disk)  # and close at once: what waits is written first
    for _ in range(2):
        with disk_world(tmp_path, kind, num_groups) as again:
            assert [again.locate(prompt).disk for prompt in PROMPTS] == [WHOLE] * len(PROMPTS)
            assert [again.retrieved(prompt) for prompt in PROMPTS] == [WHOLE] * len(PROMPTS)
            assert again.traffic.read == len(PROMPTS) * 3 and again.traffic.written == 0
            again.check_idle()
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_prompt_of_more_chunks_than_memory_has_is_found_again_as_far_as_it_fits(tmp_path: Path) -> None:
    long = Prompt(9, num_chunks=10)
    with disk_world(tmp_path, "2 ranks", capacity_chunks=12) as disk:
        assert disk.store(long) == 10 * C
    with disk_world(tmp_path, "2 ranks", capacity_chunks=7) as again:
        assert again.world.engines[0].lookup(long.tokens) == again.retrieved(long) == 7 * C


def test_an_unfull_last_chunk_is_found_again(tmp_path: Path) -> None:
    prompt = Prompt(1, cut=1)
    with disk_world(tmp_path, "2 ranks", save_unfull_chunk=True) as disk:
        assert disk.store(prompt) == WHOLE - 1
    with disk_world(tmp_path, "2 ranks", save_unfull_chunk=True) as again:
        assert again.locate(prompt).disk == again.retrieved(prompt) == WHOLE - 1
        assert again.retrieved(Prompt(1)) == WHOLE - C, "the whole chunk is another"


# -- another world ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What is different in the next life. With `is_layout` even the files look different."""

    config: dict[str, object] = field(default_factory=dict)
    model: str = "m"
    spec: str | None = None
    is_layout: bool = True


CHANGES = {
    "model": Change(model="other", is_layout=False),
    "revision": Change({"model_revision": "2"}, is_layout=False),
    "chunk size": Change({"chunk_size": 2}),
    "dtype": Change(spec=spec_of(1).replace("bfloat16", "float16")),
    "head size": Change(spec=spec_of(1).replace(",4):", ",8):")),
    "heads": Change(spec=spec_of(1).replace(",2,4):", ",1,8):")),
    "layers": Change(spec=spec_of(1).replace("(2,", "(3,").replace(":2", ":3")),
    "layer groups": Change(spec=spec_of(2)),
}


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_world_that_is_another_misses_and_takes_the_room(tmp_path: Path, name: str, kind: str) -> None:
    change = CHANGES[name]
    limit = 0.5 * MIB
    with disk_world(tmp_path, kind, max_local_disk_size=limit) as disk:
        fill(disk)
    (first_layout,) = [path for path in disk.root.iterdir() if path.is_dir()]
    config = {"max_local_disk_size": limit, **change.config}
    with disk_world(tmp_path, kind, model=change.model, spec=change.spec, **config) as other:
        assert [other.locate(prompt).num_tokens for prompt in PROMPTS] == [0] * len(PROMPTS)
        assert [other.retrieved(prompt) for prompt in PROMPTS] == [0] * len(PROMPTS)
        assert other.spilled(PROMPTS[0]) and other.retrieved(PROMPTS[0]) == WHOLE
    with disk_world(tmp_path, kind, max_local_disk_size=limit) as disk:
        assert [disk.retrieved(prompt) for prompt in PROMPTS] == [WHOLE] * len(PROMPTS), "there was room for both"
    with disk_world(tmp_path, kind, model=change.model, spec=change.spec, **config) as other:
        for number in range(100, 140):
            other.spilled(Prompt(number))
            assert du(disk.root) <= WORLDS[kind][0] * 2**19
        assert other.retrieved(Prompt(139)) == WHOLE
        assert first_layout.exists() == (not change.is_layout), "files that nobody can read here are the first to go"
    with disk_world(tmp_path, kind, max_local_disk_size=limit) as disk:
        assert [disk.retrieved(prompt) for prompt in PROMPTS] == [0] * len(PROMPTS)


@pytest.mark.parametrize(("first", "then"), [(1, 3), (3, 1), (2, 3)])
def test_with_mla_any_number_of_ranks_hits(tmp_path: Path, first: int, then: int) -> None:
    with disk_world(tmp_path, "MLA", 2, world_size=first) as disk:
        fill(disk)
    with disk_world(tmp_path, "MLA", 2, world_size=then) as again:
        assert [again.retrieved(prompt) for prompt in PROMPTS] == [WHOLE] * len(PROMPTS)


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (3, 2)])
def test_without_it_another_number_of_ranks_misses(tmp_path: Path, first: int, then: int) -> None:
    with disk_world(tmp_path, world_size=first) as disk:
        fill(disk)
    with disk_world(tmp_path, world_size=then) as again:
        assert [again.retrieved(prompt) for prompt in PROMPTS] == [0] * len(PROMPTS)
        assert again.spilled(PROMPTS[0]) and again.retrieved(PROMPTS[0]) == WHOLE
    with disk_world(tmp_path, world_size=first) as disk:
        assert [disk.retrieved(prompt) for prompt in PROMPTS] == [WHOLE] * len(PROMPTS)


def test_a_rank_whose_directory_is_lost_makes_misses_and_gets_a_new_one(tmp_path: Path) -> None:
    with disk_world(tmp_path, "2 ranks") as disk:
        fill(disk)
        of_ranks = [disk.files(PROMPTS[0], rank)[0].parents[2] for rank in range(2)]
    for path in of_ranks[1].rglob("*.kv"):
        path.unlink()
    with disk_world(tmp_path, "2 ranks") as again:
        assert [again.retrieved(prompt) for prompt in PROMPTS] == [0] * len(PROMPTS)
        assert not list(of_ranks[0].rglob("*.kv")), "halves of chunks take no room"
        fill(again)
    with disk_world(tmp_path, "2 ranks") as last:
        assert [last.retrieved(prompt) for prompt in PROMPTS] == [WHOLE] * len(PROMPTS)


# -- the limit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WORLDS)
def test_the_limit_holds_whatever_is_stored_and_when_it_becomes_smaller(tmp_path: Path, kind: str) -> None:
    for limit in (2**20, 2**18, 2**19):
        with disk_world(tmp_path, kind, 2, max_local_disk_size=limit / 2**30, capacity_chunks=32) as disk:
            assert disk.du() <= limit
            for number in range(60):
                prompt = Prompt(number, num_chunks=8)
                assert disk.store(prompt) == 8 * C
                assert disk.du() <= limit
            assert disk.traffic.evicted > 0
            assert disk.retrieved(prompt) == 8 * C
            assert disk.tiers.problems() == []
        assert du(disk.root) <= limit * len(disk.world.layout.holders)


def test_the_device_never_has_more_than_the_limit_at_any_instant(tmp_path: Path, small_device: Path) -> None:
    """Seen from outside while it happens: a device of its own says at once how many of its blocks are used."""
    limit = 2**18
    seen: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            stat = os.statvfs(small_device)
            seen.append((stat.f_blocks - stat.f_bfree) * stat.f_frsize)

    watching = threading.Thread(target=watch)
    root = small_device / "kv"
    with disk_world(tmp_path, "1 rank", root=root, max_local_disk_size=limit / 2**30) as disk:
        watching.start()
        try:
            for number in range(150):
                assert disk.store(Prompt(number)) == WHOLE
            disk.flush()
        finally:
            is_over.set()
            watching.join()
        assert disk.traffic.evicted > 100 and len(seen) > 100
    assert limit // 4 <= max(seen) <= limit


# -- others -----------------------------------------------------------------------------------------------------------


def test_foreign_files_are_left_alone_and_do_not_count(tmp_path: Path) -> None:
    with disk_world(tmp_path, "2 ranks") as disk:
        fill(disk)
        disk.flush()
        leaf = disk.files(PROMPTS[0], 0)[0].parent
    names = [leaf / "notes.txt", leaf / "x.kv.tmp", leaf.parent / "z.kv", leaf.parents[1] / "README"]
    foreign = [*names, disk.root / "mine"]
    for path in foreign:
        path.write_bytes(b"mine" * 100_000)
    with disk_world(tmp_path, "2 ranks", max_local_disk_size=0.25 * MIB) as again:
        assert [again.retrieved(prompt) for prompt in PROMPTS] == [WHOLE] * len(PROMPTS)
        for number in range(100, 130):
            again.spilled(Prompt(number))
        assert again.world.engines[0].clear().num_removed > 0
    assert [path.read_bytes() for path in foreign] == [b"mine" * 100_000] * len(foreign)


def test_a_second_world_on_the_directory_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    before = threading.active_count()
    with disk_world(tmp_path, "2 ranks", model="first/model") as disk:
        fill(disk)
        named = re.escape(f"in process/first/model in process {os.getpid()}")
        num_threads = threading.active_count()
        for _ in range(3):
            with pytest.raises(DirectoryTakenError, match=named) as caught:
                build_world(
                    make_config(tmp_path, local_disk=str(disk.root), max_local_disk_size=MIB),
                    make_metadata(2, model="second"),
                    layer_groups=parse_kvcache_shape_spec(spec_of(1)),
                )
        assert str(disk.root) in str(caught.value) and "local_disk" in str(caught.value)
        wait_until(lambda: threading.active_count() <= num_threads)  # nothing of the refused ones is left
        disk.flush()
        disk.drop_memory()
        assert [disk.retrieved(prompt) for prompt in PROMPTS] == [WHOLE] * len(PROMPTS)
    with disk_world(tmp_path, "2 ranks", model="second") as second:
        assert [second.retrieved(prompt) for prompt in PROMPTS] == [0] * len(PROMPTS)
    wait_until(lambda: threading.active_count() <= before)


def test_closing_one_rank_ends_the_tiers_and_nobody_else_fails(tmp_path: Path) -> None:
    """Each rank is closed by itself, while the others may still be at work: for them there is less, and no error."""
    with disk_world(tmp_path, "2 ranks") as disk:
        for prompt in PROMPTS:
            disk.spilled(prompt)
        engines, kv = disk.world.engines, disk.world.kvs[1]
        outcomes: list[int] = []

        def work() -> None:
            while not outcomes or (outcomes[-1] >= 0 and len(outcomes) < 200):
                for prompt in PROMPTS:
                    mask = engines[1].retrieve(prompt.tokens, kvcaches=kv, slot_mapping=prompt.rows)
                    outcomes.append(int(mask.sum()))

        working = threading.Thread(target=work)
        working.start()
        engines[0].close()
        working.join()
        assert set(outcomes) <= set(range(0, WHOLE + 1, C)) and len(outcomes) >= 200
    with disk_world(tmp_path, "2 ranks") as again:
        assert [again.retrieved(prompt) for prompt in PROMPTS] == [WHOLE] * len(PROMPTS)
