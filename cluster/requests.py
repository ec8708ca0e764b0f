"""What a caller asks of a cluster, and the same after its arguments have been checked. Pure but for tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lmcache_ray.chunking import Mask, masked_start
from lmcache_ray.connector.base import SlotMapping, checked_slot_mapping
from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.keys import ChunkHasher
from lmcache_ray.prompt import Prompt, Tokens, read_prompt

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Request:
    """One item of a batch. store and retrieve need `slot_mapping`, put needs `shards`; `start` is for put and get.

    The prompt is named by `tokens`, or by `hashes` and `offsets`: 32-byte chunk digests and the length of each chunk.
    `req_id` is carried for the caller: a retrieve pins what it reads by itself, with or without an earlier lookup.
    """

    tokens: Tokens | None = None
    slot_mapping: SlotMapping | None = None
    shards: "Sequence[Sequence[torch.Tensor]] | None" = None
    mask: Mask | None = None
    start: int = 0
    req_id: str | None = None
    request_configs: Mapping[str, object] | None = None
    hashes: Sequence[bytes] | None = None
    offsets: Sequence[int] | None = None


class HasPrompt(Protocol):
    """A checked request."""

    @property
    def prompt(self) -> Prompt:
        """Its prompt."""
        ...


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """A checked store or retrieve: `rows` is the KV row of each token, `start` the first token it is about."""

    prompt: Prompt
    start: int
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class CheckedSpan:
    """A checked put or get of the tokens from `start` on."""

    prompt: Prompt
    start: int


def check_rows(hasher: ChunkHasher, request: Request, *, num_kv_rows: int, aligned: bool) -> CheckedRows:
    """Raises `InvalidRequestError` naming the argument at fault; `aligned` as for `masked_start`."""
    prompt = prompt_of(hasher, request)
    start = masked_start(request.mask, prompt.num_tokens, hasher.chunk_size, aligned=aligned)
    if request.slot_mapping is None:
        raise InvalidRequestError("slot_mapping is missing: one KV row per token is needed")
    rows = checked_slot_mapping(request.slot_mapping, num_tokens=prompt.num_tokens, num_slots=num_kv_rows)
    return CheckedRows(prompt, start, rows)


def check_span(hasher: ChunkHasher, request: Request, *, aligned: bool) -> CheckedSpan:
    """Raises `InvalidRequestError` if `start` is outside the prompt or, `aligned`, inside a chunk."""
    prompt = prompt_of(hasher, request)
    start = request.start
    if type(start) is not int or not 0 <= start <= prompt.num_tokens:
        raise InvalidRequestError(f"start must be within 0 to {prompt.num_tokens} (the prompt); got {start!r}")
    if aligned and start % hasher.chunk_size:
        raise InvalidRequestError(f"start must be a multiple of chunk_size {hasher.chunk_size}; got {start}")
    return CheckedSpan(prompt, start)


def prompt_of(hasher: ChunkHasher, request: Request) -> Prompt:
    """The prompt's chunks."""
    if request.tokens is None and request.hashes is None:
        raise InvalidRequestError("tokens is missing: the prompt's token ids are needed, or `hashes` with `offsets`")
    return read_prompt(
        hasher,
        request.tokens,
        hashes=request.hashes,
        offsets=request.offsets,
        request_configs=request.request_configs,
    )
