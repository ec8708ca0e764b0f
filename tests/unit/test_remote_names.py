"""Names of a world's objects in a remote store, and the manifests under some of them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ray.errors import ConfigError, DamagedChunkError, InvalidRequestError
from lmcache_ray.storage.base import check_names
from lmcache_ray.storage.remote_manifest import MAX_NBYTES, Manifest, pack_manifest, parse_manifest
from lmcache_ray.storage.remote_names import ChunkPlace, ObjectName, RemoteNames, Writing

KEY = bytes(range(32))
NAMES = RemoteNames("some/prefix", "scope-1", "zstd")
WRITING = Writing("cluster-a", 0x1F)
MANIFEST = Manifest(KEY, WRITING, bytes(32), "zstd", (0, 1), 4096)

words = st.text("abcdefXYZ012_-", min_size=1, max_size=20)


def test_what_names_look_like() -> None:
    folder = "some/prefix/scope-1/000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    assert NAMES.folder == "some/prefix/scope-1"
    assert NAMES.manifest(KEY) == f"{folder}/manifest.zstd"
    assert NAMES.shard(KEY, WRITING, 7) == f"{folder}/cluster-a-000000000000001f.r7.zstd"


@given(words, words, words, st.binary(min_size=32, max_size=32), words, st.integers(0, 2**64 - 1), st.integers(0, 999))
def test_a_name_says_what_it_was_made_of(
    prefix: str, scope: str, serde: str, key: bytes, origin: str, generation: int, rank: int
) -> None:
    names, place = RemoteNames(prefix, scope, serde), ChunkPlace(scope, key, serde)
    shard, manifest = names.shard(key, Writing(origin, generation), rank), names.manifest(key)
    check_names([shard, manifest, names.folder])
    assert names.parse(shard) == ObjectName(place, Writing(origin, generation), rank)
    assert names.parse(manifest) == ObjectName(place, None, None)
    assert names.manifest_at(place) == manifest


@pytest.mark.parametrize("name", [
    "", "some/prefix", "other/scope-1/x", f"scope-1/{KEY.hex()}/manifest.zstd",
    f"some/prefix/{KEY.hex()}/manifest.zstd",
    f"some/prefix/scope-1/{KEY.hex()}/manifest", f"some/prefix/scope-1/{KEY.hex()}/manifest.zstd.old",
    f"some/prefix/scope-1/{KEY.hex()[:-2]}/manifest.zstd", f"some/prefix/scope-1/{KEY.hex().upper()}/manifest.zstd",
    f"some/prefix/scope-1/{KEY.hex()}/a-1f.r0.zstd", f"some/prefix/scope-1/{KEY.hex()}/a-{0x1F:016x}.rx.zstd",
    f"some/prefix/scope-1/{KEY.hex()}/x/manifest.zstd", f"some/prefix/sco pe/{KEY.hex()}/manifest.zstd",
])  # fmt: skip
def test_other_names_are_not_ours(name: str) -> None:
    assert NAMES.parse(name) is None


@pytest.mark.parametrize("prefix", ["", "/a", "a/", "a//b", "../a", ".a", "ä", "a b", "x" * 201])
def test_a_prefix_of_which_no_name_can_be_made(prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        RemoteNames(prefix, "scope", "naive")


@pytest.mark.parametrize("word", ["", "a/b", "a.b", "ä", "x" * 129])
def test_a_scope_or_serde_of_which_no_name_can_be_made(word: str) -> None:
    with pytest.raises(ConfigError, match="scope"):
        RemoteNames("prefix", word, "naive")
    with pytest.raises(ConfigError, match="serde"):
        RemoteNames("prefix", "scope", word)


def test_a_key_has_32_bytes() -> None:
    with pytest.raises(InvalidRequestError, match="32 bytes"):
        NAMES.manifest(b"short")
    with pytest.raises(InvalidRequestError, match="32 bytes"):
        NAMES.shard(bytes(33), WRITING, 0)


def test_a_manifest_is_small_and_readable_and_says_what_it_was_made_of() -> None:
    stored = pack_manifest(MANIFEST)
    assert len(stored) < 500
    fields = json.loads(stored)
    assert (fields["key"], fields["origin"], fields["holders"]) == (KEY.hex(), "cluster-a", [0, 1])
    assert parse_manifest(stored) == MANIFEST
    assert parse_manifest(memoryview(stored)) == MANIFEST


def test_a_manifest_of_many_ranks_is_within_the_bound() -> None:
    manifest = Manifest(KEY, WRITING, bytes(32), "zstd", tuple(range(4096)), 1)
    assert parse_manifest(pack_manifest(manifest)) == manifest


def test_any_bit_that_changes_in_a_manifest_is_found() -> None:
    stored = pack_manifest(MANIFEST)
    for bit in range(8 * len(stored)):
        changed = bytearray(stored)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedChunkError):
            parse_manifest(changed)


@pytest.mark.parametrize("stored", [
    b"", b"{}", b"[]", b"null", b"\x80\x04N.", b"\xff" * 100, b"[" * 60_000, b"x" * (MAX_NBYTES + 1),
    pack_manifest(MANIFEST)[:-1], pack_manifest(MANIFEST) + b" ",
    json.dumps(json.loads(pack_manifest(MANIFEST))).encode(),
    pack_manifest(MANIFEST).replace(b'"version":1', b'"version":2'),
    pack_manifest(MANIFEST).replace(b'"nbytes":4096', b'"nbytes":-1'),
    pack_manifest(MANIFEST).replace(b'"holders":[0,1]', b'"holders":[0.5]'),
])  # fmt: skip
def test_what_is_no_manifest(stored: bytes) -> None:
    with pytest.raises(DamagedChunkError):
        parse_manifest(stored)
