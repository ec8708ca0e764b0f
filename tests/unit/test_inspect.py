"""What `inspect` says of a chunk's file, and that it copes with whatever else it is pointed at."""

import json
import os
import pickle
import socket
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from cluster.__main__ import main
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.layout import Placement, ShardSpec, uniform_world
from lmcache_ray.storage.chunk_format import ChunkHeader, header_of, pack_head
from lmcache_ray.storage.chunk_frame import MAX_HEAD_NBYTES, pack_frame
from lmcache_ray.storage.inspection import FileState, Inspection, inspect_file

ROOT = Path(__file__).parents[2]

LAYOUT = uniform_world(
    [ShardSpec((0, 2), range(0, 2), 4, KVDtype.FLOAT16), ShardSpec((1,), range(0, 1), 4, KVDtype.UINT8)],
    chunk_size=4,
    world_size=2,
    placement=Placement.PER_RANK,
)
HEADER = header_of(LAYOUT, 1, key=bytes(range(32)), generation=0xABC, num_tokens=3)
DATA = bytes(index * 7 % 251 for index in range(LAYOUT.ranks[1].slot_nbytes))
HEAD = pack_head(HEADER, DATA)
CHUNK = HEAD + DATA


def write(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :]


def test_a_sound_file_says_all_of_itself(tmp_path: Path) -> None:
    path = write(tmp_path / "a.kv", CHUNK)
    found = inspect_file(path)
    assert found == Inspection(path, FileState.SOUND, "", len(CHUNK), found.head)
    assert found.head is not None and found.head.header == HEADER
    assert (found.head.head_nbytes, found.head.data_nbytes) == (len(HEAD), len(DATA))
    assert found.head.data_digest == xxhash.xxh3_128_digest(DATA)


def test_data_of_several_pieces_is_proven_whole(tmp_path: Path) -> None:
    data = os.urandom(2**21 + 5)
    header = replace(HEADER, raw_nbytes=len(data))
    content = pack_head(header, data) + data
    assert inspect_file(write(tmp_path / "a.kv", content)).state is FileState.SOUND
    for position in (2**20 + 1, len(content) - 1):
        found = inspect_file(write(tmp_path / "b.kv", flipped(content, position)))
        assert (found.state, found.problem) == (FileState.DAMAGED, "the data is damaged (wrong checksum)")


def test_compressed_data_has_a_length_of_its_own(tmp_path: Path) -> None:
    header = replace(HEADER, serde="zstd", origin="c1")
    assert inspect_file(write(tmp_path / "a.kv", pack_head(header, b"short") + b"short")).state is FileState.SOUND
    unchanged = replace(header, serde="naive")
    found = inspect_file(write(tmp_path / "b.kv", pack_head(unchanged, b"short") + b"short"))
    assert found.state is FileState.DAMAGED
    assert f"5 bytes of data, where the header says {HEADER.raw_nbytes}" in found.problem


@pytest.mark.parametrize(
    ("content", "why", "is_head_whole"),
    [
        (b"", "0 bytes are too few for a chunk's head", False),
        (CHUNK[:39], "39 bytes are too few", False),
        (CHUNK[: len(CHUNK) // 2], f"{len(CHUNK) // 2} bytes, where head and data have", False),
        (CHUNK[:-1], f"{len(CHUNK) - 1} bytes, where", False),
        (CHUNK + b"\0", f"{len(CHUNK) + 1} bytes, where", False),
        (flipped(CHUNK, 0), "magic", False),
        (flipped(CHUNK, 8), "version", False),
        (flipped(CHUNK, 12), "the head is damaged", False),
        (flipped(CHUNK, 13), "where head and data have", False),
        (flipped(CHUNK, 15), "at most 65536 are read", False),
        (flipped(CHUNK, 16), "where head and data have", False),
        (flipped(CHUNK, 24), "the head is damaged", False),
        (flipped(CHUNK, 60), "the head is damaged", False),
        (flipped(CHUNK, len(HEAD) - 1), "the head is damaged", False),
        (flipped(CHUNK, len(HEAD)), "the data is damaged", True),
        (flipped(CHUNK, len(CHUNK) - 1), "the data is damaged", True),
        (bytes(100_000), "magic", False),
        (pack_frame(b"[1]", DATA) + DATA, "the header must be a JSON object", False),
        (pack_frame(b'{"key": 1', DATA) + DATA, "the header is no JSON", False),
        (pack_frame(b"[" * 60_000, DATA) + DATA, "the header is no JSON", False),
    ],
)
def test_what_is_no_whole_chunk_is_damaged_and_says_why(
    content: bytes, why: str, is_head_whole: bool, tmp_path: Path
) -> None:
    found = inspect_file(write(tmp_path / "a.kv", content))
    assert (found.state, found.file_nbytes) == (FileState.DAMAGED, len(content))
    assert why in found.problem
    assert (found.head is not None) is is_head_whole


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(marker),)

    assert inspect_file(write(tmp_path / "a.kv", pickle.dumps(Bomb()))).state is FileState.DAMAGED
    assert not marker.exists()


def test_a_huge_sparse_file_costs_a_head(tmp_path: Path) -> None:
    """Read whole it would take 10 GB of memory, or minutes."""
    path = tmp_path / "sparse.kv"
    with path.open("wb") as file:
        file.truncate(10 * 10**9)
    tracemalloc.start()
    found = inspect_file(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.state, found.file_nbytes) == (FileState.DAMAGED, 10 * 10**9)
    assert peak < 2 * MAX_HEAD_NBYTES + 2**16


def test_large_data_passes_through_in_pieces(tmp_path: Path) -> None:
    data = bytes(16 * 2**20)
    path = write(tmp_path / "a.kv", pack_head(replace(HEADER, raw_nbytes=len(data)), data) + data)
    tracemalloc.start()
    found = inspect_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.state is FileState.SOUND
    assert peak < 2 * 2**20


def test_what_is_no_file_is_unreadable(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "loop"
    os.mkfifo(pipe)
    link.symlink_to(link)
    socket_path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(socket_path))
        for path, why in (
            (tmp_path, "it is a directory"),
            (pipe, "it is a pipe"),
            (socket_path, "it is a socket"),
            (Path("/dev/zero"), "it is a character device"),
            (tmp_path / "none", "No such file"),
            (link, "symbolic links"),
            (tmp_path / ("x" * 300), "too long"),
            (tmp_path / "a\0b", "no file can be called so"),
        ):
            found = inspect_file(str(path))
            assert found == Inspection(str(path), FileState.UNREADABLE, found.problem)
            assert found.problem.startswith("cannot be read: ") and why in found.problem


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_unreadable(tmp_path: Path) -> None:
    path = write(tmp_path / "a.kv", CHUNK)
    os.chmod(path, 0)
    assert "Permission denied" in inspect_file(path).problem


def test_links_are_followed(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(write(tmp_path / "a.kv", CHUNK))
    assert inspect_file(str(link)).state is FileState.SOUND


# --- the command


def test_the_command_shows_what_a_sound_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.kv", CHUNK)
    assert main(["inspect", path]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    assert lines[0] == [f"{path}:", "sound: all lengths and checksums hold"]
    said = {label: text for label, text in lines[1:] if label != "group"}
    assert said["file"] == f"{len(CHUNK):,} bytes"
    assert said["data"] == f"{len(DATA):,} bytes, XXH3-128 {xxhash.xxh3_128_hexdigest(DATA)}"
    assert said["key"] == bytes(range(32)).hex() and said["generation"] == "0000000000000abc"
    assert said["tokens"] == "3 of 4" and said["rank"] == "1 of 2, per_rank"
    assert said["fingerprint"] == LAYOUT.fingerprint.hex()
    assert said["serde"] == f"naive (keeps every bit), of {len(DATA):,} bytes"
    assert [text.split(maxsplit=1) for label, text in lines if label == "group"] == [
        ["1", "[2, 2, 4, 8] of float16 from byte 0"],
        ["2", f"[2, 1, 4, 4] of uint8 from byte {LAYOUT.ranks[1].group_offsets[1]}"],
    ]


def inspected_as_json(path: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
    status = main(["inspect", path, "--json"])
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == ""
    return status, json.loads(out)


def test_json_has_the_header_as_the_file_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.kv", CHUNK)
    status, said = inspected_as_json(path, capsys)
    assert status == 0
    text = CHUNK[40 : 40 + int.from_bytes(CHUNK[12:16], "little")]
    assert said.pop("header") == json.loads(text)
    assert said == {
        "path": path,
        "state": "sound",
        "problem": None,
        "file_nbytes": len(CHUNK),
        "head_nbytes": len(HEAD),
        "data_nbytes": len(DATA),
        "data_checksum": xxhash.xxh3_128_hexdigest(DATA),
    }


def test_damage_is_told_with_what_is_still_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.kv", flipped(CHUNK, len(HEAD)))
    assert main(["inspect", path]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: damaged: the data is damaged (wrong checksum)\n") and HEADER.key.hex() in out
    status, said = inspected_as_json(path, capsys)
    assert (status, said["state"], said["problem"]) == (1, "damaged", "the data is damaged (wrong checksum)")
    assert isinstance(said["header"], dict) and said["header"]["num_tokens"] == 3
    status, said = inspected_as_json(write(tmp_path / "b.kv", b""), capsys)
    assert (status, said["state"], said["file_nbytes"], said["header"]) == (1, "damaged", 0, None)


def test_what_cannot_be_read_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"error: {tmp_path} cannot be read: it is a directory\n")
    status, said = inspected_as_json(str(tmp_path / "none"), capsys)
    assert (status, said["state"], said["file_nbytes"]) == (2, "unreadable", None)
    assert str(said["problem"]).startswith("cannot be read: No such file")


def hostile_header() -> ChunkHeader:
    group = replace(HEADER.groups[0], dtype="\x1b[2J", offset=10**4000)
    return replace(HEADER, placement="a\nb", serde="\x9b31m" + "x" * 5000, origin="\ud800", groups=(group,))


def test_a_terminal_obeys_nothing_that_a_file_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor a name: what is no UTF-8 there can be printed too."""
    path = tmp_path / os.fsdecode(b"a\x1b[31m\xff" + 100 * b"a" + b".kv")
    path.write_bytes(pack_head(hostile_header(), DATA) + DATA)
    assert main(["inspect", str(path)]) == 0
    out = capfd.readouterr().out
    assert out.isascii() and all(line.isprintable() for line in out.splitlines())
    assert out.startswith("'/") and r"a\x1b[31m\udcffaaa" in out and ".kv': sound: " in out
    assert r"'\x1b[2J'" in out and r"'a\nb'" in out and r"'\ud800'" in out
    assert max(len(line) for line in out.splitlines()[1:] if "group" not in line) < 120
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["header"]["origin"] == "\ud800"


def test_inspect_needs_neither_ray_nor_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "a.kv", CHUNK)
    program = (
        "import sys; from cluster.__main__ import main; status = main(['inspect', sys.argv[1]]); "
        "sys.exit(status or bool({'ray', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "sound" in run.stdout
