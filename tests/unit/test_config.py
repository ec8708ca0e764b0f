"""The configuration object: precedence, origins, all-or-nothing changes, and its example files."""

import copy
import dataclasses
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lmcache_ray.config import (
    COMMAND_LINE,
    LMCacheEngineConfig,
    load_config,
    override_config_from_dict,
    parse_overrides,
)
from lmcache_ray.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"

DEFAULTS = {
    "chunk_size": 256,
    "max_local_cpu_size": 5.0,
    "capacity_chunks": None,
    "arena_dir": "/dev/shm",
    "save_unfull_chunk": False,
    "cache_policy": "LRU",
    "max_local_disk_size": 0.0,
    "local_disk": None,
    "remote_url": None,
    "remote_serde": "naive",
    "remote_prefix": "lmcache_ray",
    "blocking_timeout_secs": 10.0,
    "max_remote_size": None,
    "local_cpu": True,
    "block_size": 16,
    "model_revision": None,
    "lmcache_instance_id": None,
    "min_retrieve_tokens": 0,
    "lookup_timeout_ms": 3000,
    "lease_timeout_s": 300.0,
    "call_timeout_s": 30.0,
    "restart_window_s": 60.0,
    "cluster_name": "default",
    "cluster_namespace": "lmcache_ray",
}


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def test_defaults_are_the_documented_ones() -> None:
    config = LMCacheEngineConfig.from_defaults()
    assert config.to_dict() == DEFAULTS
    assert {config.origin_of(key) for key in DEFAULTS} == {"default"}
    assert config.validate() is config


def test_every_source_overrides_the_ones_before_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "chunk_size: 1\nblock_size: 2\ncache_policy: fifo\n")
    environ = {"LMCACHE_BLOCK_SIZE": "3", "LMCACHE_CACHE_POLICY": "Lfu", "PATH": "/bin"}
    config = load_config(path, environ=environ)
    override_config_from_dict(config, parse_overrides(["--cache-policy=lru"]), COMMAND_LINE)
    config.min_retrieve_tokens = 4
    assert (config.chunk_size, config.block_size, config.cache_policy, config.min_retrieve_tokens) == (1, 3, "LRU", 4)
    keys = ("chunk_size", "block_size", "cache_policy", "min_retrieve_tokens", "arena_dir")
    assert [config.origin_of(key) for key in keys] == [
        f"file {path}",
        "environment LMCACHE_BLOCK_SIZE",
        "command line --cache-policy",
        "argument",
        "default",
    ]


def test_load_config_takes_the_file_that_the_environment_names(tmp_path: Path) -> None:
    path = write(tmp_path / "named.yaml", "chunk_size: 7\n")
    other = write(tmp_path / "given.yaml", "chunk_size: 8\n")
    environ = {"LMCACHE_CONFIG_FILE": str(path), "LMCACHE_LOG_LEVEL": "INFO", "LMCACHE_TRACK_USAGE": "false"}
    assert load_config(environ=environ).chunk_size == 7
    assert load_config(other, environ=environ).chunk_size == 8
    assert load_config(environ={"LMCACHE_CONFIG_FILE": ""}).chunk_size == 256


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "12")
    assert LMCacheEngineConfig.from_env().chunk_size == 12
    assert LMCacheEngineConfig.from_defaults().update_config_from_env().chunk_size == 12
    assert load_config().chunk_size == 12
    assert LMCacheEngineConfig.from_defaults().chunk_size == 256


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.update({"chunk_size": 1, "cache_policy": "NOPE"}),
        lambda config: override_config_from_dict(config, {"chunk_size": 1, "chunk_sise": 2}),
        lambda config: config.update_config_from_env({"LMCACHE_CHUNK_SIZE": "1", "LMCACHE_BLOCK_SIZE": "x1"}),
        lambda config: setattr(config, "chunk_size", -3),
        lambda config: setattr(config, "validate", 1),
        lambda config: setattr(config, "chunk_size", 1.5),
        lambda config: config.update({"chunk_size": 1, "extra_config": {"a": 1}}),
    ],
)
def test_a_refused_change_changes_nothing(change) -> None:  # type: ignore[no-untyped-def]
    config = LMCacheEngineConfig.from_dict({"chunk_size": 64})
    before, listing = config.to_dict(), config.describe()
    with pytest.raises(ConfigError):
        change(config)
    assert config.to_dict() == before
    assert config.describe() == listing
    assert config.validate() is config


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_dict({"chunk_sise": 1, "block_size": 0, "enable_p2p": "true", "cache_policy": "MRU"})
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert any("chunk_sise" in line and "nearest is chunk_size" in line for line in lines)
    assert any("block_size = 0 (argument)" in line and "from 1 to" in line for line in lines)
    assert any("enable_p2p" in line and "peer-to-peer" in line for line in lines)
    assert any("'MRU'" in line and "LRU, LFU, FIFO" in line for line in lines)


def test_unknown_keyword_and_unknown_names_of_other_types_are_refused() -> None:
    with pytest.raises(ConfigError, match="nearest is max_local_cpu_size"):
        LMCacheEngineConfig.from_defaults(max_local_cpu=3)
    with pytest.raises(ConfigError, match=r"^1 \(argument\) is not a configuration key"):
        LMCacheEngineConfig.from_dict({1: 2})  # type: ignore[dict-item]


def test_null_unsets_a_key_whatever_stood_below() -> None:
    config = LMCacheEngineConfig.from_dict({"chunk_size": 64, "capacity_chunks": 9, "model_revision": "main"})
    config.update_config_from_env({"LMCACHE_CHUNK_SIZE": "null", "LMCACHE_CAPACITY_CHUNKS": "~"})
    config.model_revision = None
    assert config.to_dict() == DEFAULTS
    assert config.origin_of("chunk_size") == "environment LMCACHE_CHUNK_SIZE"


def test_the_pin_timeout_is_one_value_under_two_names() -> None:
    config = LMCacheEngineConfig.from_dict({"pin_timeout_sec": 10})
    assert config.lease_timeout_s == config.pin_timeout_sec == 10.0
    config.update({"pin_timeout_sec": "20", "lease_timeout_s": 20.0})
    assert config.lease_timeout_s == 20.0
    config.pin_timeout_sec = 30  # type: ignore[misc]  # read-only to type checkers, as lease_timeout_s is the name
    assert config.lease_timeout_s == 30.0
    assert config.origin_of("pin_timeout_sec") == "argument"
    with pytest.raises(ConfigError, match=r"lease_timeout_s = 41 .*contradicts pin_timeout_sec = 40"):
        config.update({"pin_timeout_sec": 40, "lease_timeout_s": 41})
    with pytest.raises(ConfigError, match=r"pin_timeout_sec = -1 .*number of seconds above 0"):
        config.update({"pin_timeout_sec": -1})
    assert config.lease_timeout_s == 30.0


def test_the_value_semantics_of_a_dataclass() -> None:
    config = LMCacheEngineConfig.from_env({"LMCACHE_CHUNK_SIZE": "64"})
    assert config == LMCacheEngineConfig(chunk_size=64) != LMCacheEngineConfig()
    assert LMCacheEngineConfig.from_dict(config.to_dict()) == config
    assert dataclasses.replace(config, block_size=8).to_dict() == DEFAULTS | {"chunk_size": 64, "block_size": 8}
    assert "chunk_size=64" in repr(config)
    with pytest.raises(ConfigError, match="block_size = 0"):
        dataclasses.replace(config, block_size=0)


@pytest.mark.parametrize(
    "twin_of", [LMCacheEngineConfig.copy, copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_copies_are_independent_and_keep_origins(twin_of) -> None:  # type: ignore[no-untyped-def]
    config = LMCacheEngineConfig.from_env({"LMCACHE_CHUNK_SIZE": "64"})
    twin = twin_of(config)
    twin.chunk_size = 1
    assert (config.chunk_size, twin.chunk_size) == (64, 1)
    assert config.origin_of("chunk_size") == "environment LMCACHE_CHUNK_SIZE"
    assert twin.origin_of("chunk_size") == "argument"


def test_describe_lists_every_key_with_its_origin() -> None:
    config = LMCacheEngineConfig.from_env({"LMCACHE_CHUNK_SIZE": "64"})
    lines = config.describe().splitlines()
    assert [line.split(" = ")[0] for line in lines] == list(DEFAULTS)
    assert re.fullmatch(r"chunk_size = 64 +\(environment LMCACHE_CHUNK_SIZE\)", lines[0])
    assert re.fullmatch(r"max_local_cpu_size = 5.0 +\(default\)", lines[1])


def test_secrets_are_masked_in_listings_and_messages() -> None:
    config = LMCacheEngineConfig(model_revision="https://user:hunter2@host/x?token=abc&y=1")
    assert "https://***@host/x?token=***&y=1" in config.describe()
    assert config.model_revision == "https://user:hunter2@host/x?token=abc&y=1"
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig(audit_actual_remote_url="redis://:hunter2@host:1", extra_config={"password": "hunter2"})
    assert "hunter2" not in str(caught.value)
    assert "audit of a remote" in str(caught.value)


def test_a_remotes_password_is_masked_where_it_is_shown_and_kept_where_it_is_used() -> None:
    config = LMCacheEngineConfig(remote_url="redis://:hunter2@host:6379/0")
    assert "remote_url = 'redis://***@host:6379/0'" in config.describe()
    assert config.remote_url == config.to_dict()["remote_url"] == "redis://:hunter2@host:6379/0"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"local_disk": "/x"}, "local_disk = '/x' .*without room: max_local_disk_size = 0.0 GiB .*; .*above 0"),
        ({"local_disk": "/x", "max_local_disk_size": 1e-12}, "max_local_disk_size = 1e-12 GiB is less than a byte"),
        ({"local_cpu": False}, "local_cpu = false .*no tier.*local_disk = null and remote_url = null; .*true"),
        ({"local_cpu": False, "remote_url": "", "local_disk": None}, "local_disk = null and remote_url = null"),
    ],
)
def test_keys_that_need_each_other_are_judged_together(values: dict[str, object], words: str) -> None:
    config = LMCacheEngineConfig.from_dict(values)
    before = config.describe()
    with pytest.raises(ConfigError, match=words) as caught:
        config.validate()
    assert "\n" not in str(caught.value)
    assert config.describe() == before, "what validate refuses it leaves as it is"


def test_a_contradiction_names_where_each_of_its_values_came_from(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "max_local_disk_size: 0\n")
    config = load_config(path, environ={"LMCACHE_LOCAL_DISK": "/x"})
    with pytest.raises(ConfigError) as caught:
        config.validate()
    assert str(caught.value).endswith(f"(local_disk: environment LMCACHE_LOCAL_DISK, max_local_disk_size: file {path})")


@pytest.mark.parametrize("change", [{"max_local_disk_size": 0}, {"max_local_disk_size": None}, {"local_disk": None}])
def test_what_another_key_needs_is_missed_when_the_last_source_was_read(
    change: dict[str, object], tmp_path: Path
) -> None:
    path = write(tmp_path / "a.yaml", "local_disk: /x\nmax_local_disk_size: 1\nlocal_cpu: false\n")
    config = LMCacheEngineConfig.from_file(path).validate()
    config.update(change)
    with pytest.raises(ConfigError, match=r"^local_.*: argument"):
        config.validate()
    config.update({"local_disk": "/y", "max_local_disk_size": 2})
    assert config.validate().local_disk == "/y"


def test_a_url_without_scheme_is_refused_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"remote_url = '\*\*\*@host:6379' .*scheme://") as caught:
        LMCacheEngineConfig(remote_url=":hunter2@host:6379")
    assert "hunter2" not in str(caught.value)


def test_a_wrong_lower_tier_is_the_only_thing_that_is_told_of_it() -> None:
    with pytest.raises(ConfigError, match=r"^local_disk = 'x' .*an absolute path[^\n]*$"):
        LMCacheEngineConfig.from_dict({"local_cpu": False, "local_disk": "x"})


@pytest.mark.parametrize(
    "values",
    [
        {"max_local_disk_size": 20},
        {"remote_serde": "zstd"},
        {"local_cpu": False, "local_disk": "/x", "max_local_disk_size": 0.5},
        {"local_cpu": False, "remote_url": "memory://"},
        {"local_disk": "/x", "max_local_disk_size": 1, "remote_url": "s3://bucket"},
    ],
)
def test_tiers_in_all_the_ways_they_can_be_put_together(values: dict[str, object]) -> None:
    config = LMCacheEngineConfig.from_dict(values)
    assert {key: getattr(config, key) for key in values} == values
    assert LMCacheEngineConfig.from_dict(config.to_dict()) == config.validate()


def test_a_tiers_keys_may_come_from_one_source_after_the_other(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "local_cpu: false\n")
    config = load_config(path, environ={"LMCACHE_LOCAL_DISK": "file:///x/"})
    config.update(parse_overrides(["--max-local-disk-size=20"]), COMMAND_LINE)
    assert (config.local_disk, config.max_local_disk_size, config.local_cpu) == ("/x", 20.0, False)
    assert config.validate() is config
    assert [config.origin_of(key) for key in ("local_cpu", "local_disk", "max_local_disk_size")] == [
        f"file {path}",
        "environment LMCACHE_LOCAL_DISK",
        "command line --max-local-disk-size",
    ]


def test_a_source_touches_no_key_but_its_own() -> None:
    """Also where the text of a kept value would be read as another one."""
    config = LMCacheEngineConfig.from_dict({"local_disk": "/x /."})
    assert config.local_disk == "/x "
    config.update({"chunk_size": 8})
    assert (config.local_disk, config.chunk_size) == ("/x ", 8)
    assert config.origin_of("chunk_size") == "argument" and config.origin_of("block_size") == "default"


def test_full_yaml_and_the_code_list_the_same_options_and_defaults() -> None:
    path = CONFIGS / "full.yaml"
    assert yaml.safe_load(path.read_text("utf-8")) == LMCacheEngineConfig().to_dict() == DEFAULTS
    assert LMCacheEngineConfig.from_file(path) == LMCacheEngineConfig()
    options = [line for line in path.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    assert [option for option in options if not re.fullmatch(r"\w+: \S+  # .+", option)] == []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_file_loads(path: Path) -> None:
    assert LMCacheEngineConfig.from_file(path).validate()


def test_the_configuration_loads_no_torch() -> None:
    program = "import sys; import lmcache_ray.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("values", [None, [], "chunk_size", 5])
def test_a_configuration_that_is_no_mapping_is_refused(values: object) -> None:
    with pytest.raises(ConfigError, match="a mapping of keys to values"):
        LMCacheEngineConfig.from_dict(values)  # type: ignore[arg-type]
