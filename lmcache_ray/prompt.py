"""One call's prompt as the cache sees it: chunk keys and where each chunk ends. Pure.

Engines and cluster clients both begin every call here, so that lookup, store and retrieve cut a prompt alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.keys import ChunkHasher, RequestIdentity, checked_hashes
from lmcache_ray.tokens import TokenSequence, token_ids

RequestConfigs = Mapping[str, object]
"""What sets a request apart beside its tokens: `cache_salt`, `lora_id`, `media` (see `keys.RequestIdentity`)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Keys and half-open token spans of a prompt's chunks; `num_tokens` counts tokens beyond the last chunk too."""

    num_tokens: int
    keys: list[bytes]
    spans: list[tuple[int, int]]

    def tokens_in(self, num_chunks: int) -> int:
        """Tokens of the first `num_chunks` chunks."""
        return self.spans[num_chunks - 1][1] if num_chunks else 0

    def rows(self, rows: np.ndarray, positions: Sequence[int], *, start: int = 0) -> list[np.ndarray]:
        """The part of `rows` (one per token) of each named chunk, cut off below token `start`."""
        return [rows[max(start, self.spans[position][0]) : self.spans[position][1]] for position in positions]


def read_prompt(
    hasher: ChunkHasher,
    tokens: TokenSequence | None,
    *,
    hashes: Sequence[bytes] | None = None,
    offsets: Sequence[int] | None = None,
    request_configs: RequestConfigs | None = None,
) -> Prompt:
    """The prompt named by its tokens, or by ready-made chunk digests and their lengths (not by both).

    Raises `InvalidRequestError` naming the argument at fault.
    """
    if (tokens is None) == (hashes is None):
        raise InvalidRequestError("name the prompt by `tokens` or by `hashes` with `offsets`: exactly one of the two")
    if hashes is not None:
        if request_configs:
            raise InvalidRequestError("request_configs go into keys made from tokens; `hashes` are keys already")
        return _from_hashes(hasher, hashes, offsets)
    if offsets is not None:
        raise InvalidRequestError("`offsets` are the chunk lengths of `hashes`; they have no meaning for `tokens`")
    assert tokens is not None
    ids = token_ids(tokens)
    keys = hasher.keys(ids, RequestIdentity.parse(request_configs))
    return Prompt(len(ids), keys, hasher.spans(len(ids)))


def _from_hashes(hasher: ChunkHasher, hashes: Sequence[bytes], offsets: Sequence[int] | None) -> Prompt:
    keys, lengths = checked_hashes(hashes, offsets, hasher.chunk_size, keep_partial=hasher.keep_partial)
    spans, end = [], 0
    for length in lengths:
        spans.append((end, end + length))
        end += length
    return Prompt(end, keys, spans)


def loadable_tokens(num_hits: int, num_tokens: int, num_computed: int) -> int:
    """Tokens an engine may still load when `num_hits` leading tokens are cached and `num_computed` are its own.

    Never the whole prompt: an engine must compute at least the last token to get its logits.
    """
    if type(num_computed) is not int or not 0 <= num_computed <= num_tokens:  # True is no count
        raise InvalidRequestError(f"num_computed must be within 0 to {num_tokens} (the prompt); got {num_computed!r}")
    return max(0, min(num_hits, num_tokens - 1) - num_computed)
