"""The Ray edge of lmcache_ray: one actor per rank, one coordinator, and the client that drives them.

Importing this package imports neither Ray nor torch; `CacheCluster`, `Request` and `ClusterStatus` are loaded when
first used. Where Ray is not installed it cannot be imported: `lmcache_ray` alone needs none.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lmcache_ray import __version__ as __lmcache_ray_version__  # how the probe of nodes knows this package as ours

__all__ = ["CacheCluster", "ClusterStatus", "Request", "__lmcache_ray_version__"]

if find_spec("ray") is None:
    raise ModuleNotFoundError(
        "the package `cluster` needs Ray, which is not installed: pip install 'lmcache-ray[ray]'", name="ray"
    )

if TYPE_CHECKING:
    from .client import CacheCluster, ClusterStatus, Request
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(".client", __name__), name)
