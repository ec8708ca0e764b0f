"""Chunk keys: what makes two chunks the same one. Pure.

A key is a SHA-256 digest, chained so that it names the chunk *and everything before it*::

    root = SHA256(version, model name, revision, generation, chunk size[, lossy], salt, LoRA)     see `_field`
    key[0] = SHA256(root   || tokens of chunk 0 || media)
    key[i] = SHA256(key[i-1] || tokens of chunk i || media)

A token is 8 little-endian bytes. ``media`` is empty unless a media span (an image, say, whose placeholder tokens look
the same for every image) overlaps the chunk; then it is the int64 -1, which no token id can be and which therefore
ends the tokens without doubt, followed per overlapping span by its position in the chunk, the overlap's length, its
offset within the span, and the media id as a typed field. Equal keys need equal bytes all along, so nothing depends
on the process, its hash seed, or the type that the tokens came in.
"""

import difflib
import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice, pairwise
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lmcache_ray.chunking import Span, chunk_spans
from lmcache_ray.errors import ConfigError, InvalidRequestError, shown
from lmcache_ray.tokens import TokenSequence, token_ids

KEY_FORMAT_VERSION: Final = 1
KEY_NBYTES: Final = 32
_END_OF_TOKENS: Final = b"\xff" * 8
_MAX_POSITION: Final = 2**63 - 1

FieldValue: TypeAlias = str | int | bytes | None


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """The tokens ``[start, start + length)`` of a prompt stand for the medium `media_id`."""

    start: int
    length: int
    media_id: str | int | bytes

    def __post_init__(self) -> None:
        if not _is_int(self.start) or self.start < 0:
            raise InvalidRequestError(f"media start is {shown(self.start)}; accepted: an int, at least 0")
        if not _is_int(self.length) or self.length < 1:
            raise InvalidRequestError(f"media length is {shown(self.length)}; accepted: an int, at least 1")
        if self.end > _MAX_POSITION:
            raise InvalidRequestError(f"media span ends at {self.end}; accepted: less than 2**63")
        if not isinstance(self.media_id, str | bytes) and not _is_int(self.media_id):
            raise InvalidRequestError(f"media id is {shown(self.media_id)}; accepted: str, int or bytes")

    @property
    def end(self) -> int:
        """The first token after the span."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What one request adds to the identity of its chunks. Absent (None) and empty differ, and so do 1 and "1".

    `media` spans are sorted and do not overlap; they may reach beyond the tokens of a call, so that a prefix of a
    prompt has the keys of the whole.
    """

    cache_salt: str | None = None
    lora_id: str | int | None = None
    media: tuple[MediaSpan, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "media", tuple(self.media))
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise InvalidRequestError(f"cache_salt is {shown(self.cache_salt)}; accepted: str or None")
        if self.lora_id is not None and not isinstance(self.lora_id, str) and not _is_int(self.lora_id):
            raise InvalidRequestError(f"lora_id is {shown(self.lora_id)}; accepted: str, int or None")
        for index, (before, span) in enumerate(pairwise(self.media), start=1):
            if span.start < before.end:
                raise InvalidRequestError(
                    f"media[{index}] begins at {span.start}, before media[{index - 1}] ends at {before.end}; "
                    "accepted: spans sorted by start that do not overlap"
                )

    @classmethod
    def parse(cls, request_configs: Mapping[str, object] | None) -> "RequestIdentity":
        """The identity that a call's `request_configs` describe; None and ``{}`` describe the plain one.

        Keys: `cache_salt` (str), `lora_id` (str or int), `media` (a sequence of ``(start, length, id)``); None is
        absent. Raises `InvalidRequestError` for any other key, type or span.
        """
        if request_configs is None:
            return cls()
        if not isinstance(request_configs, Mapping):
            raise InvalidRequestError(f"request_configs is {shown(request_configs)}; accepted: a mapping or None")
        for key in request_configs:
            _check_known(key)
        values = {key: value for key, value in request_configs.items() if value is not None}
        media = _parse_media(values.get("media", ()))
        return cls(values.get("cache_salt"), values.get("lora_id"), media)  # type: ignore[arg-type]  # __post_init__ checks

    def with_media(self, media: object, *, start: int) -> "RequestIdentity":
        """This identity and further media spans, given as to `parse`, none of which begins before token `start`."""
        spans = _parse_media(media)
        for index, span in enumerate(spans):
            if span.start < start:
                raise InvalidRequestError(
                    f"media[{index}] begins at token {span.start}; accepted: {start} and on, where the new tokens are"
                )
        return replace(self, media=(*self.media, *spans)) if spans else self


_NO_IDENTITY: Final = RequestIdentity()


@dataclass(frozen=True, slots=True)
class ChunkHasher:
    """Computes the keys of prompts for one model and one chunk size.

    `model_generation` is bumped when an engine resets its cache after a weight update. With `keep_partial` a partial
    tail has a key too. `lossy` names what rounds the KV on its way: such chunks never have the key of exact ones.
    """

    model_name: str
    _: KW_ONLY
    model_revision: str | None = None
    model_generation: int = 0
    chunk_size: int
    keep_partial: bool = False
    lossy: str | None = None
    _root_prefix: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model_name, str):
            raise ConfigError(f"model_name is {shown(self.model_name)}; accepted: str")
        for name, text in (("model_revision", self.model_revision), ("lossy", self.lossy)):
            if text is not None and not isinstance(text, str):
                raise ConfigError(f"{name} is {shown(text)}; accepted: str or None")
        for name, number, least in (("model_generation", self.model_generation, 0), ("chunk_size", self.chunk_size, 1)):
            if not _is_int(number) or number < least:
                raise ConfigError(f"{name} is {shown(number)}; accepted: an int, at least {least}")
        fixed = (KEY_FORMAT_VERSION, self.model_name, self.model_revision, self.model_generation, self.chunk_size)
        lossy = () if self.lossy is None else (self.lossy,)
        object.__setattr__(self, "_root_prefix", b"".join(map(_field, (*fixed, *lossy))))

    def scope(self) -> bytes:
        """32 bytes that name the model's part of a store which others share: the root without salt and LoRA."""
        return hashlib.sha256(self._root_prefix).digest()

    def spans(self, num_tokens: int) -> list[Span]:
        """The span of every chunk that has a key, in order."""
        return chunk_spans(num_tokens, self.chunk_size, keep_partial=self.keep_partial)

    def keys(
        self, tokens: TokenSequence, identity: RequestIdentity = _NO_IDENTITY, *, after: Sequence[bytes] = ()
    ) -> list[bytes]:
        """One 32-byte key per span of ``spans(len(tokens))``. Raises `InvalidRequestError` as `token_ids` does.

        With `after`, the keys that the same identity gives to a prompt's leading full chunks, `tokens` are those that
        follow these chunks, and have the keys that they would have in the whole prompt; nothing is hashed again.
        """
        return self.keys_of_ids(token_ids(tokens), identity, after=after)

    def keys_of_ids(self, ids: NDArray[np.int64], identity: RequestIdentity, *, after: Sequence[bytes]) -> list[bytes]:
        """As `keys`, of ids that `token_ids` has checked."""
        end_of_chunks = len(ids) if self.keep_partial else len(ids) - len(ids) % self.chunk_size
        chunked, base = ids[:end_of_chunks].data, len(after) * self.chunk_size
        digest = _checked_key(after[-1], f"after[{len(after) - 1}]") if after else self._root(identity)
        new_message, media, keys = hashlib.sha256().copy, identity.media, []
        for start in range(0, end_of_chunks, self.chunk_size):
            message = new_message()
            message.update(digest)
            message.update(chunked[start : start + self.chunk_size])
            if media:
                message.update(_media_suffix(media, base + start, base + min(start + self.chunk_size, end_of_chunks)))
            digest = message.digest()
            keys.append(digest)
        return keys

    def _root(self, identity: RequestIdentity) -> bytes:
        return hashlib.sha256(self._root_prefix + _field(identity.cache_salt) + _field(identity.lora_id)).digest()


class HashedChunks(NamedTuple):
    """The chunks of one prompt by key: `lengths[i]` tokens have the key `keys[i]`."""

    keys: list[bytes]
    lengths: list[int]


def checked_hashes(
    hashes: Sequence[bytes] | None, offsets: Sequence[int] | None, chunk_size: int, *, keep_partial: bool
) -> HashedChunks:
    """The chunks that a caller names by key (`hashes`) and number of tokens (`offsets`) in place of tokens.

    Each hash is a 32-byte digest, no two alike; each length is `chunk_size`, only the last may be shorter, and that
    only with `keep_partial`. Raises `InvalidRequestError` that names the first wrong position.
    """
    if hashes is None or offsets is None:
        missing = "hashes" if hashes is None else "offsets"
        raise InvalidRequestError(f"{missing} is missing; accepted: hashes and offsets together, or tokens")
    for name, given in (("hashes", hashes), ("offsets", offsets)):
        if not isinstance(given, Sequence):  # the order counts
            raise InvalidRequestError(f"{name} is {shown(given)}; accepted: a list or tuple")
    if len(hashes) != len(offsets):
        raise InvalidRequestError(f"{len(hashes)} hashes but {len(offsets)} offsets; accepted: one length per hash")
    if not _are_different_keys(hashes):
        _check_hashes(hashes)
    if not (set(map(type, offsets)) <= {int} and set(offsets) <= {chunk_size}):
        _check_lengths(offsets, chunk_size, keep_partial=keep_partial)
    return HashedChunks(list(hashes), list(offsets))


def _are_different_keys(hashes: Sequence[bytes]) -> bool:
    are_keys = set(map(type, hashes)) <= {bytes} and set(map(len, hashes)) <= {KEY_NBYTES}
    return are_keys and len(set(hashes)) == len(hashes)


def _check_hashes(hashes: Sequence[bytes]) -> None:
    """Raises for the first that is no key, or not another one; subclasses of bytes are keys too."""
    seen: dict[bytes, int] = {}
    for index, key in enumerate(hashes):
        if seen.setdefault(_checked_key(key, f"hashes[{index}]"), index) != index:
            raise InvalidRequestError(f"hashes[{index}] equals hashes[{seen[key]}]; a prompt's keys all differ")


def _check_lengths(offsets: Sequence[int], chunk_size: int, *, keep_partial: bool) -> None:
    last_partial = len(offsets) - 1 if keep_partial else None
    for index, length in enumerate(offsets):
        shortest = 1 if index == last_partial else chunk_size
        if not _is_int(length) or not shortest <= length <= chunk_size:
            if index == last_partial:
                accepted = f"1 to {chunk_size}"
            elif keep_partial:
                accepted = f"{chunk_size}, as only the last may be shorter"
            else:
                accepted = f"{chunk_size}, as partial chunks are not kept (save_unfull_chunk)"
            raise InvalidRequestError(f"offsets[{index}] is {shown(length)}; accepted: {accepted}")


def _media_suffix(media: Sequence[MediaSpan], start: int, end: int) -> bytes:
    """What the media spans add to the chunk of tokens ``[start, end)``; nothing when none overlaps it."""
    parts = []
    first_overlap = bisect_right(media, start, key=lambda span: span.end)
    for span in islice(media, first_overlap, None):
        if span.start >= end:
            break
        first, past = max(start, span.start), min(end, span.end)
        numbers = (first - start, past - first, first - span.start)
        parts.append(b"".join(number.to_bytes(8, "little") for number in numbers) + _field(span.media_id))
    return _END_OF_TOKENS + b"".join(parts) if parts else b""


def _field(value: FieldValue) -> bytes:
    """`value` as its type, length and content: no other sequence of fields has the same bytes."""
    if value is None:
        kind, content = b"n", b""
    elif isinstance(value, str):
        kind, content = b"s", value.encode("utf-8", "surrogatepass")  # any Python string, each to bytes of its own
    elif isinstance(value, bytes):
        kind, content = b"b", value
    else:
        kind, content = b"i", b"%d" % value
    return kind + len(content).to_bytes(8, "little") + content


def _check_known(key: object) -> None:
    known = ("cache_salt", "lora_id", "media")
    if key in known:
        return
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InvalidRequestError(f"request_configs has the unknown key {key!r}; {hint}known: {', '.join(known)}")


def _parse_media(media: object) -> tuple[MediaSpan, ...]:
    if not isinstance(media, list | tuple):
        raise InvalidRequestError(f"media is {shown(media)}; accepted: a list of (start, length, id)")
    spans = []
    for index, item in enumerate(media):
        if isinstance(item, MediaSpan):
            spans.append(item)
        elif isinstance(item, list | tuple) and len(item) == 3:
            spans.append(MediaSpan(*item))
        else:
            raise InvalidRequestError(f"media[{index}] is {shown(item)}; accepted: (start, length, id)")
    return tuple(spans)


def _checked_key(key: object, name: str) -> bytes:
    if not isinstance(key, bytes) or len(key) != KEY_NBYTES:
        raise InvalidRequestError(f"{name} is {shown(key)}; accepted: bytes of length {KEY_NBYTES}")
    return key


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
