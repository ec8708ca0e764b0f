"""Integers out of lists, by the compiled means and by Python's: the same array, or the same refusal."""

import shutil
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ray.arrays import _compiled, _packed_in_python, packed_integers

Pack = Callable[[Sequence[int]], np.ndarray]


class Indexed:
    """An integer as other libraries have them."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


@pytest.fixture(params=[packed_integers, _packed_in_python])
def pack(request: pytest.FixtureRequest) -> Pack:
    function: Pack = request.param
    return function


@given(st.lists(st.integers(0, 2**63 - 1)))
def test_both_means_give_the_same_array_of_its_own(values: list[int]) -> None:
    for given_values in (values, tuple(values)):
        packed, in_python = packed_integers(given_values), _packed_in_python(given_values)
        assert packed.dtype == in_python.dtype == np.int64
        assert packed.tolist() == in_python.tolist() == values
        assert packed.flags.c_contiguous and in_python.flags.c_contiguous


@pytest.mark.parametrize("last", [np.int64(7), np.uint8(7), Indexed(7), np.array(7)])
def test_integers_of_other_libraries_are_integers(pack: Pack, last: int) -> None:
    assert pack([3, 2**40, last]).tolist() == [3, 2**40, 7]


@pytest.mark.parametrize("wrong", [True, False, np.True_, 1.0, "1", None, [1]])
def test_what_is_no_integer_is_refused(pack: Pack, wrong: object) -> None:
    with pytest.raises(TypeError):
        pack([5, wrong])  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [-1, -(2**70), 2**63, 2**64, 2**100])
def test_integers_out_of_range_are_refused(pack: Pack, wrong: int) -> None:
    with pytest.raises(OverflowError):
        pack([5, wrong])


class Longer(list[int]):
    """As a list that another thread takes from: it is not as long as it was when it was asked."""

    def __len__(self) -> int:
        return super().__len__() + 1


def test_a_length_that_changes_is_refused(pack: Pack) -> None:
    with pytest.raises(ValueError):
        pack(Longer([1, 2]))


def test_a_machine_with_a_compiler_has_the_compiled_means() -> None:
    assert _compiled() is not None or shutil.which("cc") is None


@pytest.mark.parametrize(("values", "nbytes"), [([1, 2], 8), ([1], 9), ({1: 2}, 8), (range(1), 8), (iter([1]), 8)])
def test_the_compiled_means_refuses_another_length_or_kind(values: object, nbytes: int) -> None:
    compiled = _compiled()
    if compiled is None:
        pytest.skip("no compiled part and no C compiler on this machine")
    with pytest.raises(ValueError, match="8 bytes for each"):
        compiled.pack(values, np.zeros(nbytes, dtype=np.uint8))  # type: ignore[arg-type]
