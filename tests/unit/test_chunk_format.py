"""A stored chunk comes back exactly, or is found damaged: whatever was done to its bytes."""

import json
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ray.errors import DamagedChunkError, LayoutError
from lmcache_ray.layout import Placement
from lmcache_ray.storage.chunk_format import ChunkHeader, GroupShape, check_data, header_of, pack_head, parse_head
from lmcache_ray.storage.chunk_frame import MAX_HEAD_NBYTES, MAX_HEADER_NBYTES
from tests.unit.stored_chunks import CHUNK_SIZE, layout_of

KEY = bytes(range(32))
DATA = bytes(range(256)) * 2


def header(**changes: object) -> ChunkHeader:
    made = header_of(layout_of(), 1, key=KEY, generation=2**63 + 5, num_tokens=7)
    return replace(made, **changes)  # type: ignore[arg-type]


def file_of(made: ChunkHeader, data: bytes = DATA) -> bytes:
    return pack_head(made, data) + data


def read(file: bytes, file_nbytes: int | None = None) -> tuple[ChunkHeader, bytes]:
    """As a reader does: the header and the data, or DamagedChunkError."""
    head = parse_head(file[:MAX_HEAD_NBYTES], len(file) if file_nbytes is None else file_nbytes)
    data = file[head.head_nbytes :]
    check_data(head, data)
    return head.header, data


def test_a_header_says_where_every_group_lies() -> None:
    layout = layout_of()
    made = header()
    assert made.groups == (
        GroupShape((2, 2, CHUNK_SIZE, 32), "bfloat16", 0),
        GroupShape((2, 1, CHUNK_SIZE, 32), "uint8", layout.ranks[1].group_offsets[1]),
    )
    assert (made.fingerprint, made.world_size, made.rank) == (layout.fingerprint, 2, 1)
    assert (made.placement, made.chunk_size, made.raw_nbytes) == ("per_rank", 16, layout.ranks[1].slot_nbytes)
    assert (made.serde, made.is_lossy, made.origin) == ("naive", False, "")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"generation": 0, "num_tokens": 16},
        {"generation": 2**64 - 1, "rank": 0},
        {"serde": "fp8", "is_lossy": True, "origin": "Zürich \N{SNOWMAN} \ud800"},
        {"placement": Placement.FIRST_RANK.value, "world_size": 1, "rank": 0},
        {"groups": ()},
    ],
)
def test_what_is_packed_is_read(changes: dict[str, object]) -> None:
    made = header(**changes)
    assert read(file_of(made)) == (made, DATA)


@given(data=st.binary(max_size=300), num_tokens=st.integers(1, CHUNK_SIZE), generation=st.integers(0, 2**64 - 1))
def test_any_data_comes_back(data: bytes, num_tokens: int, generation: int) -> None:
    made = header(num_tokens=num_tokens, generation=generation)
    head = pack_head(made, data)
    assert len(head) % 64 == 0
    assert read(head + data) == (made, data)


def test_heads_of_a_rank_have_one_length() -> None:
    made = [header(num_tokens=count, generation=number) for count in (1, 16) for number in (0, 2**64 - 1)]
    assert len({len(pack_head(each, DATA)) for each in made}) == 1


def test_the_header_is_json_that_anybody_can_read() -> None:
    file = file_of(header())
    (length,) = struct.unpack_from("<I", file, 12)
    fields = json.loads(file[40 : 40 + length])
    assert (fields["key"], fields["num_tokens"], fields["generation"]) == (KEY.hex(), 7, f"{2**63 + 5:016x}")


def test_every_single_bit_that_changes_is_found() -> None:
    file = bytearray(file_of(header(), DATA[:64]))
    for position in range(len(file)):
        for bit in range(8):
            file[position] ^= 1 << bit
            with pytest.raises(DamagedChunkError):
                read(bytes(file))
            file[position] ^= 1 << bit
    assert read(bytes(file))[1] == DATA[:64]


def test_every_truncation_and_extension_is_found() -> None:
    file = file_of(header(), DATA[:64])
    for length in range(len(file)):
        with pytest.raises(DamagedChunkError):
            read(file[:length])
    for more in (b"\0", b"x" * 64, file):
        with pytest.raises(DamagedChunkError, match="head and data have"):
            read(file + more)


def test_data_of_another_chunk_is_found() -> None:
    other = bytes(reversed(DATA))
    with pytest.raises(DamagedChunkError, match="the data is damaged"):
        read(pack_head(header(), DATA) + other)
    with pytest.raises(DamagedChunkError, match="511 bytes of data, where the head says 512"):
        check_data(parse_head(file_of(header()), len(file_of(header()))), DATA[:-1])


@pytest.mark.parametrize(
    ("offset", "number", "said"),
    [(8, "<I", "format version"), (12, "<I", "a header of"), (16, "<Q", "head and data have")],
)
def test_no_length_is_believed(offset: int, number: str, said: str) -> None:
    """A reader that allocated or sliced by these numbers would fall over them."""
    file = bytearray(file_of(header()))
    struct.pack_into(number, file, offset, 2 ** (8 * struct.calcsize(number)) - 1)
    with pytest.raises(DamagedChunkError, match=said):
        read(bytes(file))


def test_a_pickle_is_no_chunk_and_is_not_run(tmp_path: Path) -> None:
    class Marks:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (str(tmp_path / "marker"),))

    bomb = pickle.dumps(Marks()) * 50
    with pytest.raises(DamagedChunkError, match="not a stored chunk"):
        read(bomb)
    assert not (tmp_path / "marker").exists()


def forged(text: bytes) -> bytes:
    """A file with any header, its checksums in order: whoever can write here can do that."""
    head_nbytes = -(-(40 + len(text) + 16) // 64) * 64
    prefix = struct.pack("<8sIIQ16s", b"LMCRAYC\n", 1, len(text), len(DATA), xxhash.xxh3_128_digest(DATA))
    covered = (prefix + text).ljust(head_nbytes - 16, b"\0")
    return covered + xxhash.xxh3_128_digest(covered) + DATA


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key": "00"}, "key has 32 bytes"),
        ({"key": "zz"}, "key must be hexadecimal"),
        ({"key": None}, "key must be text"),
        ({"generation": "01" * 9}, "64 bits"),
        ({"num_tokens": 0}, "1 to 16 tokens"),
        ({"num_tokens": 17}, "1 to 16 tokens"),
        ({"num_tokens": True}, "num_tokens must be an integer"),
        ({"num_tokens": -1}, "num_tokens must be an integer"),
        ({"num_tokens": 1.5}, "num_tokens must be an integer"),
        ({"rank": 2}, "rank must be one of 2"),
        ({"is_lossy": 0}, "is_lossy must be true or false"),
        ({"groups": {}}, "groups must be a list"),
        ({"groups": [1]}, "groups must be a JSON object"),
        ({"groups": [{"shape": [1, 2], "dtype": "uint8", "offset": 0}]}, "4 dimensions"),
        ({"groups": [{"shape": [1, 2, 3, 4], "offset": 0}]}, "lacks dtype"),
    ],
)
def test_a_header_that_cannot_be_meant_is_named(change: dict[str, object], said: str) -> None:
    (length,) = struct.unpack_from("<I", file_of(header()), 12)
    fields = json.loads(file_of(header())[40 : 40 + length]) | change
    with pytest.raises(DamagedChunkError, match=said):
        read(forged(json.dumps(fields).encode()))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 60_000, b'{"key": ' + b"9" * 60_000 + b"}", b"{}"]
)
def test_odd_json_is_only_damage(text: bytes) -> None:
    with pytest.raises(DamagedChunkError, match="header"):
        read(forged(text))


def test_a_header_that_could_not_be_read_again_is_not_written() -> None:
    groups = (GroupShape((1, 1, 1, 1), "uint8", 0),) * 2000
    with pytest.raises(LayoutError, match=f"at most {MAX_HEADER_NBYTES} bytes"):
        pack_head(header(groups=groups), DATA)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": b""}, "key has 32 bytes; got 0"),
        ({"fingerprint": b"x" * 31}, "fingerprint has 32"),
        ({"generation": -1}, "64 bits; got -1"),
        ({"generation": 2**64}, "64 bits"),
        ({"num_tokens": 0}, "1 to 16 tokens; got 0"),
        ({"rank": 2}, "one of 2; got 2"),
    ],
)
def test_an_impossible_header_cannot_be_made(changes: dict[str, object], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        header(**changes)
