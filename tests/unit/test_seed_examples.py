"""The usage examples of LMCache's pages on its metadata and its standalone starter run as written.

Only the import paths differ. The pages' code stands here as text, because it has to run as it is, a missing
``import torch`` and all.
"""

import shlex
from pathlib import Path

import pytest
import torch

from lmcache_ray.standalone.command_line import PROG, read_command_line
from lmcache_ray.standalone.settings import read_settings
from lmcache_ray.standalone.starter import LMCacheStandaloneStarter

METADATA_EXAMPLE = """
from lmcache_ray.metadata import LMCacheMetadata
import torch

metadata = LMCacheMetadata(
    model_name="llama-7b",
    world_size=4,
    local_world_size=4,
    worker_id=0,
    local_worker_id=0,
    kv_dtype=torch.float16,
    kv_shape=(32, 2, 256, 32, 128),
)

# Check rank
if metadata.is_first_rank():
    print("This is the first rank")

# Get shapes for a specific token count
shapes = metadata.get_shapes(num_tokens=512)
"""

STANDALONE_EXAMPLE = """
# Programmatic usage
from lmcache_ray.standalone.__main__ import (
    LMCacheStandaloneStarter,
    parse_kvcache_shape_spec,
)
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.metadata import LMCacheMetadata

config = LMCacheEngineConfig.from_file("config.yaml")
layer_groups = parse_kvcache_shape_spec("(2,2,256,4,16):float16:2")

metadata = LMCacheMetadata(
    model_name="standalone_model",
    world_size=1,
    worker_id=0,
    kv_dtype=torch.float16,
    kv_shape=(2, 2, 256, 4, 16),
)

starter = LMCacheStandaloneStarter(config, metadata, layer_groups)
engine = starter.start()
# engine is now running and can be used for cache operations
"""

STANDALONE_END = "starter.stop()"

COMMAND_EXAMPLE = """python -m lmcache_ray.standalone --config config.yaml \\
    --model-name my_model --kvcache-shape-spec "(32,2,256,32,128):bfloat16:32"
"""

IMPORT_EXAMPLE = """
from lmcache_ray.standalone.__main__ import (
    LMCacheStandaloneStarter,
    LayerGroupSpec,
    parse_kvcache_shape_spec,
    load_config,
)
from lmcache_ray.standalone.__main__ import (
    calculate_composite_kv_cache_shape,
    get_composite_kv_dtype,
    override_config_from_dict,
    parse_kv_shape,
    main,
)
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a config.yaml."""
    (tmp_path / "config.yaml").write_text(f"capacity_chunks: 4\narena_dir: {tmp_path}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_metadata(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(METADATA_EXAMPLE, names)
    assert names["shapes"] == [torch.Size((2, 32, 512, 32 * 128))]
    assert capsys.readouterr().out == "This is the first rank\n"


def test_standalone_program(workplace: Path) -> None:
    names: dict[str, object] = {"torch": torch}
    exec(STANDALONE_EXAMPLE, names)
    engine, starter = names["engine"], names["starter"]
    assert isinstance(starter, LMCacheStandaloneStarter)
    tokens, slots = list(range(600)), torch.arange(600)
    assert engine.store(tokens, slot_mapping=slots) == 512  # type: ignore[attr-defined]
    assert engine.lookup(tokens) == 512  # type: ignore[attr-defined]
    assert engine.retrieve(tokens, slot_mapping=slots).sum() == 512  # type: ignore[attr-defined]
    exec(STANDALONE_END, names)
    assert not starter.is_running


def test_standalone_command(workplace: Path) -> None:
    """All but the start itself: 2 GiB of KV are too much for a unit test."""
    words = shlex.split(COMMAND_EXAMPLE.replace("\\\n", " "))  # as a shell joins lines
    assert " ".join(words[:3]) == PROG
    settings = read_settings(read_command_line(words[3:]))
    starter = LMCacheStandaloneStarter(settings.config, settings.metadata, settings.layer_groups, settings.device)
    assert starter.metadata.model_name == "my_model"
    assert starter.metadata.get_shapes() == [torch.Size((2, 32, 256, 32 * 128))]
    assert starter.sizes.num_slots == 4
    assert starter.sizes.kv_nbytes == 2 * 2**30


def test_imports() -> None:
    names: dict[str, object] = {}
    exec(IMPORT_EXAMPLE, names)
    from lmcache_ray.standalone import __main__ as module

    assert set(module.__all__) <= names.keys()
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = module.no_such_name
