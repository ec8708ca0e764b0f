"""The names, the geometry and the first page of an arena file."""

import re
import struct
import zlib
from dataclasses import replace

import pytest

from lmcache_ray.arena.header import (
    HEARTBEAT_OFFSET,
    OWNER_OFFSET,
    ArenaHeader,
    ArenaOwner,
    heartbeat_word,
    pack_header,
    unpack_header,
)
from lmcache_ray.arena.names import arena_path, liveness_path, parse_file_name, temporary_path
from lmcache_ray.arena.spec import HEADER_NBYTES, ArenaGeometry, ArenaSpec
from lmcache_ray.errors import ArenaError

GEOMETRY = ArenaGeometry(num_slots=600, slot_nbytes=192)
SPEC = ArenaSpec("team/β", "a cluster: 1", 3, 4, bytes(range(32)), GEOMETRY)
HEADER = ArenaHeader(SPEC, "boot-1", ArenaOwner(4711, 99, "node-é"), 1_700_000_000.25)
SIZE = GEOMETRY.file_nbytes


def test_a_header_survives_the_way_through_bytes() -> None:
    page = pack_header(HEADER)
    assert len(page) == HEADER_NBYTES
    assert unpack_header(page, SIZE, "f") == HEADER


@pytest.mark.parametrize("text", ["x" * 255, "é" * 127, "\udcff", "nul\0inside", " "])
def test_texts_of_any_kind_survive(text: str) -> None:
    spec = replace(SPEC, namespace=text, name=text)
    header = replace(HEADER, spec=spec, owner=replace(HEADER.owner, node_id=text))
    assert unpack_header(pack_header(header), SIZE, "f") == header


def test_parts_do_not_overlap_and_begin_on_borders() -> None:
    for num_slots in (1, 2, 511, 512, 513, 100_000):
        geometry = ArenaGeometry(num_slots, 64)
        ends = [HEADER_NBYTES, geometry.words_offset + 8 * num_slots, geometry.records_offset + 64 * num_slots]
        starts = [geometry.words_offset, geometry.records_offset, geometry.data_offset]
        assert all(start >= end and start % 4096 == 0 for start, end in zip(starts, ends, strict=True))
        assert geometry.file_nbytes == geometry.data_offset + 64 * num_slots


@pytest.mark.parametrize(("num_slots", "slot_nbytes"), [(0, 64), (-1, 64), (1, 0), (1, 65), (1, -64), (2**60, 64)])
def test_impossible_geometries_are_refused(num_slots: int, slot_nbytes: int) -> None:
    with pytest.raises(ArenaError, match=str(slot_nbytes) if num_slots > 0 else "num_slots"):
        ArenaGeometry(num_slots, slot_nbytes)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"namespace": ""}, "namespace"),
        ({"name": "x" * 256}, "name"),
        ({"rank": 4}, "rank=4"),
        ({"rank": -1}, "rank=-1"),
        ({"fingerprint": b"short"}, "fingerprint"),
    ],
)
def test_impossible_specs_are_refused_by_field(change: dict[str, object], word: str) -> None:
    with pytest.raises(ArenaError, match=word):
        replace(SPEC, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [0, 8, 12, 80, 100, 150, 500, OWNER_OFFSET, OWNER_OFFSET + 20])
def test_a_flipped_bit_anywhere_is_noticed(offset: int) -> None:
    page = bytearray(pack_header(HEADER))
    page[offset] ^= 1
    with pytest.raises(ArenaError, match=r"the-file.*(magic|version|damaged)"):
        unpack_header(bytes(page), SIZE, "the-file")


def test_other_versions_foreign_and_short_files_are_named() -> None:
    page = bytearray(pack_header(HEADER))
    page[8] = 1
    with pytest.raises(ArenaError, match="version 1"):
        unpack_header(bytes(page), SIZE, "f")
    with pytest.raises(ArenaError, match="not an arena"):
        unpack_header(bytes(HEADER_NBYTES), SIZE, "f")
    with pytest.raises(ArenaError, match="100 bytes are too few"):
        unpack_header(bytes(100), 100, "f")


@pytest.mark.parametrize("size", [SIZE - 1, SIZE + 1])
def test_a_file_of_another_size_is_refused_with_both(size: int) -> None:
    with pytest.raises(ArenaError, match=rf"{size}.*{SIZE}"):
        unpack_header(pack_header(HEADER), size, "f")


@pytest.mark.parametrize(
    ("field_offset", "value", "words"),
    [
        (12, 9, "rank=9"),
        (28, 2**63, "more than a file"),
        (36, 63, "multiple of 64"),
        (44, 0, "do not fit"),
        (60, 12288, "do not fit"),
    ],
)
def test_fields_with_a_good_checksum_are_still_not_believed(field_offset: int, value: int, words: str) -> None:
    page = bytearray(pack_header(HEADER))
    identity_nbytes = 12 + 8 * 8 + 32 + 3 * 257
    struct.pack_into("<Q", page, field_offset, value)
    struct.pack_into("<I", page, identity_nbytes, zlib.crc32(page[:identity_nbytes]))
    with pytest.raises(ArenaError, match=rf"the-file: .*{words}"):
        unpack_header(bytes(page), SIZE, "the-file")


def test_a_text_longer_than_its_field_is_not_believed() -> None:
    page = bytearray(pack_header(HEADER))
    identity_nbytes = 12 + 8 * 8 + 32 + 3 * 257
    struct.pack_into("<H", page, 12 + 8 * 8 + 32, 256)
    struct.pack_into("<I", page, identity_nbytes, zlib.crc32(page[:identity_nbytes]))
    with pytest.raises(ArenaError, match="namespace claims 256 bytes"):
        unpack_header(bytes(page), SIZE, "f")


def test_the_heartbeat_is_one_word_outside_every_checksum() -> None:
    page = bytearray(pack_header(HEADER))
    struct.pack_into("<Q", page, HEARTBEAT_OFFSET, heartbeat_word(12.5))
    assert unpack_header(bytes(page), SIZE, "f") == replace(HEADER, heartbeat=12.5)


def test_file_names_are_safe_distinct_and_recognised() -> None:
    paths = [
        arena_path("/d", namespace, name, rank)
        for namespace, name in [("a", "bc"), ("ab", "c"), ("../x", "\0"), ("", "abc")]
        for rank in (0, 12)
    ]
    assert len(set(paths)) == len(paths)
    for path in paths:
        assert re.fullmatch(r"/d/lmcache_ray-[0-9a-f]{16}-r(0|12)\.arena", str(path))
    parsed = parse_file_name(paths[1].name)
    assert parsed is not None and (parsed.rank, parsed.is_temporary) == (12, False)
    temporary = parse_file_name(temporary_path(paths[1], b"\x00\xff\x10\xaa").name)
    assert temporary is not None and (temporary.rank, temporary.is_temporary) == (12, True)
    client = parse_file_name(liveness_path("/d", "a", "bc", "client 1").name)
    assert client is not None and (client.rank, client.cluster) == (None, parsed.cluster)


@pytest.mark.parametrize(
    "name", ["lmcache_ray-x-r0.arena", "lmcache_ray-0123456789abcdef-r.arena", "a.arena", "psm_1", "", "x.tmp"]
)
def test_foreign_file_names_are_not_ours(name: str) -> None:
    assert parse_file_name(name) is None
