"""A multi-rank KV cache for LLM serving: the library, which knows nothing of Ray.

Every name below is imported from its own module when first used, so that a process which needs only metadata or keys
(the cluster's coordinator, a driver) never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

__version__: Final = "0.1.0"
__lmcache_ray_version__: Final = __version__  # how the cluster's probe of nodes knows this package as ours

__all__ = [
    "ClearResult",
    "KVLayerGroupInfo",
    "KVLayerGroupsManager",
    "LMCacheEngine",
    "LMCacheEngineConfig",
    "LMCacheMetadata",
    "LMCacheRayError",
    "LMCacheStandaloneStarter",
    "LayerGroupSpec",
    "Placement",
    "Prompt",
    "__version__",
    "build_engine",
    "build_world",
    "format_kvcache_shape_spec",
    "parse_kvcache_shape_spec",
]

if TYPE_CHECKING:
    from lmcache_ray.build import build_engine, build_world
    from lmcache_ray.clearing import ClearResult
    from lmcache_ray.config import LMCacheEngineConfig
    from lmcache_ray.engine import LMCacheEngine
    from lmcache_ray.errors import LMCacheRayError
    from lmcache_ray.kv_layer_groups import KVLayerGroupInfo, KVLayerGroupsManager
    from lmcache_ray.layout import Placement
    from lmcache_ray.metadata import LMCacheMetadata
    from lmcache_ray.prompt import Prompt
    from lmcache_ray.shape_spec import LayerGroupSpec, format_kvcache_shape_spec, parse_kvcache_shape_spec
    from lmcache_ray.standalone.starter import LMCacheStandaloneStarter
else:
    _HOMES: Final = {
        "ClearResult": "clearing",
        "KVLayerGroupInfo": "kv_layer_groups",
        "KVLayerGroupsManager": "kv_layer_groups",
        "LMCacheEngine": "engine",
        "LMCacheEngineConfig": "config",
        "LMCacheMetadata": "metadata",
        "LMCacheRayError": "errors",
        "LMCacheStandaloneStarter": "standalone.starter",
        "LayerGroupSpec": "shape_spec",
        "Placement": "layout",
        "Prompt": "prompt",
        "build_engine": "build",
        "build_world": "build",
        "format_kvcache_shape_spec": "shape_spec",
        "parse_kvcache_shape_spec": "shape_spec",
    }

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{home}"), name)
