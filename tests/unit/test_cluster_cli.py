"""The command line's arguments: what they mean when left out, and what is refused."""

import sys
from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.cli import parse_command_line, read_config


def test_replay_has_a_default_for_everything() -> None:
    arguments = parse_command_line(["replay"])
    assert (arguments.command, arguments.trace, arguments.cluster) == ("replay", None, None)
    assert (arguments.requests, arguments.seed, arguments.window, arguments.verify) == (None, 0, 64, False)
    assert (arguments.world_size, arguments.nodes, arguments.ranks_per_node) == (2, None, None)
    assert (arguments.use_mla, arguments.kvcache_shape_spec) == (False, None)
    assert (arguments.policy, arguments.capacity_blocks, arguments.json) == (None, 0, False)
    assert (arguments.namespace, arguments.config, arguments.overrides) == (None, None, [])


def test_replay_takes_all_it_promises() -> None:
    line = (
        "replay t.jsonl --requests 500 --world-size 4 --nodes 2 --ranks-per-node 3,1 --use-mla --policy lfu "
        "--capacity-blocks 10 --window 8 --verify --json --kvcache-shape-spec (1,2,4,1,4):float16:1 --seed 3"
    )
    arguments = parse_command_line(line.split())
    assert arguments.trace == "t.jsonl"
    assert (arguments.requests, arguments.world_size, arguments.nodes) == (500, 4, 2)
    assert (arguments.ranks_per_node, arguments.use_mla, arguments.policy) == ((3, 1), True, "lfu")
    assert (arguments.capacity_blocks, arguments.window, arguments.seed) == (10, 8, 3)
    assert arguments.verify and arguments.json
    assert arguments.kvcache_shape_spec == "(1,2,4,1,4):float16:1"


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_the_configuration_names_a_cluster_unless_flags_do(command: str) -> None:
    arguments = parse_command_line([command])
    assert (arguments.name, arguments.namespace, arguments.config, arguments.json) == (None, None, None, False)
    arguments = parse_command_line([command, "--name", "a", "--namespace", "b", "--config", "c.yaml", "--json"])
    assert (arguments.name, arguments.namespace, arguments.config, arguments.json) == ("a", "b", "c.yaml", True)


@pytest.mark.parametrize("command", ["up", "replay"])
def test_every_key_of_the_configuration_is_a_flag(command: str) -> None:
    line = [command, "--arena-dir", "/a b", "--call_timeout-s=7", "--save-unfull-chunk", "--json"]
    assert parse_command_line(line).overrides == ["--arena-dir=/a b", "--call-timeout-s=7", "--save-unfull-chunk"]


def test_the_value_of_a_configuration_flag_is_not_the_trace() -> None:
    arguments = parse_command_line(["replay", "--arena_dir", "/dev/shm/x", "t_1.jsonl", "--world_size", "3"])
    assert (arguments.trace, arguments.overrides) == ("t_1.jsonl", ["--arena-dir=/dev/shm/x"])
    assert arguments.world_size == 3


@pytest.mark.parametrize("command", ["up", "status", "down", "replay"])
def test_a_cluster_is_the_one_that_file_environment_and_flags_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(*flags: str) -> tuple[str, str]:
        config = read_config(parse_command_line([command, *flags]))
        return config.cluster_name, config.cluster_namespace

    file = tmp_path / "cluster.yaml"
    file.write_text("cluster_name: of-file\ncluster_namespace: space-of-file\n")
    assert named() == ("default", "lmcache_ray")
    assert named("--config", str(file)) == ("of-file", "space-of-file")
    monkeypatch.setenv("LMCACHE_CLUSTER_NAME", "of-environment")
    assert named("--config", str(file)) == ("of-environment", "space-of-file")
    assert named("--config", str(file), "--namespace", "of-flag") == ("of-environment", "of-flag")
    if command != "replay":
        assert named("--config", str(file), "--name", "of-flag") == ("of-flag", "space-of-file")


def test_the_file_that_the_environment_names_is_looked_up_where_the_caller_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.yaml").write_text("cluster_name: mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", "mine.yaml")
    assert read_config(parse_command_line(["status"])).cluster_name == "mine"


def test_a_tier_may_be_described_by_several_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_LOCAL_DISK", "/x")
    config = read_config(parse_command_line(["up", "--max-local-disk-size", "20"]))
    assert (config.local_disk, config.max_local_disk_size) == ("/x", 20.0)


def test_short_and_long_flags_that_agree_are_fine() -> None:
    line = "up --name a --cluster-name a --cluster-namespace b"
    config = read_config(parse_command_line(line.split()))
    assert (config.cluster_name, config.cluster_namespace) == ("a", "b")
    assert read_config(parse_command_line(["replay", "--policy", "lfu"])).cache_policy == "LFU"


@pytest.mark.parametrize(
    "given",
    [
        "--world-size 2",
        "--nodes 1",
        "--ranks-per-node 2",
        "--use-mla",
        "--policy lru",
        "--capacity-blocks 0",
        "--kvcache-shape-spec (1,2,4,1,4):float16:1",
        "--arena-dir /dev/shm",
    ],
)
def test_flags_of_a_local_cluster_are_refused_beside_a_running_one(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where they say what would be taken if they were left out."""
    with pytest.raises(SystemExit) as caught:
        parse_command_line(["replay", "--cluster", "prod", *given.split()])
    assert caught.value.code == 2
    assert f"as it is; not together with {given.split()[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "COMMAND"),
        ("launch", "invalid choice"),
        ("replay --requests 0", "'0' is not a whole number from 1 to"),
        ("replay --window x", "'x' is not a whole number"),
        ("replay --window 99999999999999999999", "is not a whole number from 1 to 2147483647"),
        ("replay --requests 2147483648", "is not a whole number from 1 to 2147483647"),
        ("replay --world-size 1000000000", "'1000000000' is not a whole number from 1 to 4096"),
        ("replay --world-size -1", "--world-size"),
        ("replay --capacity-blocks 1.5", "'1.5' is not a whole number from 0 to"),
        ("replay --ranks-per-node 3;1", "ranks_per_node '3;1' is not a list of rank counts"),
        ("replay a b", "unrecognized arguments: b"),
        ("replay --worldsize 4", "--worldsize) is not a configuration key; the nearest is --world-size"),
        ("up --chunk-sise 4", "the nearest is --chunk-size"),
        ("up --arena /x", "the nearest is --arena-dir"),
        ("up x", "unrecognized arguments: x"),
        ("status --chunk-size 4", "unrecognized arguments: --chunk-size 4"),
        ("inspect", "the following arguments are required: FILE"),
        ("inspect a.kv b.kv", "unrecognized arguments: b.kv"),
        ("inspect a.kv --config c.yaml", "unrecognized arguments: --config c.yaml"),
        ("up --num-blocks 0", "'0' is not a whole number from 1 to"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_are_named(
    line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_inspect_takes_a_file_and_no_configuration() -> None:
    arguments = parse_command_line(["inspect", "a_b.kv", "--json"])
    assert (arguments.command, arguments.file, arguments.json) == ("inspect", "a_b.kv", True)
    assert parse_command_line(["inspect", "a.kv"]).json is False


@pytest.mark.parametrize("command", ["", "replay", "up", "status", "down", "inspect"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--help"])
    assert caught.value.code == 0
    assert "usage: python -m cluster" in capsys.readouterr().out


def test_help_of_replay_explains_trace_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    said = capsys.readouterr().out
    for named in ("hash_ids", "Exit status", "--verify", "examples:"):
        assert named in said


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("up --name a --cluster-name b", "--name 'a' and --cluster-name 'b' are one value and disagree"),
        ("up --namespace a --cluster-namespace b", "--namespace 'a' and --cluster-namespace 'b'"),
        ("replay --policy lru --cache-policy LFU", "--policy 'lru' and --cache-policy 'LFU'"),
        ("replay --policy best", "cache_policy = 'best' (command line --cache-policy)"),
        ("replay --chunk-size 256", "--chunk-size: a replay's chunks are a trace's blocks, 512 tokens"),
        ("replay --capacity-chunks 256", "--capacity-chunks: a replay's capacity is --capacity-blocks"),
        ("replay --max-local-cpu-size 2", "--max-local-cpu-size: a replay's capacity is --capacity-blocks"),
        ("replay --cluster-name mine", "--cluster-name: a local replay names its cluster itself"),
        ("up --local-disk /x", "(local_disk: command line --local-disk, max_local_disk_size: default)"),
        ("replay --local-cpu false", "local_cpu = false leaves no tier to cache in"),
        ("replay --local-disk /x", "(local_disk: command line --local-disk, max_local_disk_size: default)"),
        ("replay --local-disk x --max-local-disk-size 1", "local_disk = 'x' (command line --local-disk)"),
        ("replay --remote-url host:6379", "remote_url = 'host:6379' (command line --remote-url) is not accepted"),
        ("replay --remote-url lm://me:se-cret@host", "remote_url 'lm://***@host': no backend has the scheme 'lm'"),
        ("replay --remote-url file://x", "remote_url 'file://x' is not an absolute path"),
        ("replay --remote-url redis://h/0 --remote-serde gzip", "accepted: naive, zstd, fp8"),
        ("replay --max-remote-size 0", "max_remote_size = '0' (command line --max-remote-size)"),
        ("status --config no-such.yaml", "no-such.yaml cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_named(
    line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    said = capsys.readouterr().err
    assert named in said and "se-cret" not in said
    assert said.startswith("error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("absent", "url", "serde", "extra"),
    [
        ("redis", "redis://me:se-cret@host/0", "naive", "redis"),
        ("fsspec", "file:///x", "naive", "fsspec"),
        ("s3fs", "s3://bucket/x", "naive", "s3"),
        ("gcsfs", "gs://bucket/x", "naive", "gcs"),
        ("zstandard", "memory://x", "zstd", "zstd"),
    ],
)
def test_a_package_that_is_missing_is_named_before_anything_is_started(
    absent: str,
    url: str,
    serde: str,
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for backend in ("redis", "fsspec"):
        monkeypatch.delitem(sys.modules, f"lmcache_ray.storage.{backend}_backend", raising=False)
    monkeypatch.setitem(sys.modules, absent, None)
    assert main(["replay", "--remote-url", url, "--remote-serde", serde]) == 2
    said = capsys.readouterr().err
    assert f"pip install 'lmcache-ray[{extra}]'" in said and "se-cret" not in said
    assert said.startswith("error: ") and said.count("\n") == 1
