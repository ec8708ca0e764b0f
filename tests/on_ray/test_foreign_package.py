"""Nodes that import another package named `cluster`: one sentence says so, and where it can be helped, it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

_ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import ray, torch
from cluster.client import CacheCluster
from lmcache_ray import LMCacheEngineConfig
from lmcache_ray.errors import ForeignPackageError

if {working_dir!r}:
    ray.init(runtime_env={{"working_dir": {working_dir!r}}}, log_to_driver=False)
config = LMCacheEngineConfig(chunk_size=16, capacity_chunks=4, arena_dir={arena_dir!r})
kv = {{"kv_shape": (1, 2, 16, 1, 4), "kv_dtype": torch.float16}}
try:
    with CacheCluster.start(config, model_name="m", name="foreign", namespace="foreign", **kv) as cluster:
        cluster.store(list(range(16)), list(range(16)))
        print(cluster.lookup(list(range(16))))
except ForeignPackageError as error:
    print(error)
"""


@pytest.fixture
def foreign_folder(tmp_path: Path) -> Path:
    """A folder with a package `cluster` of somebody else."""
    folder = tmp_path / "theirs"
    (folder / "cluster").mkdir(parents=True)
    (folder / "cluster" / "__init__.py").write_text("SOMETHING = 'else'\n")
    return folder


def test_a_foreign_package_in_the_working_dir_is_named_in_one_sentence(
    foreign_folder: Path, arena_dir: Path, ray_nodes: list[str], tmp_path: Path
) -> None:
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    (said,) = _run(tmp_path, arena_dir, environment, working_dir=foreign_folder)
    assert "imports a package 'cluster' that is not lmcache_ray's" in said
    assert any(f"node {node_id} " in said for node_id in ray_nodes)
    assert "/cluster/__init__.py: " in said  # the path, in Ray's copy of the folder
    assert "keep other packages of that name out of the job's working_dir" in said
    assert os.listdir(arena_dir) == []


def test_a_driver_that_found_the_project_by_its_path_brings_the_nodes_there(
    foreign_folder: Path, arena_dir: Path, tmp_path: Path
) -> None:
    """On the nodes of this driver's own Ray a foreign package is all there is, as if it were installed."""
    environment = {**os.environ, "PYTHONPATH": str(foreign_folder)}
    assert _run(tmp_path, arena_dir, environment) == ["16"]
    assert os.listdir(arena_dir) == []


def _run(folder: Path, arena_dir: Path, environment: dict[str, str], *, working_dir: Path | str = "") -> list[str]:
    """The lines that the program prints; its own folder holds nothing else."""
    own = folder / "driver"
    own.mkdir()
    program = own / "program.py"
    program.write_text(_PROGRAM.format(root=str(_ROOT), working_dir=str(working_dir), arena_dir=str(arena_dir)))
    done = subprocess.run(
        [sys.executable, program], cwd=own, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
