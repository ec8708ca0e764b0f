"""What every means of copying rows must do, against a loop over single bytes' places."""

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_ray.connector.row_copy import CompiledRowCopy, NumPyRowCopy, Plane, RowCopy, compiled_copy, row_copy

ROOT = Path(__file__).parent.parent.parent
ROW_NBYTES = (1, 6, 32, 130, 512)
FILLER = 0xEE


def compiled(planes: Sequence[Plane], *, streaming: bool = True) -> RowCopy:
    module = compiled_copy()
    assert module is not None, "the compiled row copy is missing: install the package again, with a C compiler"
    return CompiledRowCopy(planes, module, streaming=streaming)


MEANS: dict[str, Callable[[Sequence[Plane]], RowCopy]] = {
    "numpy": NumPyRowCopy,
    "compiled, streaming": compiled,
    "compiled, plain": lambda planes: compiled(planes, streaming=False),
}
if compiled_copy() is None and shutil.which("cc") is None:  # a machine on which only NumPy can copy
    MEANS = {"numpy": NumPyRowCopy}


class Memory:
    """Planes in one piece of random bytes, at any address and with any gap between rows, and a shard for them."""

    def __init__(self, seed: int, num_rows: int, chunk_size: int, sizes: Sequence[tuple[int, int, int]]) -> None:
        """`sizes` has per plane the row's bytes, the gap after a row, and the bytes before the plane."""
        generator = np.random.default_rng(seed)
        self.kv = generator.integers(0, 256, sum(at + num_rows * (row + gap) for row, gap, at in sizes), np.uint8)
        self.planes, self.places = [], []
        start = offset = 0
        for row_nbytes, gap, before in sizes:
            start += before
            memory = self.kv[start : start + num_rows * (row_nbytes + gap)].reshape(num_rows, -1)[:, :row_nbytes]
            self.planes.append(Plane(memory.view(np.dtype((np.void, row_nbytes)))[:, 0], offset, row_nbytes))
            self.places.append((start, row_nbytes + gap))
            start += num_rows * (row_nbytes + gap)
            offset += chunk_size * row_nbytes + 8  # as padding would, it must stay as it is
        self.shard = generator.integers(0, 256, offset, np.uint8)

    def bytes_after(self, rows: Sequence[int], first_row: int, *, gather: bool) -> tuple[bytes, bytes]:
        """What the KV memory and the shard must hold after a copy of `rows`."""
        kv, shard = bytearray(self.kv.tobytes()), bytearray(self.shard.tobytes())
        for plane, (start, stride) in zip(self.planes, self.places, strict=True):
            for number, row in enumerate(rows, start=first_row):
                in_kv = slice(start + row * stride, start + row * stride + plane.row_nbytes)
                begin = plane.offset + number * plane.row_nbytes
                in_shard = slice(begin, begin + plane.row_nbytes)
                if gather:
                    shard[in_shard] = kv[in_kv]
                else:
                    kv[in_kv] = shard[in_shard]
        return bytes(kv), bytes(shard)


@pytest.fixture(params=MEANS)
def make(request: pytest.FixtureRequest) -> Callable[[Sequence[Plane]], RowCopy]:
    return MEANS[request.param]


PLANES = st.lists(st.tuples(st.sampled_from(ROW_NBYTES), st.sampled_from((0, 0, 0, 3)), st.integers(0, 70)),
                  min_size=1, max_size=5)


@st.composite
def row_numbers(draw: st.DrawFn) -> list[int]:
    """Rows as engines have them: blocks of adjacent rows in any order, or anything."""
    block = draw(st.sampled_from((1, 4, 16)))
    blocks = draw(st.permutations(range(64 // block)))
    rows = [number * block + row for number in blocks for row in range(block)]
    return rows[draw(st.integers(0, 16)) :][: draw(st.integers(0, 32))]


@settings(max_examples=60, deadline=None)
@given(sizes=PLANES, rows=row_numbers(), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", MEANS)
def test_gather_moves_the_rows_and_nothing_else(
    name: str, sizes: list[tuple[int, int, int]], rows: list[int], seed: int
) -> None:
    memory = Memory(seed, 64, 32, sizes)
    kv, shard = memory.bytes_after(rows, 0, gather=True)
    MEANS[name](memory.planes).gather(memory.shard, np.array(rows, dtype=np.int64))
    assert memory.shard.tobytes() == shard
    assert memory.kv.tobytes() == kv


@settings(max_examples=60, deadline=None)
@given(sizes=PLANES, rows=row_numbers(), first_row=st.integers(0, 31), seed=st.integers(0, 2**32))
@pytest.mark.parametrize("name", MEANS)
def test_scatter_moves_the_rows_and_nothing_else(
    name: str, sizes: list[tuple[int, int, int]], rows: list[int], first_row: int, seed: int
) -> None:
    memory = Memory(seed, 64, 32, sizes)
    rows = rows[: 32 - first_row]
    kv, shard = memory.bytes_after(rows, first_row, gather=False)
    MEANS[name](memory.planes).scatter(memory.shard, np.array(rows, dtype=np.int64), first_row)
    assert memory.kv.tobytes() == kv
    assert memory.shard.tobytes() == shard


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("apart", [0, 1, 31, 32, 64, 96, 128, 2047, 2048, 2500, 4032])
def test_long_runs_at_any_distance_between_their_addresses(
    make: Callable[[Sequence[Plane]], RowCopy], apart: int, gather: bool
) -> None:
    """The compiled copy goes up or down, alone or in pairs, by where the two sides lie within a page."""
    num_rows, row_nbytes = 48, 512
    pages = np.zeros(1 << 18, dtype=np.uint8)
    shard_at, kv_at = -pages.ctypes.data % 4096, (-pages.ctypes.data % 4096) + (1 << 16) + apart
    generator = np.random.default_rng(apart)
    pages[:] = generator.integers(0, 256, pages.size, dtype=np.uint8)
    planes = []
    for index, jump in enumerate((0, 0, 64, 0)):  # the third plane lies otherwise than its partner
        start = kv_at + index * num_rows * row_nbytes + jump
        memory = pages[start : start + num_rows * row_nbytes].view(np.dtype((np.void, row_nbytes)))
        planes.append(Plane(memory, index * 16 * row_nbytes, row_nbytes))
    shard = pages[shard_at : shard_at + 4 * 16 * row_nbytes]
    rows = np.array([*range(16, 31), 40], dtype=np.int64)
    expected = [plane.rows[rows].tobytes() for plane in planes] if gather else [
        shard[plane.offset : plane.offset + 16 * row_nbytes].tobytes() for plane in planes
    ]
    if gather:
        make(planes).gather(shard, rows)
    else:
        make(planes).scatter(shard, rows, 0)
    for plane, wanted in zip(planes, expected, strict=True):
        assert plane.rows[rows].tobytes() == wanted
        assert shard[plane.offset : plane.offset + 16 * row_nbytes].tobytes() == wanted


def test_the_table_of_planes_keeps_their_memory_alive(make: Callable[[Sequence[Plane]], RowCopy]) -> None:
    rows = np.arange(8, dtype=np.int64)
    memory = np.full(8 * 4096, 7, dtype=np.uint8)
    copy = make([Plane(memory.view(np.dtype((np.void, 4096))), 0, 4096)])
    del memory
    others = [np.full(8 * 4096, 9, dtype=np.uint8) for _ in range(8)]
    shard = np.zeros(8 * 4096, dtype=np.uint8)
    copy.gather(shard, rows)
    assert set(shard) == {7}
    assert len(others) == 8


@pytest.mark.parametrize(
    ("rows", "first_row"),
    [
        ([64], 0), ([-1], 0), ([2**63 - 1], 0), ([-(2**63)], 0), ([62, 63, 64], 0), (list(range(33)), 0),
        ([1, 2], 31), ([1], -1), ([0], 2**62),
    ],
)
def test_the_compiled_copy_refuses_what_is_out_of_range_before_it_moves_a_byte(rows: list[int], first_row: int) -> None:
    if "compiled, plain" not in MEANS:
        pytest.skip("no compiled row copy and no C compiler on this machine")
    memory = Memory(1, 64, 32, [(512, 0, 0), (512, 0, 0)])
    memory.shard = memory.shard[:-8]  # so that the last plane's rows end with the shard
    before = memory.kv.tobytes()
    copy = compiled(memory.planes)
    with pytest.raises(ValueError, match=r"out of range|counted from 0"):
        copy.scatter(memory.shard, np.array([0, *rows] if len(rows) == 1 else rows, dtype=np.int64), first_row)
    assert memory.kv.tobytes() == before


def test_the_compiled_copy_refuses_a_plane_that_begins_before_the_shard() -> None:
    if "compiled, plain" not in MEANS:
        pytest.skip("no compiled row copy and no C compiler on this machine")
    memory = Memory(1, 64, 32, [(512, 0, 0)])
    plane = replace(memory.planes[0], offset=-512)
    with pytest.raises(ValueError, match=r"plane 0 has rows of 512 bytes at offset -512"):
        compiled([plane]).gather(memory.shard, np.arange(1))


def test_a_machine_with_a_compiler_has_the_compiled_copy() -> None:
    assert shutil.which("cc") is None or isinstance(row_copy([]), CompiledRowCopy)


CHOICE = """
import sys
from pathlib import Path
tree, *more_path = sys.argv[1:]
others = [entry for entry in sys.path if not Path(entry, "lmcache_ray").exists()]  # wherever the package is installed
sys.path[:] = [tree, *others, *more_path]
import lmcache_ray.connector.row_copy as chosen
assert chosen.__file__.startswith(tree), chosen.__file__
print(type(chosen.row_copy([])).__name__)
chosen.row_copy([])
"""


def choice_in_a_copied_tree(folder: Path, *more_path: str) -> "subprocess.CompletedProcess[str]":
    """Which means a process chooses whose sources were copied without what was compiled."""
    shutil.copytree(ROOT / "lmcache_ray", folder / "lmcache_ray", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    arguments = [sys.executable, "-c", CHOICE, str(folder), *more_path]
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120, cwd=folder)


def test_without_the_compiled_part_numpy_copies_and_the_log_says_so_once(tmp_path: Path) -> None:
    done = choice_in_a_copied_tree(tmp_path)
    assert done.stdout.split() == ["NumPyRowCopy"]
    assert done.stderr.count("install a C compiler") == 1


def test_a_copied_source_tree_uses_the_compiled_part_of_the_installation(tmp_path: Path) -> None:
    """As in a Ray job, whose working directory is a copy of the tracked files."""
    if compiled_copy() is None:
        pytest.skip("no compiled row copy and no C compiler on this machine")
    done = choice_in_a_copied_tree(tmp_path, str(ROOT))
    assert (done.stdout.split(), done.stderr) == (["CompiledRowCopy"], "")


def test_one_of_another_version_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "old/lmcache_ray/connector").mkdir(parents=True)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    source = tmp_path / "_row_copy.c"
    source.write_text((ROOT / "lmcache_ray/connector/_row_copy.c").read_text().replace("FORMAT = 1,", "FORMAT = 0,"))
    if shutil.which("cc") is None:
        pytest.skip("no C compiler on this machine")
    include = sysconfig.get_paths()["include"]
    target = tmp_path / f"old/lmcache_ray/connector/_row_copy{suffix}"
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(target)], check=True, timeout=120)
    done = choice_in_a_copied_tree(tmp_path / "tree", str(tmp_path / "old"))
    assert done.stdout.split() == ["NumPyRowCopy"]
    assert "was built from another version" in done.stderr


def test_one_that_cannot_be_loaded_is_not_used(tmp_path: Path) -> None:
    """Built where another C library is, say."""
    folder = tmp_path / "damaged/lmcache_ray/connector"
    folder.mkdir(parents=True)
    (folder / f"_row_copy{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"\x7fELF, and no more")
    done = choice_in_a_copied_tree(tmp_path / "tree", str(tmp_path / "damaged"))
    assert done.stdout.split() == ["NumPyRowCopy"]
    assert "_row_copy cannot be loaded" in done.stderr
