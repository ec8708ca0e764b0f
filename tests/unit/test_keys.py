"""Chunk keys: what they depend on, what they never depend on, and their exact bytes."""

import hashlib
import os
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ray.errors import ConfigError, InvalidRequestError
from lmcache_ray.keys import ChunkHasher, MediaSpan, RequestIdentity, checked_hashes

C = 4
TOKENS = list(range(100, 100 + 3 * C))
HASHER = ChunkHasher("llama", chunk_size=C)
REPOSITORY = Path(__file__).parents[2]

GOLDEN_PLAIN = [
    "54872d12c773944f31b223982e2ae4cd56ed89be5ed48c9a6de6e9e8fcb54a44",
    "5550337d4148e7a4c4a8213767940bdf6aa7fdea9b543fc8d13df238d13704da",
]
GOLDEN_FULL = [
    "d3a218dc0be95daeed92be315fcc375908a683a7d22c0a0a8bb90a1487fb3739",
    "cffebf02462f13cb6f627b20671198b1e9e0904552fedef056972515db0528e3",
    "f82bf7ef18a6a3f7404653afa3425f567ab4ec1a7f024366c557fff900f5e53f",
]


def _number(value):
    return value.to_bytes(8, "little")


def _typed(value):
    kinds = {type(None): b"n", str: b"s", int: b"i", bytes: b"b"}
    content = value if isinstance(value, bytes) else b"" if value is None else str(value).encode()
    return kinds[type(value)] + _number(len(content)) + content


def _chain(root_fields, *chunks):
    """The keys as the format says them, written out a second time."""
    digest, keys = hashlib.sha256(b"".join(map(_typed, root_fields))).digest(), []
    for tokens, suffix in chunks:
        digest = hashlib.sha256(digest + b"".join(map(_number, tokens)) + suffix).digest()
        keys.append(digest)
    return keys


def test_golden_keys_without_identity():
    keys = HASHER.keys(TOKENS[: 2 * C])
    assert keys == _chain([1, "llama", None, 0, C, None, None], (TOKENS[:C], b""), (TOKENS[C : 2 * C], b""))
    assert [key.hex() for key in keys] == GOLDEN_PLAIN


def test_golden_keys_with_every_field():
    hasher = ChunkHasher("llama", model_revision="r1", model_generation=3, chunk_size=C, keep_partial=True)
    identity = RequestIdentity.parse({"cache_salt": "sält", "lora_id": -7, "media": [(2, 4, "img"), (7, 9, b"\x00")]})
    end = b"\xff" * 8
    keys = hasher.keys(TOKENS[:10], identity)
    assert keys == _chain(
        [1, "llama", "r1", 3, C, "sält", -7],
        (TOKENS[:4], end + _number(2) + _number(2) + _number(0) + _typed("img")),
        (
            TOKENS[4:8],
            end
            + (_number(0) + _number(2) + _number(2) + _typed("img"))
            + (_number(3) + _number(1) + _number(0) + _typed(b"\x00")),
        ),
        (TOKENS[8:10], end + _number(0) + _number(2) + _number(1) + _typed(b"\x00")),
    )
    assert [key.hex() for key in keys] == GOLDEN_FULL


def test_a_lossy_serde_is_one_more_field_of_the_root():
    lossy = ChunkHasher("llama", chunk_size=C, lossy="fp8")
    assert lossy.keys(TOKENS[:C]) == _chain([1, "llama", None, 0, C, "fp8", None, None], (TOKENS[:C], b""))


def test_keys_of_lossy_chunks_are_never_those_of_exact_ones():
    hashers = [ChunkHasher("llama", chunk_size=C, lossy=lossy) for lossy in (None, "", "fp8", "int4")]
    identities = [RequestIdentity(salt, lora) for salt in (None, "fp8") for lora in (None, "fp8")]
    keys = [hasher.keys(TOKENS[:C], identity)[0] for hasher in hashers for identity in identities]
    assert len(set(keys)) == len(keys)


def test_the_scope_is_the_root_of_the_model_alone():
    assert HASHER.scope() == hashlib.sha256(b"".join(map(_typed, [1, "llama", None, 0, C]))).digest()
    assert ChunkHasher("llama", chunk_size=C, keep_partial=True).scope() == HASHER.scope()
    others = [
        ChunkHasher("llama2", chunk_size=C),
        ChunkHasher("llama", chunk_size=C, model_revision="main"),
        ChunkHasher("llama", chunk_size=C, model_generation=1),
        ChunkHasher("llama", chunk_size=2 * C),
        ChunkHasher("llama", chunk_size=C, lossy="fp8"),
        HASHER,
    ]
    assert {len(hasher.scope()) for hasher in others} == {32}
    assert len({hasher.scope() for hasher in others}) == len(others)


def test_fresh_processes_agree_whatever_their_hash_seed():
    code = (
        "from lmcache_ray.keys import ChunkHasher, RequestIdentity as I; import sys;"
        "i = I.parse({'cache_salt': 's', 'lora_id': 'x', 'media': [(1, 9, 'm')]});"
        "print(b''.join(ChunkHasher('llama', chunk_size=4).keys(range(100, 112), i)).hex(), 'torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPOSITORY, env=environment | seed, stdout=subprocess.PIPE, text=True
        )
        for seed in ({}, {"PYTHONHASHSEED": "0"}, {"PYTHONHASHSEED": "random"})
    ]
    identity = RequestIdentity("s", "x", (MediaSpan(1, 9, "m"),))
    expected = b"".join(HASHER.keys(TOKENS, identity)).hex()
    assert [run.communicate(timeout=60)[0].split() for run in runs] == [[expected, "False"]] * 3


@pytest.mark.parametrize(
    "form", [tuple, np.array, torch.tensor, lambda ids: array("I", ids), lambda ids: range(ids[0], ids[-1] + 1)]
)
def test_the_form_of_the_tokens_does_not_matter(form):
    assert HASHER.keys(form(TOKENS)) == HASHER.keys(TOKENS)


@pytest.mark.parametrize("keep_partial", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, C - 1, C, C + 1, 2 * C - 1, 129 * C])
def test_one_32_byte_key_per_span(num_tokens, keep_partial):
    hasher = ChunkHasher("llama", chunk_size=C, keep_partial=keep_partial)
    keys = hasher.keys(range(num_tokens))
    assert len(keys) == len(hasher.spans(num_tokens)) == len(set(keys))
    assert {len(key) for key in keys} <= {32}


def test_the_partial_tail_leaves_full_chunks_alone():
    partial = ChunkHasher("llama", chunk_size=C, keep_partial=True)
    assert partial.keys(TOKENS[:-1])[:-1] == HASHER.keys(TOKENS[:-1])
    assert partial.keys(TOKENS[:-1])[-1] != HASHER.keys(TOKENS)[-1]


def test_a_token_changes_its_chunk_and_all_later_ones():
    changed = HASHER.keys([*TOKENS[:5], 0, *TOKENS[6:]])
    assert [mine == other for mine, other in zip(HASHER.keys(TOKENS), changed, strict=True)] == [True, False, False]


VARIANTS = {
    "plain": (HASHER, {}),
    "model": (ChunkHasher("llama2", chunk_size=C), {}),
    "no name": (ChunkHasher("", chunk_size=C), {}),
    "revision": (ChunkHasher("llama", model_revision="a", chunk_size=C), {}),
    "empty revision": (ChunkHasher("llama", model_revision="", chunk_size=C), {}),
    "generation": (ChunkHasher("llama", model_generation=1, chunk_size=C), {}),
    "chunk size": (ChunkHasher("llama", chunk_size=2 * C), {}),
    "salt": (HASHER, {"cache_salt": "1"}),
    "empty salt": (HASHER, {"cache_salt": ""}),
    "lora text": (HASHER, {"lora_id": "1"}),
    "lora number": (HASHER, {"lora_id": 1}),
    "lora zero": (HASHER, {"lora_id": 0}),
    "empty lora": (HASHER, {"lora_id": ""}),
    "both": (HASHER, {"cache_salt": "1", "lora_id": "1"}),
    "moved border": (ChunkHasher("llam", model_revision="a", chunk_size=C), {}),
    "lone surrogate": (HASHER, {"cache_salt": "\ud800"}),
}


def test_every_identity_field_changes_all_keys():
    keys = [hasher.keys(TOKENS, RequestIdentity.parse(configs)) for hasher, configs in VARIANTS.values()]
    flat = [key for one in keys for key in one]
    assert len(flat) == 15 * 3 + 1  # a chunk size of 2C leaves one chunk
    assert len(set(flat)) == len(flat)


def test_none_is_absent():
    none = RequestIdentity.parse({"cache_salt": None, "lora_id": None, "media": None})
    assert none == RequestIdentity.parse(None) == RequestIdentity.parse({}) == RequestIdentity()


_text = st.text(st.characters(codec=None), max_size=4)
_lora = st.none() | _text | st.integers(-300, 300)


@given(st.tuples(st.none() | _text, st.none() | _text, _lora), st.tuples(st.none() | _text, st.none() | _text, _lora))
def test_equal_keys_need_equal_identities(one, other):
    def key(revision, salt, lora):
        return ChunkHasher("m", model_revision=revision, chunk_size=1).keys([5], RequestIdentity(salt, lora))

    assert (key(*one) == key(*other)) == (one == other)


def _media_keys(*spans, tokens=TOKENS):
    return HASHER.keys(tokens, RequestIdentity.parse({"media": list(spans)}))


def test_media_changes_keys_from_its_first_chunk_on():
    plain, media = HASHER.keys(TOKENS), _media_keys((5, 2, "a"))
    assert [mine == other for mine, other in zip(plain, media, strict=True)] == [True, False, False]


@pytest.mark.parametrize(
    "spans",
    [
        [(5, 2, "b")],
        [(5, 2, b"a")],
        [(4, 2, "a")],
        [(5, 3, "a")],
        [(4, 3, "a")],
        [(3, 4, "a")],
        [(5, 1, "a"), (6, 1, "a")],
        [(5, 2, "a"), (7, 1, "a")],
    ],
)
def test_media_id_place_length_and_offset_all_count(spans):
    assert _media_keys(*spans)[1] != _media_keys((5, 2, "a"))[1]


def test_text_and_number_media_ids_differ():
    assert len({_media_keys((0, 4, media_id))[0] for media_id in ("1", 1, b"1")}) == 3


def test_what_of_a_span_lies_behind_a_chunk_does_not_change_it():
    assert _media_keys((5, 3, "a"))[:2] == _media_keys((5, 300, "a"))[:2]


def test_a_prefix_has_the_keys_of_the_whole():
    spans = [(3, 4, "a"), (9, 50, "b"), (70, 1, "c")]
    assert _media_keys(*spans, tokens=TOKENS[: 2 * C]) == _media_keys(*spans)[:2]


@given(st.data())
def test_keys_after_the_first_chunks_are_those_of_the_whole(data):
    tokens = data.draw(st.lists(st.integers(0, 2**63 - 1), max_size=6 * C))
    num_known = data.draw(st.integers(0, len(tokens) // C))
    spans = [(3, 4, "a"), (9, 5, "b"), (17, 1, "c")]
    identity = RequestIdentity.parse(data.draw(st.sampled_from([None, {"lora_id": 3}, {"media": spans}])))
    for keep_partial in (False, True):
        hasher = ChunkHasher("llama", chunk_size=C, keep_partial=keep_partial)
        whole = hasher.keys(tokens, identity)
        assert hasher.keys(tokens[num_known * C :], identity, after=whole[:num_known]) == whole[num_known:]


@pytest.mark.parametrize("wrong", [b"short", "b" * 32, None])
def test_what_is_no_key_has_none_after_it(wrong):
    with pytest.raises(InvalidRequestError, match=r"after\[1\] is .*accepted: bytes of length 32"):
        HASHER.keys(TOKENS, after=[A, wrong])


def test_media_can_be_added_behind_a_token():
    identity = RequestIdentity.parse({"cache_salt": "s", "media": [(2, 3, "a")]})
    more = identity.with_media([(5, 1, "b"), MediaSpan(9, 2, 7)], start=5)
    assert more == RequestIdentity.parse({"cache_salt": "s", "media": [(2, 3, "a"), (5, 1, "b"), (9, 2, 7)]})
    assert identity.with_media((), start=5) == identity
    with pytest.raises(InvalidRequestError, match=r"media\[1\] begins at token 4; accepted: 5 and on"):
        identity.with_media([(6, 1, "b"), (4, 1, "c")], start=5)
    with pytest.raises(InvalidRequestError, match=r"media\[1\] begins at 4, before media\[0\] ends at 5"):
        identity.with_media([(4, 1, "b")], start=4)
    with pytest.raises(InvalidRequestError, match=r"media is 'abc' \(str\)"):
        identity.with_media("abc", start=0)


def test_media_between_borders_touches_only_what_it_overlaps():
    assert _media_keys((12, 5, "a")) == HASHER.keys(TOKENS)
    assert _media_keys((8, 4, "a"))[:2] == HASHER.keys(TOKENS)[:2]


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"cache_slat": "x"}, "unknown key 'cache_slat'.*did you mean 'cache_salt'"),
        ({"zzz": 1}, "unknown key 'zzz'; known: cache_salt, lora_id, media"),
        ({3: 1}, "unknown key 3"),
        ("cache_salt", "request_configs is 'cache_salt'"),
        ({"cache_salt": 1}, r"cache_salt is 1 \(int\)"),
        ({"cache_salt": b"x"}, r"cache_salt is b'x' \(bytes\)"),
        ({"lora_id": True}, r"lora_id is True \(bool\)"),
        ({"lora_id": 1.0}, r"lora_id is 1.0 \(float\)"),
        ({"media": "abc"}, r"media is 'abc' \(str\)"),
        ({"media": [(1, 2)]}, r"media\[0\] is \(1, 2\)"),
        ({"media": [(1, 0, "a")]}, "media length is 0"),
        ({"media": [(-1, 2, "a")]}, "media start is -1"),
        ({"media": [(True, 2, "a")]}, "media start is True"),
        ({"media": [(1.5, 2, "a")]}, "media start is 1.5"),
        ({"media": [(1, 2**63, "a")]}, "media span ends at"),
        ({"media": [(1, 2, None)]}, "media id is None"),
        ({"media": [(1, 2, True)]}, "media id is True"),
        ({"media": [(1, 2, "a"), (2, 2, "b")]}, r"media\[1\] begins at 2, before media\[0\] ends at 3"),
        ({"media": [(9, 2, "a"), (2, 2, "b")]}, r"media\[1\] begins at 2"),
    ],
)
def test_wrong_request_configs_are_refused(configs, message):
    with pytest.raises(InvalidRequestError, match=message):
        RequestIdentity.parse(configs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_name": None}, "model_name is None"),
        ({"model_revision": 3}, "model_revision is 3"),
        ({"model_generation": -1}, "model_generation is -1"),
        ({"model_generation": True}, "model_generation is True"),
        ({"lossy": 8}, r"lossy is 8 \(int\); accepted: str or None"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 2.0}, "chunk_size is 2.0"),
    ],
)
def test_impossible_hashers_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ChunkHasher(**({"model_name": "m", "chunk_size": C} | arguments))


def test_checked_hashes_accepts_what_a_hasher_made():
    hasher = ChunkHasher("llama", chunk_size=C, keep_partial=True)
    keys = hasher.keys(TOKENS[:-1])
    assert checked_hashes(keys, [4, 4, 3], C, keep_partial=True) == (keys, [4, 4, 3])
    for keep_partial in (False, True):
        assert checked_hashes(keys[:2], [4, 4], C, keep_partial=keep_partial) == (keys[:2], [4, 4])
        assert checked_hashes([], [], C, keep_partial=keep_partial) == ([], [])


def test_a_partial_last_chunk_is_refused_where_partial_chunks_are_not_kept():
    with pytest.raises(InvalidRequestError, match=r"offsets\[1\] is 3 .*accepted: 4, as partial.*save_unfull_chunk"):
        checked_hashes([A, B], [4, 3], C, keep_partial=False)


A, B = b"a" * 32, b"b" * 32


@pytest.mark.parametrize(
    ("hashes", "offsets", "message"),
    [
        ([A], None, "offsets is missing"),
        (None, [4], "hashes is missing"),
        ([A, B], [4], "2 hashes but 1 offsets"),
        ([A, b"short"], [4, 4], r"hashes\[1\] is b'short'"),
        ([A, 12345], [4, 4], r"hashes\[1\] is 12345 \(int\)"),
        ([A, "b" * 32], [4, 4], r"hashes\[1\] is 'bbb.*\(str\)"),
        ([A, A], [4, 4], r"hashes\[1\] equals hashes\[0\]"),
        ([A, B], [3, 4], r"offsets\[0\] is 3.*only the last"),
        ([A, B], [4, 5], r"offsets\[1\] is 5.*1 to 4"),
        ([A, B], [4, 0], r"offsets\[1\] is 0"),
        ([A, B], [4, True], r"offsets\[1\] is True"),
        ([A, B], [4.0, 4], r"offsets\[0\] is 4.0"),
    ],
)
def test_wrong_hashes_and_offsets_are_refused(hashes, offsets, message):
    with pytest.raises(InvalidRequestError, match=message):
        checked_hashes(hashes, offsets, C, keep_partial=True)
