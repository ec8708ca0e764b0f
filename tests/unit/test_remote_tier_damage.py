"""One object of a prompt that lies in the remote store is damaged, exchanged or gone: the prompt's beginning before it
is found, byte by byte, the rest is a miss that is counted, and the next store makes it whole again.
"""

import pickle
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.disk_worlds import C, Prompt
from tests.unit.remote_worlds import RemoteWorld, remote_world, users_store
from tests.unit.remote_worlds import users_url as users_url  # a fixture

NUM_CHUNKS = 3
WHOLE = NUM_CHUNKS * C
PROMPT, OTHER = Prompt(1), Prompt(2)


@dataclass(frozen=True)
class Victim:
    """An object of chunk `position`; `other` is the same part of another chunk, `marker` what nobody may touch."""

    path: Path
    position: int
    other: Path
    marker: Path


def cut_to_half(victim: Victim) -> None:
    victim.path.write_bytes(victim.path.read_bytes()[: victim.path.stat().st_size // 2])


def cut_to_zero(victim: Victim) -> None:
    victim.path.write_bytes(b"")


def extended(victim: Victim) -> None:
    victim.path.write_bytes(victim.path.read_bytes() + b"\0")


def filled_with_zeros(victim: Victim) -> None:
    victim.path.write_bytes(bytes(victim.path.stat().st_size))


def a_bit_at_the_beginning(victim: Victim) -> None:
    flip(victim.path, 0)


def a_bit_in_a_length(victim: Victim) -> None:
    flip(victim.path, 13)


def a_bit_in_the_middle(victim: Victim) -> None:
    flip(victim.path, victim.path.stat().st_size // 3)


def a_bit_at_the_end(victim: Victim) -> None:
    flip(victim.path, victim.path.stat().st_size - 2)


def a_pickle(victim: Victim) -> None:
    victim.path.write_bytes(pickle.dumps(_Toucher(str(victim.marker))))


def anothers(victim: Victim) -> None:
    shutil.copyfile(victim.other, victim.path)


def deleted(victim: Victim) -> None:
    victim.path.unlink()


DAMAGES: list[Callable[[Victim], None]] = [
    cut_to_half, cut_to_zero, extended, filled_with_zeros, a_bit_at_the_beginning, a_bit_in_a_length,
    a_bit_in_the_middle, a_bit_at_the_end, a_pickle, anothers, deleted,
]  # fmt: skip
EACH_DAMAGE = [pytest.param("2 ranks", 2, damage, id=damage.__name__) for damage in DAMAGES]
IN_EACH_WORLD = [
    pytest.param(kind, num_groups, damage, id=f"{damage.__name__}, {kind}, {num_groups} groups")
    for kind, num_groups in (("1 rank", 1), ("2 ranks", 3), ("MLA", 1), ("MLA", 3))
    for damage in (a_bit_in_the_middle, deleted)
]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


class _Toucher:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def chunk_folder(world: RemoteWorld, prompt: Prompt, position: int, root: Path) -> Path:
    """Where the objects of a chunk are."""
    key = world.world.engines[0].prompt(prompt.tokens).keys[position]
    (folder,) = root.glob(f"lmcache_ray/*/{key.hex()}")
    return folder


def part(folder: Path, name: str) -> Path:
    """The manifest, or the shard of a rank."""
    (path,) = folder.glob("manifest.*" if name == "manifest" else f"*.{name}.*")
    return path


def num_lost(world: RemoteWorld) -> int:
    """What is counted as lost so far."""
    traffic = world.remote_traffic
    return traffic.missing + traffic.damaged + traffic.unreadable


def check_loss(world: RemoteWorld, position: int, *, is_counted: bool = True) -> None:
    """Chunk `position` is lost, and nothing before it; the next store repairs it, for others as well."""
    before = num_lost(world)
    assert world.retrieved(PROMPT) == position * C
    assert num_lost(world) > before or not is_counted
    world.drop_local()
    assert world.lookup(PROMPT) == world.retrieved(PROMPT) == position * C
    assert world.store(PROMPT) == WHOLE
    world.flush()
    world.drop_local()
    before = num_lost(world)
    assert world.lookup(PROMPT) == world.retrieved(PROMPT) == WHOLE
    assert num_lost(world) == before
    assert world.tiers.problems() == []


@pytest.mark.parametrize(("kind", "num_groups", "damage"), [*EACH_DAMAGE, *IN_EACH_WORLD])
def test_a_shard_that_is_not_what_it_should_be(
    tmp_path: Path, kind: str, num_groups: int, damage: Callable[[Victim], None]
) -> None:
    root = tmp_path / "remote"
    with remote_world(tmp_path, f"file://{root}", kind, num_groups) as world:
        for rank in world.world.layout.holders:
            for position in range(NUM_CHUNKS):
                world.shared(PROMPT)
                path = part(chunk_folder(world, PROMPT, position, root), f"r{rank}")
                other = part(chunk_folder(world, PROMPT, (position + 1) % NUM_CHUNKS, root), f"r{rank}")
                damage(Victim(path, position, other, tmp_path / "marker"))
                check_loss(world, position)
        world.check_idle()
    assert not (tmp_path / "marker").exists()
    with remote_world(tmp_path, f"file://{root}", kind, num_groups) as another:
        assert another.retrieved(PROMPT) == WHOLE, "what was repaired is good for all"


@pytest.mark.parametrize(("kind", "num_groups", "damage"), [*EACH_DAMAGE, *IN_EACH_WORLD])
def test_a_manifest_that_is_not_what_it_should_be(
    tmp_path: Path, kind: str, num_groups: int, damage: Callable[[Victim], None]
) -> None:
    root = tmp_path / "remote"
    with remote_world(tmp_path, f"file://{root}", kind, num_groups) as world:
        for position in range(NUM_CHUNKS):
            world.shared(PROMPT)
            path = part(chunk_folder(world, PROMPT, position, root), "manifest")
            other = part(chunk_folder(world, PROMPT, (position + 1) % NUM_CHUNKS, root), "manifest")
            damage(Victim(path, position, other, tmp_path / "marker"))
            check_loss(world, position, is_counted=damage is not deleted)
        world.check_idle()
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("serde", ["zstd", "fp8"])
def test_a_damaged_shard_of_each_serde(tmp_path: Path, serde: str) -> None:
    root = tmp_path / "remote"
    with remote_world(tmp_path, f"file://{root}", "2 ranks", remote_serde=serde) as world:
        for damage in DAMAGES:
            world.shared(PROMPT)
            path = part(chunk_folder(world, PROMPT, 1, root), "r1")
            damage(Victim(path, 1, part(chunk_folder(world, PROMPT, 2, root), "r1"), tmp_path / "marker"))
            assert len(world.world.retrieve(PROMPT.tokens, PROMPT.rows)) == C, damage.__name__
            assert world.store(PROMPT) == WHOLE
            world.flush()
            world.drop_local()
            assert len(world.world.retrieve(PROMPT.tokens, PROMPT.rows)) == WHOLE


@pytest.mark.parametrize("num_groups", [1, 2])
def test_the_shard_of_another_rank(tmp_path: Path, num_groups: int) -> None:
    root = tmp_path / "remote"
    with remote_world(tmp_path, f"file://{root}", "2 ranks", num_groups) as world:
        for rank in (0, 1):
            folder = chunk_folder(world, world.shared(PROMPT), 1, root)
            shutil.copyfile(part(folder, f"r{1 - rank}"), part(folder, f"r{rank}"))
            check_loss(world, 1)


def test_the_shard_of_an_earlier_writing_of_the_same_chunk(tmp_path: Path) -> None:
    """Whole, and of the right key and rank: only its generation tells, and here the bytes would."""
    root = tmp_path / "remote"
    with remote_world(tmp_path, f"file://{root}", "2 ranks") as world:
        earlier = part(chunk_folder(world, world.shared(PROMPT), 1, root), "r1").read_bytes()
        assert world.world.engines[0].clear().num_removed == NUM_CHUNKS
        for kv in world.kvs:
            for tensor in kv:
                tensor.copy_(tensor.flip(1))
        path = part(chunk_folder(world, world.shared(PROMPT), 1, root), "r1")
        assert path.stat().st_size == len(earlier)
        path.write_bytes(earlier)
        check_loss(world, 1)


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks"])
@pytest.mark.parametrize("position", range(NUM_CHUNKS))
def test_a_shard_that_vanishes_between_lookup_and_load(
    tmp_path: Path, users_url: str, kind: str, position: int
) -> None:
    store = users_store(users_url)
    with remote_world(tmp_path, users_url, kind) as world:
        world.shared(PROMPT)
        key = world.world.engines[0].prompt(PROMPT.tokens).keys[position].hex()
        gone = threading.Event()

        def vanish(call: str) -> None:
            if call == "get" and not gone.is_set():
                gone.set()
                for name in [name for name in store.objects if key in name and "manifest" not in name]:
                    del store.objects[name]

        store.mishap = vanish
        assert world.lookup(PROMPT) == WHOLE
        assert world.retrieved(PROMPT) == position * C
        assert gone.is_set() and world.remote_traffic.missing >= 1
        assert world.store(PROMPT) == world.retrieved(PROMPT) == WHOLE
        world.flush()
        world.drop_local()
        assert world.retrieved(PROMPT) == WHOLE
        world.check_idle()


def test_an_empty_store_in_the_place_of_a_full_one(tmp_path: Path) -> None:
    """The folder is removed, and everything in it."""
    root = tmp_path / "remote"
    with remote_world(tmp_path, f"file://{root}", "2 ranks") as world:
        world.shared(PROMPT)
        shutil.rmtree(root)
        assert (world.lookup(PROMPT), world.retrieved(PROMPT)) == (0, 0)
        assert world.tiers.problems() == []
        assert world.shared(OTHER) and world.retrieved(OTHER) == WHOLE
        world.check_idle()
