"""The same text means the same in a file, in the environment and on the command line; and each reader's own errors."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_ray.config import COMMAND_LINE, LMCacheEngineConfig, parse_overrides
from lmcache_ray.config_sources import KNOWN_KEYS, read_environment
from lmcache_ray.errors import ConfigError

Reader = Callable[[str, str, Path], LMCacheEngineConfig]


def from_file(key: str, text: str, tmp_path: Path) -> LMCacheEngineConfig:
    path = tmp_path / "c.yaml"
    path.write_text(f"{key}: {text}\n", "utf-8")
    return LMCacheEngineConfig.from_file(path)


def from_environment(key: str, text: str, tmp_path: Path) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_env({f"LMCACHE_{key.upper()}": text})


def from_flag(key: str, text: str, tmp_path: Path) -> LMCacheEngineConfig:
    config = LMCacheEngineConfig()
    config.update(parse_overrides([f"--{key.replace('_', '-')}", text]), COMMAND_LINE)
    return config


def from_flag_with_equals(key: str, text: str, tmp_path: Path) -> LMCacheEngineConfig:
    config = LMCacheEngineConfig()
    config.update(parse_overrides([f"--{key}={text}"]), COMMAND_LINE)
    return config


def from_argument(key: str, text: str, tmp_path: Path) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.from_dict({key: text})


READERS = pytest.mark.parametrize(
    "read", [from_file, from_environment, from_flag, from_flag_with_equals, from_argument]
)

GOOD = [
    ("chunk_size", "512", 512),
    ("chunk_size", "010", 10),
    ("chunk_size", "+7", 7),
    ("chunk_size", '"64"', 64),
    ("chunk_size", "'64'", 64),
    ("chunk_size", "null", 256),
    ("chunk_size", "~", 256),
    ("chunk_size", "2147483647", 2**31 - 1),
    ("min_retrieve_tokens", "0", 0),
    ("capacity_chunks", "1000", 1000),
    ("capacity_chunks", "Null", None),
    ("max_local_cpu_size", "1e3", 1000.0),
    ("max_local_cpu_size", "0.5", 0.5),
    ("max_local_cpu_size", ".5", 0.5),
    ("max_local_cpu_size", "5", 5.0),
    ("lease_timeout_s", "1.5", 1.5),
    *[("save_unfull_chunk", text, True) for text in ("true", "True", "YES", "on", "1")],
    *[("save_unfull_chunk", text, False) for text in ("false", "FALSE", "no", "Off", "0")],
    ("cache_policy", "lfu", "LFU"),
    ("cache_policy", "Fifo", "FIFO"),
    ("lmcache_instance_id", "007", "007"),
    ("lmcache_instance_id", "yes", "yes"),
    ("lmcache_instance_id", "1e3", "1e3"),
    ("lmcache_instance_id", "2026-02-09", "2026-02-09"),
    ("lmcache_instance_id", '""', None),
    ("model_revision", "", None),
    ("model_revision", "refs/pr/1", "refs/pr/1"),
    ("arena_dir", "/mnt/huge pages", "/mnt/huge pages"),
    ("cluster_name", "a.b-c_1", "a.b-c_1"),
    ("max_local_disk_size", "20", 20.0),
    ("max_local_disk_size", "-0", 0.0),
    ("local_disk", "", None),
    ("remote_url", "redis://:p@host:6379/0", "redis://:p@host:6379/0"),
    ("remote_url", "unix:///run/valkey.sock", "unix:///run/valkey.sock"),
    ("remote_url", "anything+else://", "anything+else://"),
    ("remote_url", '""', None),
    ("remote_serde", "ZSTD", "zstd"),
    ("remote_serde", "Fp8", "fp8"),
    ("remote_prefix", "team-a_1", "team-a_1"),
    ("blocking_timeout_secs", "2", 2.0),
    ("max_remote_size", "0.5", 0.5),
    ("max_remote_size", "null", None),
]

BAD = [
    *[("chunk_size", text, "a whole number from 1 to 2147483647") for text in (
        "x1", "-3", "0", "", "1.7", "1e3", "256.0", "0x10", "1_000", "true", "nan", "٣", "2147483648", "1 2",
        "9" * 5000,
    )],
    ("min_retrieve_tokens", "-1", "a whole number from 0"),
    ("lookup_timeout_ms", "1.7", "a whole number from 1"),
    ("lookup_timeout_ms", "-5", "a whole number from 1"),
    ("capacity_chunks", "0", "a whole number from 1 to 2147483647, or null"),
    ("capacity_chunks", "", "or null"),
    *[("max_local_cpu_size", text, "a number of GiB above 0") for text in (
        "nan", "inf", "-inf", ".inf", "1e999", "1e-999", "0", "-1", "5GB", "", "1_0", "1e308",
    )],
    ("lease_timeout_s", "0", "a number of seconds above 0"),
    ("pin_timeout_sec", "-300", "a number of seconds above 0"),
    ("call_timeout_s", "infinity", "a number of seconds above 0"),
    *[("save_unfull_chunk", text, "true, yes, on or 1") for text in ("y", "2", "", "truee", "none")],
    *[("cache_policy", text, "LRU, LFU, FIFO") for text in ("NOPE", "MRU", "", "fıfo")],
    ("arena_dir", "relative/dir", "an absolute path"),
    ("arena_dir", "", "an absolute path"),
    ("cluster_name", "a/b", "letters, digits"),
    ("cluster_name", "", "letters, digits"),
    ("local_cpu", "maybe", "true, yes, on or 1"),
    *[("local_disk", text, "an absolute path, /dir or file:///dir, or null") for text in (
        "relative/dir", "file://", "file://host/dir", "file:/dir", "~/kv", "s3://bucket", "true",
    )],
    *[("max_local_disk_size", text, "a number of GiB from 0 to 1,048,576") for text in ("-1", "nan", "", "20GB")],
    *[("remote_url", text, "a URL, scheme://..., or null") for text in ("host:6379", "redis:/h", "://h", "1s3://b")],
    *[("remote_serde", text, "naive, zstd, fp8 (any case)") for text in ("cachegen", "kivi", "", "zſtd")],
    ("remote_prefix", "../x", "letters, digits"),
    ("blocking_timeout_secs", "0", "a number of seconds above 0"),
    ("max_remote_size", "0", "a number of GiB above 0 and at most 1,048,576, or null"),
    ("enable_p2p", "true", "peer-to-peer sharing, which lmcache_ray does not have; accepted: false"),
    ("local_disk_path_sharding", "by_rank", "a directory of its own below local_disk"),
    ("blend_min_tokens", "nonsense", "blending"),
    ("nixl_role", "sender", "disaggregated prefill"),
]  # fmt: skip


@READERS
@pytest.mark.parametrize(("key", "text", "value"), GOOD)
def test_the_same_text_gives_the_same_value(read: Reader, key: str, text: str, value: object, tmp_path: Path) -> None:
    found = getattr(read(key, text, tmp_path), key)
    assert (found, type(found)) == (value, type(value))


@READERS
@pytest.mark.parametrize(("key", "text", "accepted"), BAD)
def test_the_same_text_gives_the_same_error(read: Reader, key: str, text: str, accepted: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(key, text, tmp_path)
    assert accepted in str(caught.value)
    origins = {
        from_file: f"file {tmp_path / 'c.yaml'}",
        from_environment: f"environment LMCACHE_{key.upper()}",
        from_flag: f"command line --{key.replace('_', '-')}",
        from_flag_with_equals: f"command line --{key.replace('_', '-')}",
        from_argument: "argument",
    }
    with pytest.raises(ConfigError) as by_argument:
        from_argument(key, text, tmp_path)
    assert str(caught.value) == str(by_argument.value).replace("(argument)", f"({origins[read]})")


@READERS
def test_an_unknown_key_is_an_error_that_names_the_nearest(read: Reader, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read("chunk_sise", "5", tmp_path)
    message = str(caught.value).lower().replace("-", "_")
    assert "chunk_sise" in message and "is not a configuration key" in message
    assert message.endswith("chunk_size")


def test_every_key_can_be_given_in_every_spelling() -> None:
    for key in KNOWN_KEYS:
        assert parse_overrides([f"--{key}=x"]) == parse_overrides([f"--{key.replace('_', '-')}", "x"]) == {key: "x"}
        assert read_environment({f"LMCACHE_{key.upper()}": "x"}).values == {key: "x"}


# --- environment


def test_variables_that_are_not_keys_are_left_alone() -> None:
    environ = {
        "LMCACHE_CONFIG_FILE": "x",
        "LMCACHE_LOG_LEVEL": "x",
        "LMCACHE_TRACK_USAGE": "x",
        "HOME": "/",
        "LMC": "1",
    }
    assert LMCacheEngineConfig.from_env(environ) == LMCacheEngineConfig()


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("LMCACHE_CHUNKSIZE", "LMCACHE_CHUNK_SIZE"),
        ("LMCACHE_chunk_size", "LMCACHE_CHUNK_SIZE"),
        ("LMCACHE_INSTANCE_ID", "LMCACHE_LMCACHE_INSTANCE_ID"),
        ("LMCACHE_LOCAL_DSK", "LMCACHE_LOCAL_DISK"),
        ("LMCACHE_", "LMCACHE_"),
    ],
)
def test_a_misspelt_variable_is_noticed(variable: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_env({variable: "64"})
    assert str(caught.value).startswith(f"{variable} (environment {variable}) is not a configuration key")
    assert f"the nearest is {nearest}" in str(caught.value)


# --- files


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "{}"])
def test_a_file_without_content_means_defaults(text: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text(text, "utf-8")
    assert LMCacheEngineConfig.from_file(str(path)) == LMCacheEngineConfig()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- chunk_size\n", "must hold a mapping"),
        (b"256\n", "must hold a mapping"),
        (b"chunk_size: 1\nblock_size: 2\nchunk_size: 1\n", "'chunk_size' stands twice"),
        (b"chunk_size: [1\n", "not valid YAML"),
        (b"chunk_size: 1\n---\nchunk_size: 2\n", "not valid YAML"),
        (b"chunk_size: \xff\n", "not valid YAML"),
        (b"[" * 1000, "not valid YAML"),
        (b"? [a]\n: 1\n", "not valid YAML"),
        (b"chunk_size: [1, 2]\n", "chunk_size = a list of 2"),
        (b"chunk_size: {a: 1}\n", "chunk_size = a dict of 1"),
        (b"chunk-size: 1\n", "the nearest is chunk_size"),
        (b"Chunk_Size: 1\n", "the nearest is chunk_size"),
        (b"base: &b {chunk_size: 1}\n<<: *b\n", "is not a configuration key"),
    ],
)
def test_a_wrong_file_is_named(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_file(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "words"), [("absent.yaml", "No such file"), (".", "Is a directory")])
def test_an_unreadable_file_is_named(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LMCacheEngineConfig.from_file(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_byte_order_mark_and_tags_do_not_matter(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes("\ufeffchunk_size: !!int 64\n".encode())
    assert LMCacheEngineConfig.from_file(path).chunk_size == 64


# --- command line


def test_flags_in_all_their_forms() -> None:
    argv = [
        "--chunk-size",
        "64",
        "--max_local_cpu_size=2",
        "--save-unfull-chunk",
        "--min-retrieve-tokens",
        "-5",
        "--py_enable_gc",
    ]
    assert parse_overrides(argv) == {
        "chunk_size": "64",
        "max_local_cpu_size": "2",
        "save_unfull_chunk": "true",
        "min_retrieve_tokens": "-5",
        "py_enable_gc": "true",
    }
    assert parse_overrides(["--model-revision=--odd=1", "--arena-dir="]) == {
        "model_revision": "--odd=1",
        "arena_dir": "",
    }
    assert parse_overrides([]) == {}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--chunk-size"], "--chunk-size needs a value"),
        (["--chunk-size", "--save-unfull-chunk"], "--chunk-size needs a value"),
        (["--pin-timeout-sec"], "--pin-timeout-sec needs a value"),
        (["--chunk-size", "1", "--chunk_size=1"], "--chunk_size is given twice"),
        (["--chunk-sise", "1"], "the nearest is --chunk-size"),
        (["--validate=1"], "--validate .* is not a configuration key"),
        (["chunk_size=64"], "unexpected argument 'chunk_size=64'"),
        (["-c", "64"], "unexpected argument '-c'"),
        (["--", "x"], "unexpected argument '--'"),
        (["--save-unfull-chunk", "true", "false"], "unexpected argument 'false'"),
    ],
)
def test_a_wrong_command_line_is_told(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_overrides(argv)


def test_the_programs_own_flags_are_suggested_too() -> None:
    with pytest.raises(ConfigError, match=r"nearest is --model-name$"):
        parse_overrides(["--modle-name", "x"], also_known=["model-name"])
