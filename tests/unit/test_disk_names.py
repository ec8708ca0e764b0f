"""Names of the disk directory, its arithmetic, and its ledger: pure, no file is made."""

import pytest

from lmcache_ray.storage.disk_names import (
    StoredChunk,
    chunk_path,
    is_fingerprint_directory,
    leaf_directory,
    parse_chunk_name,
    parse_rank_directory,
    rank_directory,
    temporary_path,
)
from lmcache_ray.storage.disk_space import (
    BLOCK_NBYTES,
    SPARE_NBYTES,
    SpaceLedger,
    chunk_file_nbytes,
    disk_capacity,
    file_nbytes_on_disk,
)
from tests.unit.stored_chunks import chunk_of, layout_of

CHUNK = StoredChunk(bytes.fromhex("ab" + "0" * 62), 255)


def test_a_name_says_key_and_generation_and_is_found_by_both() -> None:
    assert leaf_directory(CHUNK.key) == "a/b"
    assert chunk_path(CHUNK) == f"a/b/ab{'0' * 62}.00000000000000ff.kv"
    name = chunk_path(CHUNK).rpartition("/")[2]
    assert parse_chunk_name("a/b", name) == (CHUNK, False)
    assert parse_chunk_name("a/b", temporary_path(name, b"\x01\x02\x03\x04")) == (CHUNK, True)


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        ("a/c", f"ab{'0' * 62}.00000000000000ff.kv"),
        ("a/b", f"ab{'0' * 61}.00000000000000ff.kv"),
        ("a/b", f"AB{'0' * 62}.00000000000000ff.kv"),
        ("a/b", f"ab{'0' * 62}.ff.kv"),
        ("a/b", f"ab{'0' * 62}.00000000000000ff.kv.bak"),
        ("a/b", f"ab{'0' * 62}.00000000000000ff.kv\n"),
        ("a/b", f"ab{'0' * 62}.00000000000000ff.kv.tmp"),
        ("a/b", ".nfs000000"),
        ("a/b", ""),
    ],
)
def test_all_other_names_are_foreign(leaf: str, name: str) -> None:
    assert parse_chunk_name(leaf, name) is None


def test_directories_of_ours() -> None:
    fingerprint = bytes(range(32))
    assert rank_directory(fingerprint, 3) == f"{bytes(range(16)).hex()}/rank-3"
    assert is_fingerprint_directory(bytes(range(16)).hex())
    assert not is_fingerprint_directory("lost+found")
    assert [parse_rank_directory(name) for name in ("rank-0", "rank-12", "rank-01", "rank-", "rank--1", "rank-0x")] == [
        0, 12, None, None, None, None,
    ]  # fmt: skip


def test_files_take_whole_blocks() -> None:
    assert [file_nbytes_on_disk(nbytes) for nbytes in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def test_the_capacity_is_what_fits_in_the_worst_case() -> None:
    layout = layout_of()
    each = file_nbytes_on_disk(chunk_file_nbytes(layout, 0)) + 256
    one = SPARE_NBYTES + 3 * BLOCK_NBYTES + each  # the rank's directory, and two for the chunk
    assert [disk_capacity(nbytes, layout, 0) for nbytes in (0, one - 1, one)] == [0, 0, 1]
    two = one + 2 * BLOCK_NBYTES + each
    assert [disk_capacity(nbytes, layout, 0) for nbytes in (two - 1, two)] == [1, 2]
    many = SPARE_NBYTES + 273 * BLOCK_NBYTES + 1000 * each  # all directories are there
    assert [disk_capacity(nbytes, layout, 0) for nbytes in (many - 1, many)] == [999, 1000]
    assert disk_capacity(-1, layout, 0) == 0


def test_a_ledger_counts_what_is_there_and_keeps_promises() -> None:
    ledger = SpaceLedger()
    ledger.record_directory("", 4096)
    assert ledger.new_directories_nbytes("a/b") == 2 * BLOCK_NBYTES
    ledger.record_directory("a", 4096)
    ledger.record_directory("a/b", 4096)
    assert ledger.new_directories_nbytes("a/b") == 0
    ledger.record_file(chunk_of(1), 8192)
    ledger.record_file(chunk_of(1), 4096)  # the same file, of another size now
    assert (ledger.nbytes, ledger.num_files) == (4 * 4096, 1)
    limit = ledger.nbytes + SPARE_NBYTES + 4096
    assert ledger.fits(4096, limit) and not ledger.fits(4097, limit)
    ledger.reserve(4096)
    assert ledger.fits(0, limit) and not ledger.fits(1, limit)
    ledger.release(4096)
    ledger.forget_file(chunk_of(1))
    ledger.forget_file(chunk_of(1))
    ledger.forget_directory("a/b")
    assert (ledger.nbytes, ledger.num_files) == (2 * 4096, 0)
    assert ledger.directories_deepest_first() == ["a"]


def test_a_ledger_that_starts_again_keeps_its_promises() -> None:
    ledger = SpaceLedger()
    ledger.record_file(chunk_of(1), 4096)
    ledger.reserve(4096)
    ledger.restart({chunk_of(2): 8192}, {"": 4096})
    assert (ledger.nbytes, ledger.num_files) == (3 * 4096, 1)
    assert not ledger.fits(1, 4 * 4096 + SPARE_NBYTES)
