"""What a standalone command line means, and what it refuses."""

import os
from pathlib import Path

import pytest
import torch

from lmcache_ray.errors import ConfigError, LMCacheRayError, MetadataError, ShapeSpecError
from lmcache_ray.shape_spec import LayerGroupSpec
from lmcache_ray.standalone.__main__ import main
from lmcache_ray.standalone.command_line import read_command_line
from lmcache_ray.standalone.settings import Settings, read_settings

SPEC = "(2,2,8,4,16):float16:2;(3,2,8,2,16):bfloat16:3"


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        monkeypatch.delenv(name)


def settings_of(*words: str) -> Settings:
    return read_settings(read_command_line(words))


def test_without_flags_all_is_the_default() -> None:
    settings = settings_of()
    assert settings.layer_groups == (LayerGroupSpec(2, (2, 2, 256, 4, 16), torch.float16),)
    metadata = settings.metadata
    assert (metadata.model_name, metadata.world_size, metadata.worker_id) == ("standalone_model", 1, 0)
    assert (metadata.kv_shape, metadata.kv_dtype, metadata.use_mla) == ((2, 2, 256, 4, 16), torch.float16, False)
    assert settings.device == "cpu"
    assert {entry.origin for entry in settings.config.entries()} == {"default"}


def test_with_mla_the_default_has_kv_dim_1() -> None:
    settings = settings_of("--use-mla")
    assert settings.layer_groups == (LayerGroupSpec(2, (2, 1, 256, 4, 16), torch.float16),)
    assert settings.metadata.use_mla


def test_shape_and_dtype_alone_make_the_only_group() -> None:
    settings = settings_of("--kv-shape", "3,2,8,1,4", "--kv-dtype", "BFLOAT16")
    assert settings.layer_groups == (LayerGroupSpec(3, (3, 2, 8, 1, 4), torch.bfloat16),)
    assert settings_of("--kv-dtype", "uint8").layer_groups[0].dtype == torch.uint8
    assert settings_of("--kv-shape", "3,2,8,1,4").layer_groups[0].dtype == torch.float16


def test_a_spec_alone_decides_shape_and_dtype_of_the_metadata_too() -> None:
    settings = settings_of("--kvcache-shape-spec", SPEC)
    assert [group.layer_count for group in settings.layer_groups] == [2, 3]
    assert settings.metadata.kv_shape == (5, 2, 8, 4, 16)
    assert settings.metadata.kv_dtype == torch.float16


def test_a_spec_wins_and_what_disagrees_is_kept_for_the_warning() -> None:
    settings = settings_of("--kvcache-shape-spec", SPEC, "--kv-shape", "9,2,8,1,4", "--kv-dtype", "int8")
    assert [group.layer_count for group in settings.layer_groups] == [2, 3]
    assert (settings.metadata.kv_shape, settings.metadata.kv_dtype) == ((9, 2, 8, 1, 4), torch.int8)


def test_ranks() -> None:
    metadata = settings_of("--world-size", "4", "--worker-id=3", "--model-name", "m").metadata
    assert (metadata.world_size, metadata.worker_id, metadata.local_worker_id) == (4, 3, 3)
    assert metadata.model_name == "m"


def test_flags_accept_both_spellings() -> None:
    words = ("--kv_shape=3,2,8,1,4", "--use_mla", "--kv_dtype", "uint8")
    command_line = read_command_line(words)
    assert (command_line.kv_shape, command_line.use_mla, command_line.kv_dtype) == ("3,2,8,1,4", True, "uint8")


def test_values_keep_their_underscores() -> None:
    assert read_command_line(["--model-name=my_model"]).model_name == "my_model"
    assert settings_of("--cluster-name", "a_b").config.cluster_name == "a_b"


def test_configuration_file_environment_and_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("chunk_size: 64\ncache_policy: LFU\ncapacity_chunks: 3\n")
    monkeypatch.setenv("LMCACHE_CACHE_POLICY", "fifo")
    monkeypatch.setenv("LMCACHE_CAPACITY_CHUNKS", "4")
    settings = settings_of("--config", str(file), "--capacity_chunks", "5", "--model-name", "m", "--save-unfull-chunk")
    config = settings.config
    assert (config.chunk_size, config.cache_policy, config.capacity_chunks) == (64, "FIFO", 5)
    assert config.save_unfull_chunk
    assert config.origin_of("chunk_size") == f"file {file}"
    assert config.origin_of("capacity_chunks") == "command line --capacity-chunks"
    assert settings.metadata.chunk_size == 64
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    assert settings_of().config.chunk_size == 64


def test_a_tier_may_be_described_by_several_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("local_cpu: false\n")
    monkeypatch.setenv("LMCACHE_LOCAL_DISK", "/x")
    config = settings_of("--config", str(file), "--max-local-disk-size", "20").config
    assert (config.local_cpu, config.local_disk, config.max_local_disk_size) == (False, "/x", 20.0)


@pytest.mark.parametrize(
    ("words", "error", "why"),
    [
        (["--kv-dtype", "float17"], ConfigError, "--kv-dtype = 'float17' is not accepted; accepted: float16"),
        (["--kv-shape", "2,2,256"], ShapeSpecError, "--kv-shape: .*five numbers"),
        (["--kv-shape", "2,1,8,4,16"], ShapeSpecError, "--kv-shape: .*kv_dim 1 without MLA"),
        (["--use-mla", "--kv-shape", "2,2,8,4,16"], ShapeSpecError, "--kv-shape: .*kv_dim 2 with MLA"),
        (["--kvcache-shape-spec", "(2,2,8,4,16):float17:2"], ShapeSpecError, "-shape-spec: .*group 1.*float17"),
        (["--kvcache-shape-spec", f"{SPEC};"], ShapeSpecError, "--kvcache-shape-spec: .*group 3 '' is empty"),
        (["--kvcache-shape-spec", "(2,2,8,4,16):int8:3"], ShapeSpecError, "says 2 layers, its layer_count says 3"),
        (["--kvcache-shape-spec", "(2,2,8,4,-16):int8:2"], ShapeSpecError, "'-16' must be a whole number"),
        (["--kvcache-shape-spec", "(2,3,8,4,16):int8:2"], ShapeSpecError, "kv_dim 3 without MLA"),
        (["--world-size", "0"], ConfigError, "--world-size = '0' is not accepted; accepted: a whole number from 1"),
        (["--world-size", "2.0"], ConfigError, "--world-size = '2.0'"),
        (["--worker-id", "-1"], ConfigError, "--worker-id = '-1'"),
        (["--worker-id", "2", "--world-size", "2"], MetadataError, "worker_id = 2 .*because world_size is 2"),
        (["--model-name", ""], MetadataError, "model_name = '' .*non-empty"),
        (["--chunk-size", "-5"], ConfigError, r"chunk_size = '-5' \(command line --chunk-size\)"),
        (["--chunk-size"], ConfigError, "--chunk-size needs a value"),
        (["--validate=1"], ConfigError, "--validate .*not a configuration key"),
        (["--modelname", "m"], ConfigError, "--modelname .*the nearest is --model-name"),
        (["--kv-shap", "2,2,256,4,16"], ConfigError, "--kv-shap .*the nearest is --kv-shape"),
        (["--chunk-size", "4", "--chunk_size=8"], ConfigError, "--chunk-size is given twice"),
        (["--local-disk", "/x"], ConfigError, r"local_disk = '/x' .*: command line --local-disk, max_.*: default\)"),
        (["--local-cpu", "no"], ConfigError, "local_cpu = false .*local_disk = null and remote_url = null"),
        (["extra"], ConfigError, "unexpected argument 'extra'"),
        (["--config", "/nowhere.yaml"], ConfigError, "/nowhere.yaml cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(words: list[str], error: type[LMCacheRayError], why: str) -> None:
    with pytest.raises(error, match=why):
        settings_of(*words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--model-name"], "--model-name: expected one argument"),
        (["--model-name", "a", "--model_name", "b"], "--model-name is given twice"),
        (["--use-mla=yes"], "--use-mla"),
        (["--nope", "1"], "--nope (command line --nope) is not a configuration key"),
        (["--chunk-size", "many"], "chunk_size = 'many' (command line --chunk-size)"),
        (["--device", "meta"], "device = 'meta'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("python -m lmcache_ray.standalone: error: ") and why in err
    assert err.count("\n") == 1


def test_what_does_not_fit_here_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--arena-dir", str(tmp_path), "--capacity-chunks", "2", "--kv-shape", "2,2,1000000000,4,16"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 1
    out, err = capsys.readouterr()
    assert "ready" not in out
    assert "the paged KV does not fit" in err
    assert os.listdir(tmp_path) == []


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for word in ("--kvcache-shape-spec", "--world-size", "examples:", "--chunk-size 64", "float8_e5m2", "SIGTERM"):
        assert word in out
