"""The KV shape spec: its grammar, its errors, and the layouts it means."""

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import LayoutError, MetadataError, ShapeSpecError
from lmcache_ray.kv_layer_groups import KVLayerGroupInfo, KVLayerGroupsManager
from lmcache_ray.layout import ShardSpec
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import (
    LayerGroupSpec,
    calculate_composite_kv_cache_shape,
    format_kvcache_shape_spec,
    get_composite_kv_dtype,
    layer_groups_manager,
    parse_kv_shape,
    parse_kvcache_shape_spec,
    shard_specs,
    shard_specs_of,
)
from lmcache_ray.torch_dtypes import to_torch_dtype

TWO = "(2,2,256,4,16):float16:2;(3,2,256,8,4):bfloat16:3"
groups = st.builds(
    LayerGroupSpec,
    st.integers(1, 2**16),
    st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=7).map(tuple),
    st.sampled_from([to_torch_dtype(dtype) for dtype in KVDtype]),
)


def test_two_groups() -> None:
    first, second = parse_kvcache_shape_spec(TWO)
    assert (first.layer_count, first.shape, first.dtype) == (2, (2, 2, 256, 4, 16), torch.float16)
    assert second == LayerGroupSpec(3, (3, 2, 256, 8, 4), torch.bfloat16)
    assert repr(first) == "LayerGroupSpec(layer_count=2, shape=(2, 2, 256, 4, 16), dtype=torch.float16)"
    assert pickle.loads(pickle.dumps(first)) == first


@pytest.mark.parametrize("dtype", list(KVDtype))
def test_every_dtype_keeps_its_name(dtype: KVDtype) -> None:
    (group,) = parse_kvcache_shape_spec(f"(1,2,3,4,5):{dtype.value}:1")
    assert group.dtype is to_torch_dtype(dtype)


def test_blanks_case_and_leading_zeros_do_not_matter() -> None:
    text = " ( 2 , 02,256,4,\t16 ) : Float16 : 2 ;\n(3,2,256,8,4):BFLOAT16:3 "
    assert format_kvcache_shape_spec(parse_kvcache_shape_spec(text)) == TWO


@given(st.lists(groups, min_size=1, max_size=4))
def test_formatting_and_parsing_are_inverse(specs: list[LayerGroupSpec]) -> None:
    assert parse_kvcache_shape_spec(format_kvcache_shape_spec(specs)) == specs


GOOD = "(2,2,256,4,16):float16:2"

ODD = [
    ("", "is empty"),
    ("   ", "is empty"),
    ("(2,2,256,4,16):float16", "is not of the form"),
    ("(2,2,256,4,16):float16:", "layer_count '' must be"),
    ("(2,2,256,4,16)", "is not of the form"),
    ("2,2,256,4,16:float16:2", "is not of the form"),
    ("(2,2,256,4,16:float16:2", "is not of the form"),
    ("((2,2,256,4,16)):float16:2", "is not of the form"),
    ("(2,2,256,4,16)x:float16:2", "is not of the form"),
    ("x(2,2,256,4,16):float16:2", "is not of the form"),
    ("(2,2,256,4,16):float16:2:2", "is not of the form"),
    ("(2,2,256,4,16):float16:2 2", "layer_count '2 2' must be"),
    ("(2,2,256,4,16):float16:2x", "layer_count '2x' must be"),
    ("(2,2,256,4,16):float16:0", "layer_count '0' must be"),
    ("(2,2,256,4,16):float16:-2", "layer_count '-2' must be"),
    ("(2,2,256,4,16):float16:2.0", "layer_count '2.0' must be"),
    ("(2,2,256,4,16):float16:1e3", "layer_count '1e3' must be"),
    ("(2,2,256,4,16):float16:٢", "layer_count '٢' must be"),
    ("(2,2,256,4,16):float16:65537", "from 1 to 65536"),
    ("(0,2,256,4,16):float16:2", "a dimension '0' must be"),
    ("(2,2,-256,4,16):float16:2", "a dimension '-256' must be"),
    ("(2,2,+256,4,16):float16:2", "a dimension '+256' must be"),
    ("(2,2,256.0,4,16):float16:2", "a dimension '256.0' must be"),
    ("(2,2,2_5,4,16):float16:2", "a dimension '2_5' must be"),
    ("(2,2,0x10,4,16):float16:2", "a dimension '0x10' must be"),
    ("(2,2,２５６,4,16):float16:2", "a dimension '２５６' must be"),
    ("(2,2,4294967296,4,16):float16:2", "from 1 to 2147483647"),
    (f"(2,2,{'9' * 5000},4,16):float16:2", "from 1 to 2147483647"),
    ("(2,2,,4,16):float16:2", "a dimension '' must be"),
    ("(2,2,256,4,16,):float16:2", "a dimension '' must be"),
    ("():float16:2", "a dimension '' must be"),
    ("(2,2,256,4,16):float17:2", "dtype 'float17' is not known; accepted: float16, bfloat16, float32, uint8"),
    ("(2,2,256,4,16):float64:2", "dtype 'float64' is not known"),
    ("(2,2,256,4,16):torch.float16:2", "dtype 'torch.float16' is not known"),
    ("(2,2,256,4,16)::2", "dtype '' is not known"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), ODD)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_odd_text_is_an_error_with_the_groups_number_and_text(text: str, words: str, number: int) -> None:
    parts = [GOOD, GOOD, GOOD]
    parts[number - 1] = text
    with pytest.raises(ShapeSpecError) as caught:
        parse_kvcache_shape_spec(";".join(parts))
    assert str(caught.value).startswith(f"KV shape spec, group {number} {text.strip()!r}"[:60])
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "number"), [(GOOD + ";", 2), (";" + GOOD, 1), (f"{GOOD};;{GOOD}", 2), ("", 1), (";", 1)]
)
def test_an_empty_group_is_an_error_even_at_the_end(text: str, number: int) -> None:
    with pytest.raises(ShapeSpecError, match=f"group {number} '' is empty"):
        parse_kvcache_shape_spec(text)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ShapeSpecError, match="got list"):
        parse_kvcache_shape_spec([GOOD])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer_count", "shape", "dtype", "words"),
    [
        (0, (1,), torch.uint8, "layer_count = 0"),
        (True, (1,), torch.uint8, "layer_count = True"),
        (2**16 + 1, (1,), torch.uint8, "layer_count"),
        (1, (), torch.uint8, "no dimension"),
        (1, (1, 0), torch.uint8, r"shape\[1\] = 0"),
        (1, (1, 2.0), torch.uint8, r"shape\[1\] = 2.0"),
        (1, (1,), torch.float64, "float64"),
        (1, (1,), "float16", "float16"),
    ],
)
def test_an_impossible_group_cannot_be_made(layer_count, shape, dtype, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShapeSpecError, match=words):
        LayerGroupSpec(layer_count, shape, dtype)


def test_kv_shape_text() -> None:
    assert parse_kv_shape("32,2,256,32,128") == (32, 2, 256, 32, 128)
    assert parse_kv_shape(" 2, 2 ,256,4,16 ") == (2, 2, 256, 4, 16)
    for text in ("", "2,2,256,4", "2,2,256,4,16,", "2,2,256,4,x", "2,2,0,4,16", "2,2,-1,4,16", "(2,2,256,4,16)",
                 "2,2,256.0,4,16", "2 2 256 4 16", "9999999,2,256,4,16", "2,2,٢,4,16"):  # fmt: skip
        with pytest.raises(ShapeSpecError, match="KV shape"):
            parse_kv_shape(text)


def test_composites() -> None:
    specs = parse_kvcache_shape_spec("(2,2,256,4,16):float16:2;(3,2,128,8,4):bfloat16:3")
    assert calculate_composite_kv_cache_shape(specs) == (5, 2, 256, 8, 16)
    assert get_composite_kv_dtype(specs) is torch.float16
    mla = parse_kvcache_shape_spec("(3,64,576):bfloat16:3;(1,1,32,1,128):uint8:1")
    assert calculate_composite_kv_cache_shape(mla) == (4, 1, 64, 1, 576)
    with pytest.raises(ShapeSpecError, match=r"group 2 '\(2,2,4,16\):float16:2' has 4 dimensions"):
        calculate_composite_kv_cache_shape([*specs[:1], LayerGroupSpec(2, (2, 2, 4, 16), torch.float16)])
    for function in (calculate_composite_kv_cache_shape, get_composite_kv_dtype, format_kvcache_shape_spec):
        with pytest.raises(ShapeSpecError, match="no layer group"):
            function([])


def test_shards_number_layers_over_groups_and_heads_from_zero() -> None:
    assert shard_specs(parse_kvcache_shape_spec(TWO), use_mla=False) == (
        ShardSpec((0, 1), range(4), 16, KVDtype.FLOAT16),
        ShardSpec((2, 3, 4), range(8), 4, KVDtype.BFLOAT16),
    )


def test_mla_shards_of_both_shapes_are_equal() -> None:
    five = shard_specs(parse_kvcache_shape_spec("(3,1,64,1,576):bfloat16:3"), use_mla=True)
    three = shard_specs(parse_kvcache_shape_spec("(3,64,576):bfloat16:3"), use_mla=True)
    assert five == three == (ShardSpec((0, 1, 2), range(1), 576, KVDtype.BFLOAT16, kv_size=1),)


@pytest.mark.parametrize(
    ("text", "use_mla", "words"),
    [
        ("(3,2,256,4,16):float16:2", False, "first dimension says 3 layers, its layer_count says 2"),
        ("(4,64,576):float16:2", True, "first dimension says 4 layers, its layer_count says 2"),
        ("(2,3,256,4,16):float16:2", False, "kv_dim 3 without MLA"),
        ("(2,1,256,4,16):float16:2", False, "kv_dim 1 without MLA"),
        ("(2,2,256,4,16):float16:2", True, "kv_dim 2 with MLA"),
        ("(2,64,576):float16:2", False, "kv_dim 1 without MLA"),
        ("(2,2,4,16):float16:2", False, "4 dimensions"),
        ("(2,2,256,4,16,1):float16:2", False, "6 dimensions"),
        ("(2):float16:2", True, "1 dimensions"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_number_and_text(text: str, use_mla: bool, words: str) -> None:
    good = "(1,1,9,1,8):uint8:1" if use_mla else "(1,2,9,1,8):uint8:1"
    with pytest.raises(ShapeSpecError, match=words) as caught:
        shard_specs(parse_kvcache_shape_spec(f"{good};{text}"), use_mla=use_mla)
    assert f"group 2 {text!r}" in str(caught.value)


def metadata(**changes: object) -> LMCacheMetadata:
    given = {"model_name": "m", "world_size": 1, "worker_id": 0, "kv_dtype": torch.int8, "kv_shape": (3, 2, 256, 4, 16)}
    return LMCacheMetadata(**(given | changes))  # type: ignore[arg-type]


def test_shards_of_a_kv_shape() -> None:
    assert shard_specs_of(metadata()) == (ShardSpec((0, 1, 2), range(4), 16, KVDtype.INT8),)
    mla = metadata(use_mla=True, kv_shape=(3, 1, 256, 1, 576))
    assert shard_specs_of(mla) == (ShardSpec((0, 1, 2), range(1), 576, KVDtype.INT8, kv_size=1),)
    with pytest.raises(MetadataError, match=r"kv_shape = \(3, 2, 256, 4, 16\): kv_dim 2 with MLA"):
        shard_specs_of(metadata(use_mla=True))
    with pytest.raises(MetadataError, match="kv_dim 1 without MLA"):
        shard_specs_of(metadata(kv_shape=(3, 1, 256, 4, 16)))


def test_shards_of_a_managers_groups_keep_their_layers() -> None:
    manager = KVLayerGroupsManager()
    wide, narrow = torch.empty(2, 3, 16, 4, 8), torch.empty(2, 3, 16, 2, 8, dtype=torch.bfloat16)
    manager.build_kv_layer_groups({"0": wide, "1": narrow, "2": wide})
    assert shard_specs_of(metadata(kv_layer_groups_manager=manager)) == (
        ShardSpec((0, 2), range(4), 8, KVDtype.FLOAT32),
        ShardSpec((1,), range(2), 8, KVDtype.BFLOAT16),
    )
    latent = KVLayerGroupsManager([KVLayerGroupInfo(["b", "a"], [5, 3], torch.Size((9, 16, 576)), torch.uint8)])
    assert shard_specs_of(metadata(kv_layer_groups_manager=latent, use_mla=True)) == (
        ShardSpec((3, 5), range(1), 576, KVDtype.UINT8, kv_size=1),
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "use_mla", "error", "words"),
    [
        ((2, 9, 16, 4), torch.float16, False, MetadataError, "4 dimensions"),
        ((9, 16, 576), torch.float16, False, MetadataError, "kv_dim 1 without MLA"),
        ((2, 9, 16, 1, 576), torch.float16, True, MetadataError, "kv_dim 2 with MLA"),
        ((2, 9, 16, 4, 8), torch.float64, False, LayoutError, "float64"),
        ((2, 9, 16, 0, 8), torch.float16, False, LayoutError, "heads"),
    ],
)
def test_a_managers_group_that_cannot_be_meant_is_refused(  # type: ignore[no-untyped-def]
    shape, dtype, use_mla, error, words
) -> None:
    manager = KVLayerGroupsManager([KVLayerGroupInfo(["a"], [0], torch.Size(shape), dtype)])
    with pytest.raises(error, match=words):
        shard_specs_of(metadata(kv_layer_groups_manager=manager, use_mla=use_mla))


@pytest.mark.parametrize(
    ("text", "use_mla", "shapes"),
    [
        (TWO + ";(2,2,256,4,16):float16:2", False, [(2, 256, 8, 4, 16), (2, 256, 8, 8, 4), (2, 256, 8, 4, 16)]),
        ("(3,64,576):bfloat16:3;(1,1,32,1,8):uint8:1", True, [(64, 8, 576), (1, 32, 8, 1, 8)]),
    ],
)
def test_groups_reach_the_metadata(text: str, use_mla: bool, shapes: list[tuple[int, ...]]) -> None:
    specs = parse_kvcache_shape_spec(text)
    made = metadata(kv_layer_groups_manager=layer_groups_manager(specs, use_mla=use_mla, block_size=8), use_mla=use_mla)
    assert [tuple(group.shape) for group in made.kv_layer_groups_manager.kv_layer_groups] == shapes
    assert shard_specs_of(made) == shard_specs(specs, use_mla=use_mla)
    assert made.get_num_groups() == len(specs)
    assert made.get_dtypes() == [spec.dtype for spec in specs]
    assert [tuple(shape) for shape in made.get_shapes(5)] == [
        (spec.kv_size, spec.num_layers, 5, spec.hidden_dim) for spec in shard_specs(specs, use_mla=use_mla)
    ]
    last = made.kv_layer_groups_manager.kv_layer_groups[-1]
    assert last.layer_names == [f"model.layers.{layer}" for layer in last.layer_indices]


def test_blocks_and_token_bytes_of_a_group() -> None:
    full, latent = parse_kvcache_shape_spec("(2,2,256,4,16):float16:2;(3,64,576):bfloat16:3")
    assert (full.num_blocks, full.token_nbytes) == (256, 2 * 2 * 4 * 16 * 2)
    assert (latent.num_blocks, latent.token_nbytes) == (64, 3 * 576 * 2)


def test_a_group_without_a_meaning_has_neither() -> None:
    (group,) = parse_kvcache_shape_spec("(2,2,4,16):float16:2")
    for size in (lambda: group.num_blocks, lambda: group.token_nbytes):
        with pytest.raises(ShapeSpecError, match=r"layer group '\(2,2,4,16\):float16:2' has 4 dimensions"):
            size()
