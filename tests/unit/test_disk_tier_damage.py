"""One file of a prompt that lies on disk is damaged, exchanged or gone: the prompt's beginning before it is found, byte
by byte, the rest is a miss that is counted, and the next store makes it whole again.
"""

import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest

from tests.unit.disk_worlds import MIB, C, DiskWorld, Prompt, disk_world

NUM_CHUNKS = 3
WHOLE = NUM_CHUNKS * C

Damage = Callable[["Victim"], None]

SOME_WORLDS = pytest.mark.parametrize(
    ("kind", "num_groups"), [("1 rank", 1), ("2 ranks", 2), ("2 ranks", 3), ("MLA", 1), ("MLA", 3)]
)


@dataclass(frozen=True)
class Victim:
    """The file of chunk `position` on `rank`; `others` are those of the same rank, `twins` those of the other ranks."""

    path: Path
    rank: int
    position: int
    others: list[Path]
    twins: list[Path]
    marker: Path


# -- what may happen to a file ----------------------------------------------------------------------------------------


def cut_to_half(victim: Victim) -> None:
    os.truncate(victim.path, victim.path.stat().st_size // 2)


def cut_by_a_byte(victim: Victim) -> None:
    os.truncate(victim.path, victim.path.stat().st_size - 1)


def cut_to_zero(victim: Victim) -> None:
    os.truncate(victim.path, 0)


def extended(victim: Victim) -> None:
    with victim.path.open("ab") as file:
        file.write(b"\0" if victim.position else bytes(5000))


def filled_with_zeros(victim: Victim) -> None:
    victim.path.write_bytes(bytes(victim.path.stat().st_size))


def a_pickle(victim: Victim) -> None:
    payload = pickle.dumps(_Toucher(str(victim.marker)))
    whole = victim.path.stat().st_size if victim.position else 0
    victim.path.write_bytes(payload.ljust(whole, b"."))


def another_chunks_file(victim: Victim) -> None:
    shutil.copyfile(victim.others[0], victim.path)


def another_ranks_file(victim: Victim) -> None:
    shutil.copyfile(victim.twins[0], victim.path)


def a_directory(victim: Victim) -> None:
    victim.path.unlink()
    victim.path.mkdir()


def a_link_to_nowhere(victim: Victim) -> None:
    victim.path.unlink()
    victim.path.symlink_to(victim.path.parent / "nowhere")


def a_link_to_another_chunk(victim: Victim) -> None:
    victim.path.unlink()
    victim.path.symlink_to(victim.others[-1])


def a_pipe(victim: Victim) -> None:
    victim.path.unlink()
    os.mkfifo(victim.path)


def deleted(victim: Victim) -> None:
    victim.path.unlink()


def deleted_with_its_directory(victim: Victim) -> None:
    shutil.rmtree(victim.path.parent.parent)


DAMAGES: list[Damage] = [
    cut_to_half, cut_by_a_byte, cut_to_zero, extended, filled_with_zeros, a_pickle, another_chunks_file, a_directory,
    a_link_to_nowhere, a_link_to_another_chunk, a_pipe, deleted, deleted_with_its_directory,
]  # fmt: skip


class _Toucher:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


# -- one bit in each part of a file -----------------------------------------------------------------------------------


def parts_of(file: bytes | bytearray) -> dict[str, range]:
    """Where the parts of a stored chunk are, as the format's page draws them."""
    _, _, header_nbytes, data_nbytes, _ = struct.unpack_from("<8sIIQ16s", file)
    start = len(file) - data_nbytes
    ends = {
        "magic": 8, "version": 12, "header length": 16, "data length": 24, "data checksum": 40,
        "header": 40 + header_nbytes, "padding": start - 16, "head checksum": start, "data": len(file),
    }  # fmt: skip
    begins = [0, *ends.values()]
    return {name: range(begin, end) for (name, end), begin in zip(ends.items(), begins, strict=False)}


PARTS = list(parts_of(struct.pack("<8sIIQ16s", b"", 1, 0, 0, b"").ljust(64)))


def with_another_bit(part: str) -> Damage:
    """One bit in the first, a middle or the last byte of a part; another one in each file."""

    def flip(victim: Victim) -> None:
        file = bytearray(victim.path.read_bytes())
        places = parts_of(file)[part]
        assert len(places) > 0, f"this file has no {part}: give the test another layout"
        where = (victim.rank + victim.position) % 3
        file[places[where * (len(places) - 1) // 2]] ^= 1 << (len(part) + 3 * victim.position) % 8
        victim.path.write_bytes(file)

    return flip


# -- the tests --------------------------------------------------------------------------------------------------------


def check_damage(disk: DiskWorld, prompt: Prompt, damage: Damage, marker: Path) -> None:
    """`damage` one file after the other of a prompt that is whole again each time."""
    holders = disk.world.layout.holders
    for rank in holders:
        for position in range(NUM_CHUNKS):
            disk.spilled(prompt)
            paths = disk.files(prompt, rank)
            path = paths.pop(position)
            twins = [disk.files(prompt, other)[position] for other in holders if other != rank]
            damage(Victim(path, rank, position, others=paths, twins=twins, marker=marker))
            check_loss(disk, prompt, position)
    assert not marker.exists()


def check_loss(disk: DiskWorld, prompt: Prompt, position: int) -> None:
    """Chunk `position` is lost, and nothing before it; the next store repairs it."""
    before = disk.traffic
    assert disk.retrieved(prompt) == position * C
    after = disk.traffic
    lost = (after.missing + after.damaged + after.unreadable) - (before.missing + before.damaged + before.unreadable)
    assert 1 <= lost <= NUM_CHUNKS - position
    assert after.read - before.read == NUM_CHUNKS - lost
    assert disk.retrieved(prompt) == disk.world.engines[0].lookup(prompt.tokens) == position * C
    assert astuple(disk.traffic) == astuple(after), "what is lost is forgotten at once"
    assert disk.store(prompt) == WHOLE
    assert disk.retrieved(prompt) == WHOLE
    disk.flush()
    disk.drop_memory()
    assert disk.retrieved(prompt) == WHOLE, "from disk"
    disk.check_idle()
    assert disk.tiers.problems() == []


def check_damage_in_two_lives(directory: Path, kind: str, num_groups: int, damage: Damage) -> None:
    prompt = Prompt(1)
    with disk_world(directory, kind, num_groups) as disk:
        check_damage(disk, prompt, damage, directory / "marker")
    with disk_world(directory, kind, num_groups) as again:
        assert again.locate(prompt).disk == again.retrieved(prompt) == WHOLE, "what was repaired stays so"


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@SOME_WORLDS
def test_a_file_that_is_not_what_it_should_be(tmp_path: Path, kind: str, num_groups: int, damage: Damage) -> None:
    check_damage_in_two_lives(tmp_path, kind, num_groups, damage)


@pytest.mark.parametrize("part", PARTS)
@SOME_WORLDS
def test_a_file_in_which_one_bit_is_another(tmp_path: Path, kind: str, num_groups: int, part: str) -> None:
    check_damage_in_two_lives(tmp_path, kind, num_groups, with_another_bit(part))


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_the_file_of_another_rank(tmp_path: Path, num_groups: int) -> None:
    check_damage_in_two_lives(tmp_path, "2 ranks", num_groups, another_ranks_file)


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks", "MLA"])
def test_the_file_of_an_earlier_writing_of_the_same_chunk(tmp_path: Path, kind: str) -> None:
    """Whole, and of the right key: only its generation tells, and here the bytes would."""
    prompt = Prompt(3)
    with disk_world(tmp_path, kind) as disk:
        earlier = [path.read_bytes() for path in disk.files(disk.spilled(prompt), 0)]
        disk.world.engines[0].clear()
        for kv in disk.kvs:
            for tensor in kv:
                tensor.copy_(tensor.flip(1))
        paths = disk.files(disk.spilled(prompt), 0)
        assert [path.stat().st_size for path in paths] == [len(file) for file in earlier]
        paths[1].write_bytes(earlier[1])
        check_loss(disk, prompt, 1)


@pytest.mark.parametrize("position", range(NUM_CHUNKS))
@pytest.mark.parametrize("kind", ["1 rank", "2 ranks", "MLA"])
def test_a_file_that_vanishes_between_lookup_and_retrieve(tmp_path: Path, kind: str, position: int) -> None:
    prompt = Prompt(4)
    with disk_world(tmp_path, kind) as disk:
        disk.spilled(prompt)
        engine = disk.world.engines[0]
        assert engine.lookup(prompt.tokens, lookup_id="mine", pin=True) == WHOLE
        disk.files(prompt, disk.world.layout.holders[-1])[position].unlink()
        assert disk.retrieved(prompt) == position * C
        assert disk.traffic.missing >= 1
        engine.lookup_unpin("mine")
        assert engine.lookup(prompt.tokens) == position * C
        assert disk.store(prompt) == disk.retrieved(prompt) == WHOLE


def test_files_that_vanish_before_they_are_evicted(tmp_path: Path) -> None:
    """Room for a few prompts: some are deleted behind the tier's back, and one file is exchanged for a directory."""
    num_prompts = 40
    with disk_world(tmp_path, "2 ranks", max_local_disk_size=0.25 * MIB) as disk:
        for number in range(num_prompts):
            for path in disk.files(disk.spilled(Prompt(number)), number % 2)[: number % 4]:
                path.unlink()
                if number == 1:
                    path.mkdir()
        assert disk.traffic.evicted > num_prompts, "the test tests nothing"
        assert (disk.traffic.failed, disk.tiers.problems()) == (0, [])
        assert disk.retrieved(Prompt(num_prompts - 1)) == 0
        assert disk.retrieved(Prompt(num_prompts - 4)) == WHOLE
        disk.check_idle()


@pytest.mark.parametrize("what", ["the root", "a layout's", "a rank's", "what is in it"])
@pytest.mark.parametrize("kind", ["1 rank", "2 ranks", "MLA"])
def test_a_directory_that_is_removed_while_it_is_used(tmp_path: Path, kind: str, what: str) -> None:
    prompts = [Prompt(number) for number in range(5, 8)]
    with disk_world(tmp_path, kind) as disk:
        for prompt in prompts:
            disk.spilled(prompt)
        of_rank = disk.files(prompts[0], disk.world.layout.holders[-1])[0].parents[2]
        if what == "what is in it":
            for path in of_rank.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            shutil.rmtree({"the root": disk.root, "a layout's": of_rank.parent, "a rank's": of_rank}[what])
        assert disk.retrieved(prompts[0]) == 0
        assert disk.traffic.missing == NUM_CHUNKS
        assert disk.spilled(prompts[0]) and disk.retrieved(prompts[0]) == WHOLE
        assert disk.retrieved(prompts[1]) == 0
        assert disk.store(prompts[1]) == WHOLE
        assert disk.world.engines[0].clear(prompts[2].tokens).pending == ()
        assert disk.tiers.problems() == []
        disk.flush()
        disk.check_idle()
    with disk_world(tmp_path, kind) as again:
        assert [again.retrieved(prompt) for prompt in prompts] == [WHOLE, WHOLE, 0]


@pytest.mark.parametrize(
    "damage", [cut_to_half, with_another_bit("header"), with_another_bit("data"), a_pickle, deleted]
)
@pytest.mark.parametrize("kind", ["1 rank", "2 ranks", "MLA"])
def test_a_file_that_is_damaged_between_two_lives(tmp_path: Path, kind: str, damage: Damage) -> None:
    prompts = [Prompt(number) for number in range(NUM_CHUNKS)]
    with disk_world(tmp_path, kind) as disk:
        rank = disk.world.layout.holders[-1]
        paths = [disk.files(disk.spilled(prompt), rank) for prompt in prompts]
    for position, files in enumerate(paths):
        damage(Victim(files[position], 0, position, [], [], tmp_path / "marker"))
    with disk_world(tmp_path, kind) as again:
        assert [again.retrieved(prompt) for prompt in prompts] == [position * C for position in range(NUM_CHUNKS)]
        assert [again.store(prompt) for prompt in prompts] == [WHOLE] * NUM_CHUNKS
    assert not (tmp_path / "marker").exists()
    with disk_world(tmp_path, kind) as last:
        assert [last.retrieved(prompt) for prompt in prompts] == [WHOLE] * NUM_CHUNKS
