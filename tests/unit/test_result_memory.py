"""Memory of results: used again once nobody can see it any more, and never before."""

import gc
import threading

import pytest
import torch

from cluster.result_memory import ResultMemory
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.layout import RankLayout, ShardSpec

NUM_TOKENS = 8192  # of 512 bytes: 4 MiB
LAYOUT = RankLayout(
    4,
    (
        ShardSpec((0, 2), range(2), 32, KVDtype.FLOAT16),
        ShardSpec((1,), range(1), 0x40, KVDtype.FLOAT8_E4M3FN, kv_size=1),
    ),
)


@pytest.fixture
def memory() -> ResultMemory:
    return ResultMemory()


def test_tensors_have_the_shapes_and_types_of_the_layout_and_do_not_overlap(memory: ResultMemory) -> None:
    halves, eights = memory.empty_shard(LAYOUT, NUM_TOKENS)
    assert (halves.dtype, halves.shape) == (torch.float16, (2, 2, NUM_TOKENS, 64))
    assert (eights.dtype, eights.shape) == (torch.float8_e4m3fn, (1, 1, NUM_TOKENS, 64))
    assert halves.untyped_storage().nbytes() == 2 * halves.numel(), "a saved tensor takes no more than itself along"
    halves.fill_(3.0)
    eights.view(torch.uint8).fill_(7)
    assert bool((halves == 3.0).all()) and bool((eights.view(torch.uint8) == 7).all())


def test_memory_of_a_dead_result_serves_the_next(memory: ResultMemory) -> None:
    shard = memory.empty_shard(LAYOUT, NUM_TOKENS)
    place = shard[0].data_ptr()
    del shard
    assert memory.idle_nbytes >= LAYOUT.token_nbytes * NUM_TOKENS
    assert memory.empty_shard(LAYOUT, NUM_TOKENS)[0].data_ptr() == place
    assert memory.empty_shard(LAYOUT, NUM_TOKENS - 4)[0].data_ptr() == place, "a smaller one too"


@pytest.mark.parametrize(
    "alias",
    [
        lambda tensor: tensor[0, 1, 5:7],
        lambda tensor: tensor.view(torch.uint8),
        lambda tensor: tensor.detach().numpy(),
        lambda tensor: tensor.numpy()[1:][0],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: torch.from_dlpack(tensor),
        lambda tensor: iter(tensor),
    ],
)
def test_memory_that_anyone_can_see_is_not_used_again(memory: ResultMemory, alias: object) -> None:
    shard = memory.empty_shard(LAYOUT, NUM_TOKENS)
    place = shard[0].data_ptr()
    kept = alias(shard[0])  # type: ignore[operator]
    del shard
    gc.collect()
    assert memory.idle_nbytes == 0
    assert memory.empty_shard(LAYOUT, NUM_TOKENS)[0].data_ptr() != place
    del kept
    gc.collect()
    assert memory.idle_nbytes > 0


def test_one_group_keeps_the_memory_of_all(memory: ResultMemory) -> None:
    eights = memory.empty_shard(LAYOUT, NUM_TOKENS)[1]
    assert memory.idle_nbytes == 0
    del eights
    assert memory.idle_nbytes > 0


def test_idle_memory_is_bounded_and_ends_with_close() -> None:
    nbytes = LAYOUT.token_nbytes * NUM_TOKENS
    memory = ResultMemory(max_idle_nbytes=3 * nbytes)
    results = [memory.empty_shard(LAYOUT, NUM_TOKENS) for _ in range(4)]
    results.clear()
    assert nbytes <= memory.idle_nbytes <= 3 * nbytes
    late = memory.empty_shard(LAYOUT, NUM_TOKENS)
    memory.close()
    assert memory.idle_nbytes == 0
    late[0].fill_(1.0)
    del late
    assert memory.idle_nbytes == 0


def test_a_small_result_takes_no_block(memory: ResultMemory) -> None:
    shard = memory.empty_shard(LAYOUT, 4)
    assert [tensor.shape[2] for tensor in shard] == [4, 4]
    assert [tensor.shape[2] for tensor in memory.empty_shard(LAYOUT, 0)] == [0, 0]
    del shard
    assert memory.idle_nbytes == 0


def test_a_large_block_does_not_go_to_a_far_smaller_result(memory: ResultMemory) -> None:
    memory.empty_shard(LAYOUT, 8 * NUM_TOKENS)
    large = memory.idle_nbytes
    memory.empty_shard(LAYOUT, NUM_TOKENS)
    assert memory.idle_nbytes > large


def test_threads_never_share_memory(memory: ResultMemory) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            tensor = memory.empty_shard(LAYOUT, NUM_TOKENS)[0]
            tensor.fill_(float(number))
            if not bool((tensor == float(number)).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
