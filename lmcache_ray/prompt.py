"""One prompt as the cache sees it: chunk keys and where each chunk ends. Pure.

Engines and cluster clients both begin every call here, so that lookup, store and retrieve cut a prompt alike. Callers
may hold a prompt too: see `Prompt`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.keys import ChunkHasher, MediaSpan, RequestIdentity, checked_hashes
from lmcache_ray.tokens import TokenSequence, token_ids

RequestConfigs = Mapping[str, object]
"""What sets a request apart beside its tokens: `cache_salt`, `lora_id`, `media` (see `keys.RequestIdentity`)."""

MediaSpans: TypeAlias = Sequence[MediaSpan | tuple[int, int, str | int | bytes]]

_ID_TYPE: Final = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The chunks of one prompt by key; it keeps no tokens but those behind the last full chunk.

    A value that callers may hold, send and use again: it stands for the tokens and the request configs it was made of
    wherever `tokens` are asked for, and costs no hashing there. A conversation that grows is hashed once, turn by turn,
    with `extended`. It names chunks of `hasher` alone: where keys are made otherwise (another model, revision,
    generation or chunk size) it is refused.

    Chunk i is the tokens ``[i * chunk_size, (i + 1) * chunk_size)``; the last one may be shorter if the hasher keeps
    partial chunks. `num_tokens` counts tokens beyond the last chunk too. Equal are prompts of the same chunks and
    length. One that was named by `hashes` has no `growth`: nobody knows its tokens.
    """

    num_tokens: int
    keys: tuple[bytes, ...] = field(repr=False)
    hasher: ChunkHasher
    growth: "Growth | None" = field(default=None, repr=False, compare=False)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The half-open token span of every chunk."""
        return self.hasher.spans(self.num_tokens)

    def start_of(self, position: int) -> int:
        """The first token of chunk number `position`."""
        return position * self.hasher.chunk_size

    def tokens_in(self, num_chunks: int) -> int:
        """Tokens of the first `num_chunks` chunks."""
        return min(num_chunks * self.hasher.chunk_size, self.num_tokens)

    def rows(self, rows: np.ndarray, positions: Sequence[int], *, start: int = 0) -> list[np.ndarray]:
        """The part of `rows` (one per token) of each named chunk, cut off below token `start`."""
        size = self.hasher.chunk_size
        return [rows[max(start, position * size) : (position + 1) * size] for position in positions]

    def extended(self, more_tokens: TokenSequence, *, media: MediaSpans = ()) -> "Prompt":
        """The prompt of these tokens with `more_tokens` behind them; only what is new is read and hashed.

        `media` are spans of the new tokens, their starts counted from the first token of the whole prompt (a span given
        earlier may reach into the new tokens by itself). Raises `InvalidRequestError` for tokens or spans that cannot
        be meant, and for a prompt that was named by `hashes`.
        """
        if self.growth is None:
            raise InvalidRequestError("a prompt named by `hashes` cannot be extended: its tokens are not known")
        identity = self.growth.identity.with_media(media, start=self.num_tokens)
        full_chunks = self.keys[: self.num_tokens // self.hasher.chunk_size]  # a partial chunk's key leads to no other
        tail = np.frombuffer(self.growth.tail, dtype=_ID_TYPE)
        ids = token_ids(more_tokens)
        return _hashed(self.hasher, identity, full_chunks, np.concatenate((tail, ids)) if len(tail) else ids)


@dataclass(frozen=True, slots=True)
class Growth:
    """What a longer prompt is made with: its identity, and the ids behind the last full chunk, 8 bytes each."""

    identity: RequestIdentity
    tail: bytes


Tokens: TypeAlias = TokenSequence | Prompt
"""What callers name a prompt by."""


def read_prompt(
    hasher: ChunkHasher,
    tokens: Tokens | None,
    *,
    hashes: Sequence[bytes] | None = None,
    offsets: Sequence[int] | None = None,
    request_configs: RequestConfigs | None = None,
) -> Prompt:
    """The prompt named by its tokens, or by ready-made chunk digests and their lengths (not by both).

    A `Prompt` in place of tokens is answered as it is. Raises `InvalidRequestError` naming the argument at fault.
    """
    if (tokens is None) == (hashes is None):
        raise InvalidRequestError("name the prompt by `tokens` or by `hashes` with `offsets`: exactly one of the two")
    if hashes is not None:
        if request_configs:
            raise InvalidRequestError("request_configs go into keys made from tokens; `hashes` are keys already")
        keys, lengths = checked_hashes(hashes, offsets, hasher.chunk_size, keep_partial=hasher.keep_partial)
        return Prompt(sum(lengths), tuple(keys), hasher)
    if offsets is not None:
        raise InvalidRequestError("`offsets` are the chunk lengths of `hashes`; they have no meaning for `tokens`")
    if isinstance(tokens, Prompt):
        if request_configs:
            raise InvalidRequestError("request_configs are in the keys of a Prompt already: give them when it is made")
        _check_hasher(tokens, hasher)
        return tokens
    assert tokens is not None
    return _hashed(hasher, RequestIdentity.parse(request_configs), (), token_ids(tokens))


def _hashed(
    hasher: ChunkHasher, identity: RequestIdentity, full_chunks: tuple[bytes, ...], ids: NDArray[np.int64]
) -> Prompt:
    """The prompt that begins with the chunks of these keys and goes on with `ids`."""
    keys = (*full_chunks, *hasher.keys_of_ids(ids, identity, after=full_chunks))
    tail = ids[len(ids) - len(ids) % hasher.chunk_size :].tobytes()
    return Prompt(len(full_chunks) * hasher.chunk_size + len(ids), keys, hasher, Growth(identity, tail))


def _check_hasher(prompt: Prompt, hasher: ChunkHasher) -> None:
    if prompt.hasher == hasher:
        return
    names = [known.name for known in fields(ChunkHasher) if known.compare]
    made, here = (
        ", ".join(f"{name}={getattr(one, name)!r}" for name in names if getattr(one, name) != getattr(other, name))
        for one, other in ((prompt.hasher, hasher), (hasher, prompt.hasher))
    )
    raise InvalidRequestError(f"the Prompt was made for {made}; keys here are made for {here}: make it here")


def loadable_tokens(num_hits: int, num_tokens: int, num_computed: int) -> int:
    """Tokens an engine may still load when `num_hits` leading tokens are cached and `num_computed` are its own.

    Never the whole prompt: an engine must compute at least the last token to get its logits.
    """
    if type(num_computed) is not int or not 0 <= num_computed <= num_tokens:  # True is no count
        raise InvalidRequestError(f"num_computed must be within 0 to {num_tokens} (the prompt); got {num_computed!r}")
    return max(0, min(num_hits, num_tokens - 1) - num_computed)
