"""The record of a cluster's name in Ray's internal key-value store, which lives as long as the Ray cluster does.

That store is Ray's own memory of names and actors: whatever ends it ends all actors too, so what it forgets nobody
misses.
"""

import pickle
from typing import Final

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from lmcache_ray.errors import ClusterError

from .record import ClusterRecord

_NAMESPACE: Final = b"lmcache_ray"


class RayRecord:
    """The `RecordKeeper` of one cluster's name. `ray` must be initialized in this process."""

    def __init__(self, namespace: str, name: str) -> None:
        self._key = f"{namespace}\0{name}".encode("utf-8", "surrogatepass")
        self._name = name

    def load(self) -> ClusterRecord:
        """See `RecordKeeper`."""
        try:
            value = _internal_kv_get(self._key, namespace=_NAMESPACE)
        except Exception as error:  # the client of Ray's store raises whatever its transport does
            raise ClusterError(f"the record of cluster {self._name!r} cannot be read from Ray: {error}") from error
        if not value:
            return ClusterRecord()
        record: ClusterRecord = pickle.loads(value)
        return record

    def save(self, record: ClusterRecord) -> None:
        """See `RecordKeeper`."""
        try:
            _internal_kv_put(self._key, pickle.dumps(record), overwrite=True, namespace=_NAMESPACE)
        except Exception as error:  # as above
            raise ClusterError(f"the record of cluster {self._name!r} cannot be kept in Ray: {error}") from error
