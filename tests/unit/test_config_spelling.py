"""Python values are read as their text: right types pass, wrong types fail as their text would."""

from enum import Enum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ray.config_spelling import Choice, Directory, Maybe, Number, Text, Truth, Whole, text_of


class Policy(str, Enum):
    LFU = "lfu"


@pytest.mark.parametrize(
    ("spelling", "value", "expected"),
    [
        (Whole(1), 5, 5),
        (Whole(1), np.int64(5), 5),
        (Number("GiB", 100), 5, 5.0),
        (Number("GiB", 100), np.float32(0.5), 0.5),
        (Truth(), True, True),
        (Truth(), 0, False),
        (Number("GiB", 100, can_be_zero=True), 0, 0.0),
        (Choice(("LRU", "LFU")), Policy.LFU, "LFU"),
        (Choice(("lfu", "fp8")), "LFU", "lfu"),
        (Directory(), Path("/tmp/kv"), "/tmp/kv"),
        (Text("a path"), Path("/tmp"), "/tmp"),
        (Maybe(Whole(1)), None, None),
    ],
)
def test_python_values_of_the_right_type(spelling, value, expected) -> None:  # type: ignore[no-untyped-def]
    found = spelling(value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("spelling", "value"),
    [
        (Whole(1), True),
        (Whole(1), 5.0),
        (Whole(1), b"5"),
        (Whole(1), [5]),
        (Number("GiB", 100), True),
        (Number("GiB", 100), float("nan")),
        (Number("GiB", 100), 101),
        (Number("GiB", 100), 0),
        (Number("GiB", 100, can_be_zero=True), -1),
        (Number("GiB", 100, can_be_zero=True), float("nan")),
        (Truth(), 2),
        (Truth(), []),
        (Text("text"), "a\x00b"),
        (Text("text"), "a\udc80"),
        (Text("text"), "a\nb"),
        (Maybe(Whole(1)), ""),
        (Directory(), ""),
        (Directory(), "kv"),
        (Directory(), "/a\x00b"),
        (Directory(), "/a\nb"),
        (Directory(), "/a\udcff"),
        (Directory(), b"/kv"),
    ],
)
def test_python_values_of_the_wrong_type_say_what_is_accepted(spelling, value) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="is not accepted; accepted: ") as caught:
        spelling(value)
    assert spelling.accepted in str(caught.value)


@pytest.mark.parametrize(
    ("text", "directory"),
    [
        ("/kv/", "/kv"),
        ("file:///kv/", "/kv"),
        ("//kv//a", "/kv/a"),
        ("/a/b/../c/./d", "/a/c/d"),
        ("/../..", "/"),
        ("/mnt/großer Speicher/@home/二", "/mnt/großer Speicher/@home/二"),
        ("/a\u3000b", "/a\u3000b"),
        ("file:///a%20b", "/a%20b"),
        ("/" + "n" * 300, "/" + "n" * 300),
    ],
)
def test_a_directory_is_resolved_by_its_text_alone(text: str, directory: str) -> None:
    assert Directory()(text) == directory == Directory()(directory)


@given(st.text() | st.floats() | st.integers())
def test_reading_a_text_twice_changes_nothing(value: object) -> None:
    text = text_of(value)
    assert text_of(text) == text


@given(st.floats(min_value=1e-9, max_value=1e9))
def test_numbers_survive_their_text(value: float) -> None:
    assert Number("seconds", 1e9)(str(value)) == value
