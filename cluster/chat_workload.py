"""A chat service's requests, made from a seed: the workload of the main job when no trace is given. Pure.

Many conversations run at once. Each begins with one of a few shared system prompts; every turn sends the whole history
again, with the last answer and a new message at its end; turns of different conversations interleave by arrival time.
So a prompt finds in the cache its system prompt at least, and from the second turn on nearly all of its history.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, islice
from typing import Final

from lmcache_ray.errors import WorkloadError
from lmcache_ray.splitmix import fold64, word_streams

from .workload import BLOCK_SIZE, TraceRequest

# Each pair is a range to draw from evenly, both ends included.
_SYSTEM_PROMPT_BLOCKS: Final = (1, 4)
_MESSAGE_TOKENS: Final = (40, 1_500)
_ANSWER_TOKENS: Final = (60, 900)
_TURNS: Final = (1, 7)
_ARRIVAL_GAP_MS: Final = (200, 2_000)  # between the starts of two conversations
_THINK_TIME_MS: Final = (4_000, 30_000)  # between two turns of one conversation
_DRAWS_AT_ONCE: Final = 1024


@dataclass(frozen=True, order=True, slots=True)
class _Turn:
    """One request before its blocks have ids. Turns sort by arrival."""

    arrival_ms: int
    conversation: int
    system_prompt: int
    num_tokens: int


def chat_workload(*, seed: int = 0, num_requests: int = 300, num_system_prompts: int = 4) -> list[TraceRequest]:
    """`num_requests` requests in order of arrival; the same arguments give the same requests everywhere.

    A longer workload of the same seed begins with the shorter one. Hash ids obey the rule of traces: an id stands for
    everything up to and including its block. Raises `WorkloadError` for a negative number, a seed of 2**64 or more,
    or no system prompt at all.
    """
    if not 0 <= seed < 2**64:
        raise WorkloadError(f"seed must be at least 0 and below 2**64; got {seed}")
    if num_requests < 0:
        raise WorkloadError(f"the number of requests must be at least 0; got {num_requests}")
    if num_system_prompts < 1:
        raise WorkloadError(f"num_system_prompts must be at least 1; got {num_system_prompts}")
    draws = _random_words(seed)
    system_blocks = [_between(draws, _SYSTEM_PROMPT_BLOCKS) for _ in range(num_system_prompts)]
    turns = islice(_turns_by_arrival(draws, system_blocks), num_requests)
    return _with_hash_ids(turns, system_blocks)


def _turns_by_arrival(draws: Iterator[int], system_blocks: list[int]) -> Iterator[_Turn]:
    """All turns of endlessly many conversations. One is due when no later conversation can begin before it."""
    pending: list[_Turn] = []  # a heap
    start_ms = 0
    for conversation in count():
        while pending and pending[0].arrival_ms <= start_ms:
            yield heappop(pending)
        for turn in _conversation(draws, conversation, start_ms, system_blocks):
            heappush(pending, turn)
        start_ms += _between(draws, _ARRIVAL_GAP_MS)


def _conversation(
    draws: Iterator[int], conversation: int, start_ms: int, system_blocks: list[int]
) -> Iterator[_Turn]:
    system_prompt = _between(draws, (0, len(system_blocks) - 1))
    num_tokens = system_blocks[system_prompt] * BLOCK_SIZE
    arrival_ms = start_ms
    for _ in range(_between(draws, _TURNS)):
        num_tokens += _between(draws, _MESSAGE_TOKENS)
        yield _Turn(arrival_ms, conversation, system_prompt, num_tokens)
        num_tokens += _between(draws, _ANSWER_TOKENS)
        arrival_ms += _between(draws, _THINK_TIME_MS)


def _with_hash_ids(turns: Iterable[_Turn], system_blocks: list[int]) -> list[TraceRequest]:
    """Number the blocks in order of arrival: a block keeps its id while the prompt only grows behind it."""
    unused = count()
    system_ids = [tuple(next(unused) for _ in range(num_blocks)) for num_blocks in system_blocks]
    full_blocks: dict[int, tuple[int, ...]] = {}  # conversation -> ids of the blocks that its last prompt filled
    requests = []
    for turn in turns:
        kept = full_blocks.get(turn.conversation, system_ids[turn.system_prompt])
        num_blocks = -(-turn.num_tokens // BLOCK_SIZE)
        hash_ids = kept + tuple(next(unused) for _ in range(num_blocks - len(kept)))
        full_blocks[turn.conversation] = hash_ids[: turn.num_tokens // BLOCK_SIZE]
        requests.append(TraceRequest(hash_ids, turn.num_tokens))
    return requests


def _random_words(seed: int) -> Iterator[int]:
    for batch in count():
        yield from word_streams(fold64(seed, batch), _DRAWS_AT_ONCE)[0].tolist()


def _between(draws: Iterator[int], bounds: tuple[int, int]) -> int:
    low, high = bounds
    return low + next(draws) % (high - low + 1)
