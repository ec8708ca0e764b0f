"""What one rank knows of the model and of its place in the world, with LMCache's names and order of arguments.

Apart from the configuration because it comes from the serving engine, not from the user.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, SupportsIndex

import torch

from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import LayoutError, MetadataError
from lmcache_ray.kv_layer_groups import KVLayerGroupsManager
from lmcache_ray.layout import Placement
from lmcache_ray.torch_dtypes import from_torch_dtype

__all__ = ["LMCacheMetadata", "Placement"]

MAX_LAYERS: Final = 2**16
MAX_DIM: Final = 2**31 - 1
_SHAPE_FIELDS: Final = ("num_layers", "kv_dim", "chunk_size", "num_kv_heads", "head_size")


@dataclass(frozen=True, init=False)
class LMCacheMetadata:
    """One rank's model and place; impossible values cannot exist in it.

    `worker_id` is the rank in the world, `local_worker_id` the rank on its node. `kv_shape` is
    ``(num_layers, kv_dim, chunk_size, num_kv_heads, head_size)``: the only layer group, of dtype `kv_dtype`, while
    `kv_layer_groups_manager` is empty; unused once it is filled. `kv_shape[2]` sizes nothing, `chunk_size` does.
    `role`, `served_model_name`, `engine_id` and `kv_connector_extra_config` are carried and shown, never part of a key.
    Change a copy: ``dataclasses.replace(metadata, chunk_size=128)``.
    """

    model_name: str
    world_size: int
    local_world_size: int
    worker_id: int
    local_worker_id: int
    kv_dtype: torch.dtype
    kv_shape: tuple[int, int, int, int, int]
    use_mla: bool
    role: str | None
    served_model_name: str | None
    chunk_size: int
    kv_layer_groups_manager: KVLayerGroupsManager
    engine_id: str | None
    kv_connector_extra_config: Mapping[str, object] | None

    def __init__(
        self,
        model_name: str,
        world_size: int,
        local_world_size: int | None = None,
        worker_id: int | None = None,
        local_worker_id: int | None = None,
        kv_dtype: torch.dtype | None = None,
        kv_shape: Sequence[int] | None = None,
        use_mla: bool = False,
        role: str | None = None,
        served_model_name: str | None = None,
        chunk_size: int = 256,
        kv_layer_groups_manager: KVLayerGroupsManager | None = None,
        engine_id: str | None = None,
        kv_connector_extra_config: Mapping[str, object] | None = None,
    ) -> None:
        """Positional, or by keyword without the two local values, which are then the world's.

        `worker_id`, `kv_dtype` and `kv_shape` have a default only because optional arguments stand before them: without
        them `TypeError` is raised. `MetadataError` (a `ValueError`) names the field and the value that cannot be.
        """
        given = {"worker_id": worker_id, "kv_dtype": kv_dtype, "kv_shape": kv_shape}
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise TypeError(f"LMCacheMetadata needs {', '.join(missing)}")
        local_world_size = world_size if local_world_size is None else local_world_size
        local_worker_id = worker_id if local_worker_id is None else local_worker_id
        world = _whole("world_size", world_size, 1)
        local_world = _whole("local_world_size", local_world_size, 1, world, f"world_size is {world}")
        self.__dict__.update(
            model_name=_text("model_name", model_name),
            world_size=world,
            local_world_size=local_world,
            worker_id=_whole("worker_id", worker_id, 0, world - 1, f"world_size is {world}"),
            local_worker_id=_whole(
                "local_worker_id", local_worker_id, 0, local_world - 1, f"local_world_size is {local_world}"
            ),
            kv_dtype=_kv_dtype(kv_dtype),
            kv_shape=_kv_shape(kv_shape),
            use_mla=_truth("use_mla", use_mla),
            role=_optional_text("role", role),
            served_model_name=_optional_text("served_model_name", served_model_name),
            chunk_size=_whole("chunk_size", chunk_size, 1),
            kv_layer_groups_manager=_manager(kv_layer_groups_manager),
            engine_id=_optional_text("engine_id", engine_id),
            kv_connector_extra_config=_extra_config(kv_connector_extra_config),
        )

    @property
    def placement(self) -> Placement:
        """Which ranks hold a chunk: with MLA all KV is equal and rank 0 holds the one copy."""
        return Placement.FIRST_RANK if self.use_mla else Placement.PER_RANK

    def is_first_rank(self) -> bool:
        """Whether this is rank 0 of the world."""
        return self.worker_id == 0

    def get_num_groups(self) -> int:
        """Layer groups; 1 while the manager is empty."""
        return self.kv_layer_groups_manager.num_groups or 1

    def get_dtypes(self) -> list[torch.dtype]:
        """The KV dtype of every layer group."""
        return [group.dtype for group in self.kv_layer_groups_manager.kv_layer_groups] or [self.kv_dtype]

    def get_shapes(self, num_tokens: int | None = None) -> list[torch.Size]:
        """``[kv_size, num_layers, num_tokens, hidden_dim]`` of every layer group; `num_tokens` None is one chunk.

        A group's kv_size is 1 with MLA and else 2; `kv_shape`, the only group while the manager is empty, is reported
        as given.
        """
        rows = self.chunk_size if num_tokens is None else _whole("num_tokens", num_tokens, 0)
        kv_size = 1 if self.use_mla else 2
        groups = self.kv_layer_groups_manager.kv_layer_groups
        if groups:
            return [torch.Size((kv_size, group.num_layers, rows, group.hidden_dim_size)) for group in groups]
        num_layers, kv_dim, _, num_kv_heads, head_size = self.kv_shape
        return [torch.Size((kv_dim, num_layers, rows, num_kv_heads * head_size))]


def _impossible(name: str, value: object, accepted: str) -> MetadataError:
    return MetadataError(f"LMCacheMetadata.{name} = {value!r} is not possible; accepted: {accepted}")


def _whole(name: str, value: object, minimum: int, maximum: int | None = None, because: str = "") -> int:
    """`value` as int when it is an integer (NumPy's included, booleans not) within the bounds."""
    accepted = f"a whole number of at least {minimum}"
    if maximum is not None:
        accepted = f"a whole number from {minimum} to {maximum}" + (f", because {because}" if because else "")
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise _impossible(name, value, accepted)
    number = operator.index(value)
    if number < minimum or (maximum is not None and number > maximum):
        raise _impossible(name, value, accepted)
    return number


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _impossible(name, value, "non-empty text")
    return value


def _optional_text(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _impossible(name, value, "text or None")
    return value


def _truth(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _impossible(name, value, "True or False")
    return value


def _kv_dtype(value: object) -> torch.dtype:
    accepted = f"one of {', '.join(f'torch.{dtype.value}' for dtype in KVDtype)}"
    if not isinstance(value, torch.dtype):
        raise _impossible("kv_dtype", value, accepted)
    try:
        from_torch_dtype(value)
    except LayoutError:
        raise _impossible("kv_dtype", value, accepted) from None
    return value


def _kv_shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(_SHAPE_FIELDS):
        raise _impossible("kv_shape", value, f"five dimensions ({', '.join(_SHAPE_FIELDS)})")
    limits = (MAX_LAYERS, *[MAX_DIM] * 4)
    dims = tuple(
        _whole(f"kv_shape[{index}] ({name})", dim, 1, limit)
        for index, (name, dim, limit) in enumerate(zip(_SHAPE_FIELDS, value, limits, strict=True))
    )
    if dims[1] not in (1, 2):
        raise _impossible("kv_shape[1] (kv_dim)", dims[1], "2 (keys and values) or 1 (MLA)")
    return dims


def _manager(value: object) -> KVLayerGroupsManager:
    if value is None:
        return KVLayerGroupsManager()
    if not isinstance(value, KVLayerGroupsManager):
        raise _impossible("kv_layer_groups_manager", value, "a KVLayerGroupsManager")
    return value


def _extra_config(value: object) -> Mapping[str, object] | None:
    if value is not None and not isinstance(value, Mapping):
        raise _impossible("kv_connector_extra_config", value, "a mapping or None")
    return value
