"""Token ids: every accepted form gives the same array; every wrong value is named with its position."""

from array import array

import numpy as np
import pytest
import torch

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.tokens import token_ids
from tests.unit.odd_tensors import memory_given_back

IDS = [0, 1, 7, 31999, 2**31, 2**32 + 5, 2**63 - 1]
SMALL = [0, 1, 2, 100]


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        array("q", IDS),
        array("Q", IDS),
        np.array(IDS),
        np.array(IDS, dtype=np.uint64),
        np.array(IDS, dtype=">i8"),
        np.repeat(np.array(IDS), 2)[::2],
        torch.tensor(IDS),
        torch.tensor(IDS).repeat_interleave(3)[::3],
        [np.int64(token) for token in IDS],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_form_gives_the_same_array(tokens):
    ids = token_ids(tokens)
    assert ids.dtype == np.dtype("<i8")
    assert ids.flags.c_contiguous
    assert ids.tolist() == IDS


@pytest.mark.parametrize("typecode", "bBhHiIlLqQ")
def test_narrow_arrays_widen(typecode):
    assert token_ids(array(typecode, SMALL)).tolist() == SMALL


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint32])
def test_narrow_tensors_widen(dtype):
    assert token_ids(torch.tensor(SMALL).to(dtype)).tolist() == SMALL


@pytest.mark.parametrize("tokens", [range(0), range(5), range(7, 0, -2), range(3, 3 + 2**40 * 3, 2**40)])
def test_ranges(tokens):
    assert token_ids(tokens).tolist() == list(tokens)


@pytest.mark.parametrize("tokens", [[], (), array("q"), np.array([], dtype=int), torch.tensor([], dtype=torch.int64)])
def test_no_tokens_is_a_prompt_too(tokens):
    assert token_ids(tokens).shape == (0,)
    assert token_ids(tokens).dtype == np.int64


def test_an_int64_array_is_not_copied():
    tokens = np.arange(8)
    assert token_ids(tokens) is tokens


def test_an_array_can_grow_while_its_ids_live():
    tokens = array("q", SMALL)
    ids = token_ids(tokens)
    tokens.append(5)
    assert ids.tolist() == SMALL


@pytest.mark.parametrize(
    ("tokens", "position", "value"),
    [
        ([5, -1, 7], 1, "-1"),
        ([5, 2**63], 1, "9223372036854775808"),
        ([5, 2**70, -1], 1, "1180591620717411303424"),
        ([5, 1.0], 1, "1.0 (float)"),
        ([2**40, 3.5], 1, "3.5 (float)"),
        ([float("nan")], 0, "nan"),
        ([1, 0, True], 2, "True (bool)"),
        ([0, 1, np.int64(1), True, -1], 3, "True (bool)"),
        ([5, -1, True], 1, "-1"),
        ((3, False), 1, "False (bool)"),
        ([2**40, True], 1, "True (bool)"),
        ([3, np.True_], 1, repr(np.True_)),
        ([3, torch.tensor(True)], 1, "tensor(True)"),
        ([3, "7"], 1, "'7' (str)"),
        ([None], 0, "None (NoneType)"),
        ([[1, 2]], 0, "[1, 2] (list)"),
        (array("b", [4, -3]), 1, "-3"),
        (array("Q", [4, 2**63]), 1, "9223372036854775808"),
        (np.array([4, -3]), 1, "-3"),
        (np.array([4, 2**63], dtype=np.uint64), 1, "9223372036854775808"),
        (torch.tensor([4, 5, -3]), 2, "-3"),
        (range(3, -3, -2), 2, "-1"),
        (range(-3, 5), 0, "-3"),
        (range(2**63 - 3, 2**63 + 9, 2), 2, "9223372036854775809"),
    ],
)
def test_the_first_wrong_id_is_named(tokens, position, value):
    with pytest.raises(InvalidRequestError) as refused:
        token_ids(tokens)
    assert f"tokens[{position}] is {value}" in str(refused.value)
    assert "0 <= id < 2**63" in str(refused.value)


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        (None, "NoneType"),
        ("123", "str"),
        (b"123", "bytes"),
        ({1, 2}, "set"),
        (5, "int"),
        (array("d", [1.0]), "typecode 'd'"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([1], dtype=object), "object"),
        (np.array([[1, 2]]), "(1, 2)"),
        (np.array(1), "()"),
        (torch.tensor([1.0]), "torch.float32"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "torch.bfloat16"),
        (torch.tensor([True]), "torch.bool"),
        (torch.tensor([[1, 2]]), "(1, 2)"),
        (torch.empty(3, dtype=torch.int64, device="meta"), "meta"),
        (torch.tensor([1, 2]).to_sparse(), "torch.sparse_coo"),
        (torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])], layout=torch.jagged), "torch.jagged"),
    ],
)
def test_a_wrong_container_is_named(tokens, named):
    with pytest.raises(InvalidRequestError, match="tokens is") as refused:
        token_ids(tokens)
    assert named in str(refused.value)


def test_a_tensor_whose_memory_was_given_back_is_not_read():
    with pytest.raises(InvalidRequestError, match="tokens is a torch tensor whose memory was given back"):
        token_ids(memory_given_back(torch.tensor([1, 2])))


def test_a_list_whose_length_is_another_than_it_says_is_refused():
    """As one that another thread takes from."""

    class Longer(list):
        def __len__(self):
            return super().__len__() + 1

    with pytest.raises(InvalidRequestError, match="changed while they were read"):
        token_ids(Longer([1, 2, 3]))
