"""What a standalone world says that it takes."""

import pytest
import torch

from lmcache_ray.arena.spec import ArenaGeometry
from lmcache_ray.config import COMMAND_LINE, LMCacheEngineConfig
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import parse_kvcache_shape_spec
from lmcache_ray.standalone.report import readable_nbytes
from lmcache_ray.standalone.starter import LMCacheStandaloneStarter


def starter_for(spec: str, config: LMCacheEngineConfig, **values: object) -> LMCacheStandaloneStarter:
    groups = parse_kvcache_shape_spec(spec)
    given = {"world_size": 1, "worker_id": 0, "kv_dtype": groups[0].dtype, "kv_shape": (2, 2, 8, 4, 16)}
    return LMCacheStandaloneStarter(config, LMCacheMetadata("my_model", **(given | values)), groups)  # type: ignore[arg-type]


def test_sizes_of_two_groups_on_two_ranks() -> None:
    config = LMCacheEngineConfig(chunk_size=10, block_size=4, capacity_chunks=3)
    sizes = starter_for("(2,2,8,4,16):float16:2;(3,2,5,1,3):uint8:3", config, world_size=2).sizes
    assert sizes.group_chunk_nbytes == (2 * 2 * 10 * 4 * 16 * 2, 2 * 3 * 10 * 3)
    assert sizes.chunk_nbytes == 5120 + 180
    assert sizes.num_slots == 3
    assert sizes.arena_nbytes == ArenaGeometry(3, 5120 + 192).file_nbytes
    assert sizes.total_arena_nbytes == 2 * sizes.arena_nbytes
    assert sizes.num_blocks == (8, 5)
    assert sizes.kv_nbytes == 2 * 2 * (8 * 4) * 128 + 2 * 3 * (5 * 4) * 3
    assert sizes.total_kv_nbytes == 2 * sizes.kv_nbytes


def test_an_mla_world_has_one_arena_and_the_paged_kv_of_every_rank() -> None:
    config = LMCacheEngineConfig(chunk_size=8, block_size=4, capacity_chunks=3)
    starter = starter_for("(2,8,16):float16:2", config, world_size=3, use_mla=True, kv_shape=(2, 1, 8, 1, 16))
    assert starter.sizes.total_arena_nbytes == starter.sizes.arena_nbytes
    assert starter.sizes.total_kv_nbytes == 3 * 2 * (8 * 4) * 32
    assert "rank 0 holds the one copy" in starter.describe()


def test_the_slots_follow_from_the_memory_of_a_rank() -> None:
    config = LMCacheEngineConfig(chunk_size=256, max_local_cpu_size=1.0)
    sizes = starter_for("(32,2,256,32,128):bfloat16:32", config, kv_shape=(32, 2, 256, 32, 128)).sizes
    assert sizes.chunk_nbytes == 128 * 2**20
    assert sizes.num_slots == 8
    assert sizes.kv_nbytes == 2 * 2**30


def test_the_description_names_model_ranks_sizes_and_what_was_set() -> None:
    config = LMCacheEngineConfig(chunk_size=10, block_size=4)
    config.update({"capacity_chunks": "3"}, COMMAND_LINE)
    starter = starter_for("(2,2,8,4,16):float16:2;(3,2,5,1,3):uint8:3", config, world_size=2, worker_id=1)
    sizes = starter.sizes
    lines = starter.describe().splitlines()
    assert lines[0] == "model my_model"
    assert lines[1] == "world of 2 ranks, all in this process; the engine is rank 1"
    assert lines[2] == "chunk of 10 tokens: 5300 bytes (5.176 KiB) per rank"
    assert "group 1: 2 layers" in lines[3] and lines[3].endswith("5120 bytes (5 KiB) per chunk and rank")
    assert "group 2: 3 layers" in lines[4] and lines[4].endswith("180 bytes per chunk and rank")
    assert f"arena in own memory: 3 chunks, {readable_nbytes(sizes.arena_nbytes)} per rank" in lines[5]
    assert lines[5].endswith(f"{readable_nbytes(sizes.total_arena_nbytes)} in total")
    assert lines[6].endswith(f"{readable_nbytes(sizes.total_kv_nbytes)} in total")
    assert "  chunk_size = 10 (argument)" in lines
    assert "  capacity_chunks = 3 (command line --capacity-chunks)" in lines
    assert not any("cache_policy" in line for line in lines)


def test_the_name_of_the_instance_is_shown() -> None:
    config = LMCacheEngineConfig(lmcache_instance_id="blue")
    assert starter_for("(2,2,8,4,16):float16:2", config).describe().startswith("model my_model, instance blue\n")


def test_a_default_configuration_is_said_in_one_line() -> None:
    description = starter_for("(2,2,8,4,16):float16:2", LMCacheEngineConfig(), kv_dtype=torch.float16).describe()
    assert description.endswith("configuration: every key at its default")
    assert "arena in own memory: 40960 chunks, " in description, "5 GiB of 128 KiB chunks"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1024 bytes (1 KiB)"),
        (134217728, "134217728 bytes (128 MiB)"),
        (5 * 2**30 + 2**29, "5905580032 bytes (5.5 GiB)"),
        (3 * 2**50, "3377699720527872 bytes (3072 TiB)"),
    ],
)
def test_readable_sizes(nbytes: int, text: str) -> None:
    assert readable_nbytes(nbytes) == text
