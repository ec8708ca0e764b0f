import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from cluster.chat_workload import chat_workload
from cluster.workload import BLOCK_SIZE, TraceRequest, block_tokens, count_distinct_blocks, parse_trace, prompt_tokens
from lmcache_ray.errors import LMCacheRayError, WorkloadError


def parse(*lines: str, limit: int | None = None) -> list[TraceRequest]:
    return list(parse_trace(lines, source="trace.jsonl", limit=limit))


class TestParseTrace:
    def test_reads_requests_in_order(self) -> None:
        requests = parse(
            '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n',
            '{"hash_ids": [0, 9223372036854775807]}\n',
            '{"hash_ids": [], "input_length": 0}',
        )
        assert requests == [TraceRequest((0, 1), 700), TraceRequest((0, 2**63 - 1), None), TraceRequest((), 0)]

    def test_blank_lines_are_skipped_but_counted(self) -> None:
        assert parse("\n", '{"hash_ids": [1]}\n', "   \n") == [TraceRequest((1,), None)]
        with pytest.raises(WorkloadError, match=r"trace\.jsonl, line 3: not valid JSON"):
            parse('{"hash_ids": [1]}', "", "{")

    def test_limit_counts_requests_and_reads_no_further(self) -> None:
        lines = ('{"hash_ids": [1]}', "", '{"hash_ids": [2]}', "broken")
        assert [request.hash_ids for request in parse(*lines, limit=2)] == [(1,), (2,)]
        assert parse(*lines, limit=0) == []
        with pytest.raises(WorkloadError, match="line 4"):
            parse(*lines, limit=3)

    def test_a_negative_limit_is_refused_before_anything_is_read(self) -> None:
        with pytest.raises(WorkloadError, match="at least 0; got -1"):
            parse_trace([], source="trace.jsonl", limit=-1)

    def test_is_read_as_it_is_asked_for(self) -> None:
        requests = parse_trace(iter(['{"hash_ids": [1]}', "broken"]), source="trace.jsonl")
        assert next(requests).hash_ids == (1,)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{'hash_ids': [1]}", "not valid JSON"),
            ("[" * 100_000, "not valid JSON"),
            ("[1, 2]", "not a JSON object"),
            ("17", "not a JSON object"),
            ("{}", "hash_ids is missing; it has no key"),
            ('{"timestamp": 1, "Hash_ids": []}', "hash_ids is missing; it has 'timestamp', 'Hash_ids'"),
            ('{"hash_ids": "12"}', "hash_ids is '12'"),
            ('{"hash_ids": null}', "hash_ids is None"),
            ('{"hash_ids": [1, 2.0]}', r"hash_ids\[1\] is 2\.0"),
            ('{"hash_ids": [1, "2"]}', r"hash_ids\[1\] is '2'"),
            ('{"hash_ids": [true]}', r"hash_ids\[0\] is True"),
            ('{"hash_ids": [[1]]}', r"hash_ids\[0\] is \[1\]"),
            ('{"hash_ids": [0, -1]}', r"hash_ids\[1\] is -1 .*accepted: integers"),
            ('{"hash_ids": [9223372036854775808]}', r"hash_ids\[0\] is 9223372036854775808"),
            ('{"hash_ids": [1], "input_length": "512"}', "input_length is '512'"),
            ('{"hash_ids": [1], "input_length": -5}', "input_length is -5"),
            ('{"hash_ids": [1], "input_length": 5.5}', r"input_length is 5\.5"),
            ('{"hash_ids": [1], "input_length": false}', "input_length is False"),
        ],
    )
    def test_anything_else_is_an_error_with_source_and_line(self, line: str, message: str) -> None:
        with pytest.raises(WorkloadError, match=f"trace\\.jsonl, line 2: .*{message}") as caught:
            parse('{"hash_ids": [1]}', line)
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, LMCacheRayError)


class TestTokens:
    def test_golden_values(self) -> None:
        # Pinned: a change of these makes every verified or persisted run of an earlier version a stranger's.
        assert block_tokens(0)[:4].tolist() == [113063, 55235, 3383, 124272]
        assert block_tokens(7)[:4].tolist() == [67116, 38673, 120447, 113053]
        assert block_tokens(2**63 - 1, vocab_size=32_000)[:4].tolist() == [17831, 21419, 894, 7231]

    def test_the_same_in_a_fresh_process(self) -> None:
        code = "from cluster.workload import block_tokens; print(int(block_tokens(12345).sum()))"
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert int(printed) == int(block_tokens(12345).sum())

    def test_shape_dtype_and_range(self) -> None:
        for vocab_size in (1, 2, 1000, 2**32):
            tokens = block_tokens(5, 4096, vocab_size)
            assert tokens.dtype == np.int64 and tokens.shape == (4096,)
            assert all(0 <= token < vocab_size for token in tokens.tolist())
        assert len(np.unique(block_tokens(5, 65536, 16))) == 16

    def test_a_prompt_is_its_blocks_one_after_the_other(self) -> None:
        prompt = prompt_tokens(TraceRequest((3, 1, 3), 1100))
        assert prompt.shape == (3 * BLOCK_SIZE,)
        assert prompt.tolist() == [*block_tokens(3), *block_tokens(1), *block_tokens(3)]
        assert prompt_tokens(TraceRequest(())).shape == (0,)
        assert prompt_tokens(TraceRequest((3, 1)), 16).tolist() == [*block_tokens(3)[:16], *block_tokens(1)[:16]]

    def test_different_ids_give_different_blocks(self) -> None:
        blocks = {block_tokens(hash_id, 16).tobytes() for hash_id in [*range(2000), *(2**40 + n for n in range(2000))]}
        assert len(blocks) == 4000

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: block_tokens(1, 0), "block_size must be at least 1; got 0"),
            (lambda: block_tokens(1, vocab_size=0), "vocab_size must be from 1 to 2"),
            (lambda: block_tokens(1, vocab_size=2**32 + 1), "vocab_size must be from 1 to 2"),
        ],
    )
    def test_impossible_sizes_are_refused(self, call: Callable[[], object], message: str) -> None:
        with pytest.raises(WorkloadError, match=message):
            call()


class TestCountDistinctBlocks:
    def test_shared_prefixes_count_once(self) -> None:
        assert count_distinct_blocks([]) == 0
        assert count_distinct_blocks([TraceRequest((0, 1, 2)), TraceRequest((0, 1, 3)), TraceRequest((0,))]) == 4

    def test_an_id_after_another_prefix_is_another_block(self) -> None:
        assert count_distinct_blocks([TraceRequest((1, 2)), TraceRequest((2,)), TraceRequest((2, 2))]) == 4


class TestChatWorkload:
    def test_golden_values(self) -> None:
        assert chat_workload(num_requests=4) == [
            TraceRequest((4, 5, 6, 7), 1593),
            TraceRequest((0, 1, 8), 1528),
            TraceRequest((2, 9, 10), 1336),
            TraceRequest((4, 5, 6, 11), 1637),
        ]

    def test_seeds_differ_and_repeat(self) -> None:
        assert chat_workload(seed=3) == chat_workload(seed=3)
        assert chat_workload(seed=3) != chat_workload(seed=4)

    def test_a_longer_workload_begins_with_the_shorter_one(self) -> None:
        longest = chat_workload(num_requests=1000)
        for num_requests in (0, 1, 7, 300, 1000):
            assert chat_workload(num_requests=num_requests) == longest[:num_requests]

    def test_an_id_stands_for_its_whole_prefix(self) -> None:
        prefix_of: dict[int, tuple[int, ...]] = {}
        for request in chat_workload(seed=1):
            assert request.input_length is not None
            assert len(request.hash_ids) == -(-request.input_length // BLOCK_SIZE)
            for index, hash_id in enumerate(request.hash_ids):
                assert prefix_of.setdefault(hash_id, request.hash_ids[:index]) == request.hash_ids[:index]

    def test_looks_like_a_chat_service(self) -> None:
        requests = chat_workload()
        num_lookups = sum(len(request.hash_ids) for request in requests)
        hit_rate = 1 - count_distinct_blocks(requests) / num_lookups
        assert 0.5 < hit_rate < 0.8
        assert max(len(request.hash_ids) for request in requests) < 40
        # Conversations interleave: the next request seldom continues the one before.
        followers = sum(b.hash_ids[:-2] == a.hash_ids[: len(b.hash_ids) - 2] for a, b in pairwise(requests))
        assert followers < len(requests) / 10

    def test_every_conversation_begins_with_a_shared_system_prompt(self) -> None:
        first_ids = {request.hash_ids[0] for request in chat_workload(num_system_prompts=3)}
        assert len(first_ids) == 3

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda: chat_workload(seed=-1), "seed must be at least 0"),
            (lambda: chat_workload(seed=2**64), "seed must be at least 0 and below"),
            (lambda: chat_workload(num_requests=-1), "number of requests must be at least 0; got -1"),
            (lambda: chat_workload(num_system_prompts=0), "num_system_prompts must be at least 1"),
        ],
    )
    def test_impossible_workloads_are_refused(self, call: Callable[[], object], message: str) -> None:
        with pytest.raises(WorkloadError, match=message):
            call()
