"""In-process worlds with a disk tier: prompts whose every byte is known, the files they end in, and what is counted.

Chunks have four tokens. `spilled` makes a prompt one that lies on disk alone.
"""

import copy
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from lmcache_ray.index_service import IndexService
from lmcache_ray.storage.disk_names import leaf_directory, rank_directory
from lmcache_ray.tiers.disk_tier import DiskTier
from lmcache_ray.tiers.hits import TierHits
from lmcache_ray.tiers.spec import Tier
from lmcache_ray.tiers.tier_service import TierService
from lmcache_ray.tiers.tiered_index import TieredIndex
from lmcache_ray.tiers.traffic import TierTraffic
from tests.unit.disk_builders import du
from tests.unit.engine_builders import KV, World, make_world, poison, random_rows, rows_of

C: Final = 4
"""Tokens of a chunk."""
MIB: Final = 1 / 1024
"""A mebibyte in GiB, as the configuration wants it."""
NUM_ROWS: Final = 64

WORLDS: Final = {"1 rank": (1, False), "2 ranks": (2, False), "MLA": (2, True)}
"""World size, and whether it is an MLA world."""

_GROUPS: Final = (
    "(2,{kv},16,{heads},4):bfloat16:2",
    "(1,{kv},16,{heads},5):uint8:1",
    "(3,{kv},16,{heads},3):float32:3",
)
_PATIENCE_S: Final = 20.0


@dataclass(frozen=True)
class Prompt:
    """A prompt of `num_chunks` chunks, but for `cut` tokens; each number has tokens, and KV rows, of its own."""

    number: int
    num_chunks: int = 3
    cut: int = 0

    @property
    def tokens(self) -> list[int]:
        """As many as fill its chunks."""
        return list(range(1000 * self.number, 1000 * self.number + self.num_chunks * C - self.cut))

    @property
    def rows(self) -> np.ndarray:
        """Where its KV lies."""
        return random_rows(self.num_chunks * C, NUM_ROWS, seed=self.number)[: len(self.tokens)]


@dataclass(frozen=True)
class DiskWorld:
    """A world whose disk is at `root`. `kvs` is what the ranks' paged KV held at first, and holds at each store."""

    world: World
    root: Path
    kvs: list[KV] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kvs.extend(copy.deepcopy(self.world.kvs))

    @property
    def service(self) -> IndexService:
        """The index behind its lock."""
        found: IndexService = self.world.engines[0]._parts.index._service  # type: ignore[attr-defined]
        return found

    @property
    def tiers(self) -> TierService:
        """What moves the chunks."""
        found: TierService = self.world.engines[0]._parts.index._tiers  # type: ignore[attr-defined]
        return found

    @property
    def disk(self) -> DiskTier:
        """The disk tier."""
        assert self.tiers.disk is not None
        return self.tiers.disk

    @property
    def traffic(self) -> TierTraffic:
        """What has moved so far, as a copy."""
        return copy.copy(self.disk.traffic)

    def store(self, prompt: Prompt) -> int:
        """Store on every rank: the leading tokens that are cached then."""
        for tensors, originals in zip(self.world.kvs, self.kvs, strict=True):
            for tensor, original in zip(tensors, originals, strict=True):
                tensor.copy_(original)
        return self.world.store(prompt.tokens, prompt.rows)

    def flush(self) -> None:
        """Wait until nothing waits for the disk or is being written."""

        def is_flushed(index: TieredIndex) -> bool:
            return not index.backlogs[Tier.DISK] and (index.disk is None or index.disk.counts().plans == 0)

        assert self.service.wait_until(is_flushed, _PATIENCE_S)

    def spilled(self, prompt: Prompt) -> Prompt:
        """Store it so that it lies on disk alone."""
        num_tokens = len(prompt.tokens)
        assert self.store(prompt) == num_tokens
        self.flush()
        self.drop_memory()
        assert self.locate(prompt) == TierHits(num_tokens, 0, num_tokens, 0)
        return prompt

    def drop_memory(self) -> None:
        """Forget all that is in memory."""
        assert self.world.engines[0].clear(locations=["cpu"]).num_kept == 0

    def is_suspended(self) -> bool:
        """Whether the disk takes nothing at present."""
        with self.service.at_now() as (index, _):
            return index.disk is None or Tier.DISK in index.suspended

    def locate(self, prompt: Prompt) -> TierHits:
        """Where the prompt's chunks are."""
        return self.world.engines[0].locate(prompt.tokens)

    def retrieved(self, prompt: Prompt) -> int:
        """Retrieve into other rows on all ranks: the leading tokens that came, each of whose bytes was compared."""
        target = random_rows(len(prompt.tokens), NUM_ROWS, seed=1000 + prompt.number)
        for kv in self.world.kvs:
            poison(kv)
        positions = self.world.retrieve(prompt.tokens, target)
        assert positions == list(range(len(positions))), "not a prefix"
        for rank, (kv, original) in enumerate(zip(self.world.kvs, self.kvs, strict=True)):
            found, wanted = rows_of(kv, target[positions]), rows_of(original, prompt.rows[positions])
            assert found == wanted, f"rank {rank}: other bytes than those stored"
        return len(positions)

    def files(self, prompt: Prompt, rank: int) -> list[Path]:
        """The one file of each of the prompt's chunks, once all is written; what else is called like it is no file."""
        self.flush()
        directory = self.root / rank_directory(self.world.layout.fingerprint, rank)
        keys = self.world.engines[0].prompt(prompt.tokens).keys
        named = [(directory / leaf_directory(key)).glob(f"{key.hex()}.*.kv") for key in keys]
        found = [[path for path in paths if path.is_file() and not path.is_symlink()] for paths in named]
        assert [len(paths) for paths in found] == [1] * len(keys), "not one file for each chunk"
        return [paths[0] for paths in found]

    def du(self) -> int:
        """What the largest of the ranks' trees takes, when nothing is being written."""
        self.flush()
        return max(map(du, self.root.glob("*/rank-*")))

    def check_idle(self) -> None:
        """Nothing is leased or unfinished, in either tier."""
        with self.service.at_now() as (index, _):
            index.check_integrity()
            assert index.disk is not None
            for part in (index.memory, index.disk):
                counts = part.counts()
                assert (counts.leases, counts.plans, counts.writing, counts.quarantined) == (0, 0, 0, 0)
            assert index.coming_up == {} and not index.backlogs[Tier.DISK]


@contextmanager
def disk_world(
    directory: Path,
    kind: str = "1 rank",
    num_groups: int = 1,
    *,
    root: Path | str | None = None,
    world_size: int | None = None,
    model: str = "m",
    spec: str | None = None,
    **config: object,
) -> Iterator[DiskWorld]:
    """A world of `WORLDS` with so many layer groups of different dtypes; its disk is ``directory / "disk"``."""
    usual_size, use_mla = WORLDS[kind]
    local_disk = directory / "disk" if root is None else Path(root)
    values: dict[str, object] = {"local_disk": str(local_disk), "max_local_disk_size": 4 * MIB, **config}
    with make_world(
        directory,
        world_size or usual_size,
        use_mla=use_mla,
        spec=spec or spec_of(num_groups, use_mla=use_mla),
        num_rows=NUM_ROWS,
        model=model,
        **values,  # type: ignore[arg-type]
    ) as world:
        yield DiskWorld(world, local_disk)


def spec_of(num_groups: int, *, use_mla: bool = False) -> str:
    """The shape spec of so many layer groups, each of another dtype and shape."""
    kv, heads = (1, 1) if use_mla else (2, 2)
    return ";".join(group.format(kv=kv, heads=heads) for group in _GROUPS[:num_groups])


def wait_until(is_so: Callable[[], bool]) -> None:
    """Look again and again; fails when it has taken too long."""
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


@pytest.fixture
def small_device(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 512 KiB."""
    place = tmp_path / "device"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small filesystem cannot be mounted here (that needs root): this is not tested")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
