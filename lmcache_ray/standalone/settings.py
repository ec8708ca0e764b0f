"""What a command line means: the configuration, metadata and layer groups that it describes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from lmcache_ray.config import COMMAND_LINE, LMCacheEngineConfig, load_config, parse_overrides
from lmcache_ray.config_spelling import Whole
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import ConfigError, ShapeSpecError
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import (
    KVShape,
    LayerGroupSpec,
    calculate_composite_kv_cache_shape,
    get_composite_kv_dtype,
    parse_kv_shape,
    parse_kvcache_shape_spec,
    shard_specs,
)
from lmcache_ray.standalone.command_line import FLAG_NAMES, CommandLine
from lmcache_ray.torch_dtypes import to_torch_dtype

_DEFAULT_SHAPE: Final[KVShape] = (2, 2, 256, 4, 16)
_DEFAULT_MLA_SHAPE: Final[KVShape] = (2, 1, 256, 4, 16)
_DEFAULT_DTYPE: Final = KVDtype.FLOAT16


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of an `LMCacheStandaloneStarter`."""

    config: LMCacheEngineConfig
    metadata: LMCacheMetadata
    layer_groups: tuple[LayerGroupSpec, ...]
    device: str


def read_settings(command_line: CommandLine) -> Settings:
    """What `command_line` means, over its file and the environment.

    Raises `ConfigError`, `ShapeSpecError` or `MetadataError`, whose message names the flag or key that is wrong.
    """
    overrides = parse_overrides(command_line.overrides, also_known=FLAG_NAMES)
    config = load_config(command_line.config)
    config.update(overrides, COMMAND_LINE)
    config.validate()
    shape = dtype = None
    if command_line.kv_shape is not None:
        with _blamed_on("--kv-shape"):
            shape = parse_kv_shape(command_line.kv_shape)
    if command_line.kv_dtype is not None:
        dtype = _read_dtype(command_line.kv_dtype)
    groups = _layer_groups(command_line, shape, dtype)
    metadata = LMCacheMetadata(
        model_name=command_line.model_name,
        world_size=_whole("--world-size", command_line.world_size, minimum=1),
        worker_id=_whole("--worker-id", command_line.worker_id, minimum=0),
        # What was typed beside a spec goes in as it is: where the two disagree, building the world says so.
        kv_shape=shape or calculate_composite_kv_cache_shape(groups),
        kv_dtype=dtype or get_composite_kv_dtype(groups),
        use_mla=command_line.use_mla,
        chunk_size=config.chunk_size,
    )
    return Settings(config, metadata, groups, command_line.device)


def _layer_groups(
    command_line: CommandLine, shape: KVShape | None, dtype: torch.dtype | None
) -> tuple[LayerGroupSpec, ...]:
    """The groups of the spec, or the only group of shape and dtype; refused if no engine can be built from them."""
    if command_line.kvcache_shape_spec is not None:
        with _blamed_on("--kvcache-shape-spec"):
            groups = parse_kvcache_shape_spec(command_line.kvcache_shape_spec)
            shard_specs(groups, use_mla=command_line.use_mla)
        return tuple(groups)
    shape = shape or (_DEFAULT_MLA_SHAPE if command_line.use_mla else _DEFAULT_SHAPE)
    group = LayerGroupSpec(shape[0], shape, dtype or to_torch_dtype(_DEFAULT_DTYPE))
    with _blamed_on("--kv-shape"):
        shard_specs([group], use_mla=command_line.use_mla)
    return (group,)


def _read_dtype(text: str) -> torch.dtype:
    try:
        return to_torch_dtype(KVDtype(text.strip().lower()))
    except ValueError:
        accepted = ", ".join(dtype.value for dtype in KVDtype)
        raise ConfigError(f"--kv-dtype = {text!r} is not accepted; accepted: {accepted}") from None


def _whole(flag: str, text: str, *, minimum: int) -> int:
    try:
        return Whole(minimum)(text)
    except ValueError as reason:
        raise ConfigError(f"{flag} = {text!r} {reason}") from None


@contextmanager
def _blamed_on(flag: str) -> Iterator[None]:
    try:
        yield
    except ShapeSpecError as error:
        raise ShapeSpecError(f"{flag}: {error}") from None
