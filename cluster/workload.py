"""Requests to replay: read from a trace, and the tokens that stand for them. Pure.

A trace names each block of a prompt by a *hash id* that stands for the whole prefix up to and including that block, as
in the traces that Mooncake publishes. The tokens themselves are not in it: every hash id becomes a fixed block of
pseudo-random tokens, so that prompts share exactly the prefixes that their ids share, in every process.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lmcache_ray.errors import WorkloadError, shown
from lmcache_ray.splitmix import mix64, word_streams

BLOCK_SIZE: Final = 512  # tokens that one hash id stands for
VOCAB_SIZE: Final = 128_000
_MAX_HASH_ID: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a workload: the blocks of its prompt.

    A trailing partial block is one of them, and is replayed as a full one. `input_length` is the prompt's true number
    of tokens, where it is known.
    """

    hash_ids: tuple[int, ...]
    input_length: int | None = None


def parse_trace(lines: Iterable[str], *, source: str, limit: int | None = None) -> Iterator[TraceRequest]:
    """The requests of a trace in JSON lines, in order, at most `limit` of them; read as they are asked for.

    Each line is an object with `hash_ids`, a list of integers 0 <= id < 2**63, and possibly `input_length`; other
    keys are ignored, and so are blank lines. Raises `WorkloadError`, naming `source` and the line's number from 1,
    at the first line that is anything else.
    """
    if limit is not None and limit < 0:
        raise WorkloadError(f"the number of requests must be at least 0; got {limit}")
    return _parse_lines(lines, source, limit)


def _parse_lines(lines: Iterable[str], source: str, limit: int | None) -> Iterator[TraceRequest]:
    num_read = 0
    for number, line in enumerate(lines, start=1):
        if num_read == limit:
            return
        if line.strip():
            yield _parse_line(line, where=f"{source}, line {number}")
            num_read += 1


def _parse_line(line: str, *, where: str) -> TraceRequest:
    try:
        record: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(record, dict):
        raise WorkloadError(f"{where}: {shown(record)} is not a JSON object with hash_ids")
    if "hash_ids" not in record:
        raise WorkloadError(f"{where}: hash_ids is missing; it has {', '.join(map(repr, record)) or 'no key'}")
    hash_ids = record["hash_ids"]
    if not isinstance(hash_ids, list):
        raise WorkloadError(f"{where}: hash_ids is {shown(hash_ids)}; accepted: a list of integers")
    for index, hash_id in enumerate(hash_ids):
        if type(hash_id) is not int or not 0 <= hash_id <= _MAX_HASH_ID:
            raise WorkloadError(
                f"{where}: hash_ids[{index}] is {shown(hash_id)}; accepted: integers, 0 <= id < 2**63"
            )
    input_length = record.get("input_length")
    if input_length is not None and (type(input_length) is not int or input_length < 0):
        raise WorkloadError(f"{where}: input_length is {shown(input_length)}; accepted: an integer of at least 0")
    return TraceRequest(tuple(hash_ids), input_length)


def block_tokens(hash_id: int, block_size: int = BLOCK_SIZE, vocab_size: int = VOCAB_SIZE) -> NDArray[np.int64]:
    """The tokens of one block, int64 ``[block_size]``: fixed by `hash_id`, spread evenly over the vocabulary.

    A shorter block begins with the same tokens as a longer one.
    """
    return _tokens_of((hash_id,), block_size, vocab_size)


def prompt_tokens(
    request: TraceRequest, block_size: int = BLOCK_SIZE, vocab_size: int = VOCAB_SIZE
) -> NDArray[np.int64]:
    """The tokens of the whole prompt, int64 ``[len(hash_ids) * block_size]``: its blocks one after the other."""
    return _tokens_of(request.hash_ids, block_size, vocab_size)


def _tokens_of(hash_ids: tuple[int, ...], block_size: int, vocab_size: int) -> NDArray[np.int64]:
    if block_size < 1:
        raise WorkloadError(f"block_size must be at least 1; got {block_size}")
    if not 1 <= vocab_size <= 2**32:
        raise WorkloadError(f"vocab_size must be from 1 to 2**32; got {vocab_size}")
    words = word_streams(mix64(np.array(hash_ids, dtype=np.uint64)), block_size)
    words >>= np.uint64(32)
    words *= np.uint64(vocab_size)  # the upper half of (32 random bits * size) is below the size, and even
    words >>= np.uint64(32)
    return words.reshape(-1).view(np.int64)


def count_distinct_blocks(requests: Iterable[TraceRequest]) -> int:
    """How many different blocks a cache that never evicts holds after all requests.

    Two blocks are the same only if everything before them is too, so an id that a careless trace uses after two
    different prefixes counts twice, as it does in the cache.
    """
    children: dict[tuple[int, int], int] = {}  # (the prefix's number, the next block's id) -> the longer prefix's
    for request in requests:
        prefix = 0
        for hash_id in request.hash_ids:
            prefix = children.setdefault((prefix, hash_id), len(children) + 1)
    return len(children)
