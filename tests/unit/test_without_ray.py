"""What is installed without the extra `ray`: the library works, and the package `cluster` says what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_NO_RAY = "import sys; sys.modules['ray'] = None; sys.modules['rich'] = None; "  # as if they were not installed


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", _NO_RAY + code], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "code",
    [
        "from cluster import CacheCluster",
        "from cluster.client import CacheCluster",
        "import runpy; runpy.run_module('cluster', run_name='__main__')",
    ],
)
def test_the_cluster_says_in_one_sentence_how_to_get_ray(code: str) -> None:
    done = run(code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: the package `cluster` needs Ray, which is not installed: pip install 'lmcache-ray[ray]'"
    )


def test_the_library_needs_neither_ray_nor_rich() -> None:
    done = run("import lmcache_ray.build, lmcache_ray.engine, lmcache_ray.standalone.__main__; print('loaded')")
    assert done.stdout == "loaded\n", done.stderr
