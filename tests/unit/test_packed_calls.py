"""Packed calls: what was said is what is run, and nothing else can be run."""

import pytest

from cluster.messages import LookupItem, PackedRefs, PlannedLoad
from cluster.packed_calls import pack, pack_call, run_call, unpack


def test_a_call_is_run_with_its_arguments_and_answers_alike() -> None:
    heard: list[object] = []

    def lookup(*arguments: object) -> list[PlannedLoad]:
        heard.extend(arguments)
        return [PlannedLoad(3, PackedRefs(b"k", b"s", b"g"))]

    item = LookupItem(b"\x00\xff" * 16, "lease")
    answer = unpack(run_call({"lookup": lookup}, pack_call("lookup", "client", [item])))
    assert heard == ["client", [item]]
    assert answer == [PlannedLoad(3, PackedRefs(b"k", b"s", b"g"))]


def test_what_a_call_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_call({"fail": fail}, pack_call("fail"))


def test_only_what_is_offered_can_be_called() -> None:
    with pytest.raises(KeyError, match="stop"):
        run_call({"lookup": list}, pack_call("stop"))


def test_a_value_comes_back_as_it_was() -> None:
    assert unpack(pack(([b"x"], {"a": 1}, None))) == ([b"x"], {"a": 1}, None)
