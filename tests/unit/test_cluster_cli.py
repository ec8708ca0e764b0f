"""The command line's arguments: what they mean when left out, and what is refused."""

from pathlib import Path

import pytest

from cluster.__main__ import main
from cluster.cli import build_parser


def test_replay_has_a_default_for_everything() -> None:
    arguments = build_parser().parse_args(["replay"])
    assert (arguments.command, arguments.trace, arguments.cluster) == ("replay", None, None)
    assert (arguments.requests, arguments.seed, arguments.window, arguments.verify) == (None, 0, 64, False)
    assert (arguments.world_size, arguments.nodes, arguments.ranks_per_node, arguments.use_mla) == (2, 1, None, False)
    assert (arguments.policy, arguments.capacity_blocks, arguments.json) == ("lru", 0, False)


def test_replay_takes_all_it_promises() -> None:
    line = (
        "replay t.jsonl --requests 500 --world-size 4 --nodes 2 --ranks-per-node 3,1 --use-mla --policy lfu "
        "--capacity-blocks 10 --window 8 --verify --json --kvcache-shape-spec (1,2,4,1,4):float16:1 --seed 3"
    )
    arguments = build_parser().parse_args(line.split())
    assert Path(arguments.trace).name == "t.jsonl"
    assert (arguments.requests, arguments.world_size, arguments.nodes) == (500, 4, 2)
    assert (arguments.ranks_per_node, arguments.use_mla, arguments.policy) == ((3, 1), True, "lfu")
    assert (arguments.capacity_blocks, arguments.window, arguments.seed) == (10, 8, 3)
    assert arguments.verify and arguments.json
    assert arguments.kvcache_shape_spec == "(1,2,4,1,4):float16:1"


@pytest.mark.parametrize("command", ["up", "status", "down"])
def test_a_cluster_is_named_by_name_and_namespace(command: str) -> None:
    arguments = build_parser().parse_args([command])
    assert (arguments.name, arguments.namespace, arguments.json) == ("default", "lmcache_ray", False)
    arguments = build_parser().parse_args([command, "--name", "a", "--namespace", "b", "--json"])
    assert (arguments.name, arguments.namespace, arguments.json) == ("a", "b", True)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("", "COMMAND"),
        ("launch", "invalid choice"),
        ("replay --requests 0", "'0' is not a whole number of at least 1"),
        ("replay --window x", "'x' is not a whole number"),
        ("replay --world-size -1", "--world-size"),
        ("replay --capacity-blocks 1.5", "'1.5' is not a whole number of at least 0"),
        ("replay --ranks-per-node 3;1", "ranks_per_node '3;1' is not a list of rank counts"),
        ("replay a b", "unrecognized arguments: b"),
        ("status --chunk-size 4", "unrecognized arguments: --chunk-size 4"),
        ("up --num-blocks 0", "'0' is not a whole number of at least 1"),
    ],
)
def test_wrong_arguments_end_with_status_2_and_are_named(
    line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("line", ["--help", "replay --help", "up --help", "status --help", "down --help"])
def test_help_teaches(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 0
    assert "usage: python -m cluster" in capsys.readouterr().out


def test_help_of_replay_explains_trace_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    said = capsys.readouterr().out
    for named in ("hash_ids", "Exit status", "--verify", "examples:"):
        assert named in said
