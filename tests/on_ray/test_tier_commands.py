"""What a person types about tiers: `up`, `status`, `check`, `inspect` and `replay` with a disk and a remote store.

The commands run in this process, which is connected to the tests' Ray already; their answers are read from stdout.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.__main__ import main
from cluster.client import CacheCluster
from tests.on_ray.checked_calls import flush, got, prompt, put, retrieved, wait_until
from tests.on_ray.conftest import NAMESPACE
from tests.on_ray.random_driver import C

IDENTITY = ["--name", "with-tiers", "--namespace", NAMESPACE]
MIB = 1 / 1024
WHOLE = 4 * C
NUM_PROMPTS = 6


class Commands:
    """Runs commands; `output` is what the last one printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.output = ""

    def run(self, *words: str) -> int:
        """The exit status."""
        self._capsys.readouterr()
        status = main(list(words))
        self.output = self._capsys.readouterr().out
        return status

    def json(self, *words: str, status: int = 0) -> dict[str, Any]:
        """The object that is printed last, of a command that ends with this status."""
        ended_with = self.run(*words, "--json")
        assert ended_with == status, self.output
        found: dict[str, Any] = json.loads(self.output.splitlines()[-1])
        return found


@pytest.fixture
def commands(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where disk and remote store are."""
    return tmp_path_factory.mktemp("tiers")


@pytest.fixture(scope="module")
def up(ray_nodes: list[str], arena_dir: Path, root: Path) -> Iterator[None]:
    """A detached cluster of two ranks with all tiers, which `up` has started."""
    tiers = ["--local-disk", str(root / "disk"), "--max-local-disk-size", "0.004", "--remote-url", f"file://{root}/far"]
    sizes = ["--chunk-size", str(C), "--block-size", "4", "--capacity-chunks", "12", "--num-blocks", "16"]
    assert main(["up", *IDENTITY, *tiers, *sizes, "--arena-dir", str(arena_dir)]) == 0
    try:
        yield
    finally:
        assert main(["down", *IDENTITY]) == 0


@pytest.fixture
def cluster(up: None) -> Iterator[CacheCluster]:
    """The same, of another connection, with some prompts on disk alone."""
    with CacheCluster.connect("with-tiers", namespace=NAMESPACE) as connected:
        connected.clear()
        for number in range(NUM_PROMPTS):
            assert put(connected, prompt(number)) == WHOLE
            flush(connected)
        connected.clear(locations=["cpu", "remote"])
        wait_until(connected.is_healthy, "both ranks answer, on a machine however busy")
        yield connected


def files_of(cluster: CacheCluster, root: Path, rank: int, number: int) -> list[Path]:
    """A prompt's files on a rank, in order."""
    keys = cluster.prompt(prompt(number)).keys
    return [next((root / "disk").glob(f"*/rank-{rank}/*/*/{key.hex()}.*")) for key in keys]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def test_status_shows_every_tier(cluster: CacheCluster, commands: Commands, root: Path) -> None:
    tiers = commands.json("status", *IDENTITY)["tiers"]
    assert list(tiers) == ["cpu", "disk", "remote"]
    assert (tiers["cpu"]["ready"], tiers["cpu"]["capacity"]) == (0, 12)
    assert tiers["disk"]["ready"] == 4 * NUM_PROMPTS
    assert tiers["disk"]["total_max_nbytes"] == 2 * tiers["disk"]["max_nbytes"] == 2 * int(0.004 * 2**30)
    for name in ("disk", "remote"):
        assert tiers[name]["traffic"]["written"] >= 4 * NUM_PROMPTS and tiers[name]["waiting"] == 0
    assert commands.run("status", *IDENTITY) == 0
    shown = re.sub(r"\s+", " ", commands.output)
    assert f"disk: {4 * NUM_PROMPTS} of {tiers['disk']['capacity']} chunks, 0.00 GiB a rank" in shown
    assert "remote: shared with others, 0 waiting for it" in shown and "written" in shown


def test_check_finds_in_both_directions_and_fix_repairs(cluster: CacheCluster, commands: Commands, root: Path) -> None:
    """A damaged file, a missing one, one that nobody knows though it is whole, and one that is half written."""
    assert commands.run("check", *IDENTITY) == 0 and "index and files agree" in commands.output
    damaged, missing = files_of(cluster, root, 1, 0)[2], files_of(cluster, root, 0, 1)[1]
    unknown = files_of(cluster, root, 1, 2)[3]
    shutil.copyfile(unknown, root / "aside")
    assert cluster.clear(prompt(2), locations=["disk"]).num_removed == 4
    unknown.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(root / "aside", unknown)
    flip_a_bit(damaged)
    missing.unlink()

    found = commands.json("check", *IDENTITY, status=1)
    assert found["findings"] == found["remaining"] and len(found["findings"]) == 3
    for path, rank in ((damaged, 1), (missing, 0), (unknown, 1)):
        (finding,) = [finding for finding in found["findings"] if path.name[:16] in finding]
        assert finding.startswith(f"rank {rank}: ")
    assert unknown.exists(), "looking repairs nothing"
    assert commands.run("check", *IDENTITY) == 1 and "3 findings, 3 of them are left" in commands.output

    assert commands.run("check", *IDENTITY, "--fix") == 0 and "3 findings, 0 of them are left" in commands.output
    assert not unknown.exists() and not damaged.exists()
    assert commands.json("check", *IDENTITY) == {"findings": [], "remaining": []}
    counts = [WHOLE, WHOLE, 0, WHOLE, WHOLE, WHOLE]
    counts[0], counts[1] = 2 * C, C
    assert [cluster.lookup(prompt(number)) for number in range(NUM_PROMPTS)] == counts
    assert [got(cluster, prompt(number)) for number in range(NUM_PROMPTS)] == counts
    assert [retrieved(cluster, prompt(number)) for number in range(NUM_PROMPTS)] == counts
    assert put(cluster, prompt(0)) == got(cluster, prompt(0)) == WHOLE
    flush(cluster)
    assert commands.run("check", *IDENTITY) == 0


def test_inspect_reads_a_file_of_a_running_cluster(cluster: CacheCluster, commands: Commands, root: Path) -> None:
    path = files_of(cluster, root, 1, 3)[1]
    found = commands.json("inspect", str(path))
    assert (found["state"], found["problem"]) == ("sound", None)
    header = found["header"]
    assert (header["rank"], header["world_size"], header["num_tokens"], header["is_lossy"]) == (1, 2, C, False)
    assert header["key"] == cluster.prompt(prompt(3)).keys[1].hex()
    flip_a_bit(path)
    assert commands.json("inspect", str(path), status=1)["state"] == "damaged"
    assert commands.json("inspect", f"{path}x", status=2)["state"] == "unreadable"
    assert commands.run("check", *IDENTITY, "--fix") == 0


# -- replays ----------------------------------------------------------------------------------------------------------


def replayed(commands: Commands, arena_dir: Path, *words: str) -> dict[str, Any]:
    """The report of a short replay on a cluster of its own, whose every byte was compared."""
    line = ["replay", "--namespace", NAMESPACE, "--arena-dir", str(arena_dir), "--requests", "40", "--verify"]
    report = commands.json(*line, *words)
    assert report["byte_mismatches"] == 0 and sum(report["hit_blocks_by_tier"].values()) == report["hit_blocks"]
    return report


def test_the_second_replay_on_a_disk_hits_everything(
    ray_nodes: list[str], arena_dir: Path, tmp_path: Path, commands: Commands
) -> None:
    words = ["--local-disk", str(tmp_path / "kv"), "--max-local-disk-size", "0.1", "--capacity-blocks", "60"]
    words += ["--world-size", "1"]
    first, second = (replayed(commands, arena_dir, *words) for _ in range(2))
    assert 0 < first["hit_rate"] < 1
    assert (second["hit_rate"], second["hit_blocks"]) == (1.0, first["lookup_blocks"])
    by_tier = second["hit_blocks_by_tier"]
    assert by_tier["disk"] > 0 and by_tier["remote"] == 0


def test_the_second_replay_on_a_remote_store_hits_everything(
    ray_nodes: list[str], arena_dir: Path, tmp_path: Path, commands: Commands
) -> None:
    """In an MLA world, and with a serde."""
    words = ["--remote-url", f"file://{tmp_path}/far", "--remote-serde", "zstd", "--use-mla"]
    first, second = (replayed(commands, arena_dir, *words) for _ in range(2))
    assert first["hit_blocks_by_tier"]["remote"] == 0
    assert (second["hit_rate"], second["hit_blocks"]) == (1.0, first["lookup_blocks"])
    by_tier = second["hit_blocks_by_tier"]
    assert by_tier["remote"] > 0 and by_tier["disk"] == 0


def test_a_url_that_a_running_ray_cannot_use_is_one_sentence(
    ray_nodes: list[str], arena_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up` leaves the judgement to the nodes: what is missing here may be there."""
    line = ["up", "--name", "refused", "--namespace", NAMESPACE, "--arena-dir", str(arena_dir), "--world-size", "1"]
    assert main([*line, "--remote-url", "nothing://me:se-cret@host"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: remote_url 'nothing://***@host': no backend has the scheme 'nothing'")
    assert said.count("\n") == 1 and "se-cret" not in said
