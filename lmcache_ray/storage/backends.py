"""From a URL to a backend: the built-in schemes, and those of other packages by entry point.

A package adds a scheme, or takes one over, by an entry point whose name is the scheme and whose object is called as
``factory(url, timeout_s)``::

    [project.entry-points."lmcache_ray.storage_backends"]
    mystore = "my_package.lmcache:open_my_store"

Only the backend that is asked for is imported, so that nobody needs the packages of the others.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from lmcache_ray.errors import ConfigError
from lmcache_ray.storage.base import StorageBackend
from lmcache_ray.tiers.spec import masked

BackendFactory = Callable[[str, float], StorageBackend]
"""``factory(url, timeout_s)``. Raises `ConfigError` for what cannot be meant; connects to nothing yet."""

ENTRY_POINT_GROUP: Final = "lmcache_ray.storage_backends"

_REDIS_SCHEMES: Final = ("redis", "rediss", "unix")
_EXAMPLES: Final = ("file", "gs", "memory", *_REDIS_SCHEMES, "s3")


def open_backend(url: str, *, timeout_s: float) -> StorageBackend:
    """The backend for `url`, each of whose calls should take `timeout_s` at most (`guarded.py` sees to it).

    Does not connect: a store that is absent now is no error. Raises `ConfigError` for a scheme that nobody knows, a
    package that is missing, or a URL that the backend cannot read; passwords are masked.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise ConfigError(f"remote_url {masked(url)!r} has no scheme; accepted: {_accepted()}")
    scheme = scheme.lower()
    named = _named_by_packages().get(scheme)
    factory = _load(named) if named is not None else _built_in(scheme, url)
    return factory(url, timeout_s)


def _built_in(scheme: str, url: str) -> BackendFactory:
    if scheme in _REDIS_SCHEMES:
        return _redis(url)
    try:
        from lmcache_ray.storage.fsspec_backend import is_known, open_fsspec
    except ImportError as error:
        raise _missing("fsspec", "fsspec", url) from error
    if not is_known(scheme):
        raise ConfigError(f"remote_url {masked(url)!r}: no backend has the scheme {scheme!r}; accepted: {_accepted()}")
    return open_fsspec


def _redis(url: str) -> BackendFactory:
    try:
        from lmcache_ray.storage.redis_backend import open_redis
    except ImportError as error:
        raise _missing("redis", "redis", url) from error
    return open_redis


def _named_by_packages() -> dict[str, EntryPoint]:
    return {point.name.lower(): point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _load(point: EntryPoint) -> BackendFactory:
    try:
        factory: BackendFactory = point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the backend of scheme {point.name!r} cannot be loaded from {point.value!r}, which an installed package "
            f"names in {ENTRY_POINT_GROUP!r}: {error}"
        ) from error
    return factory


def _accepted() -> str:
    schemes = sorted({*_EXAMPLES, *_named_by_packages()})
    return ", ".join(f"{scheme}://" for scheme in schemes) + ", and every other scheme that fsspec knows"


def _missing(package: str, extra: str, url: str) -> ConfigError:
    return ConfigError(
        f"remote_url {masked(url)!r} needs the package {package}, which is not installed: "
        f"pip install 'lmcache-ray[{extra}]'"
    )
