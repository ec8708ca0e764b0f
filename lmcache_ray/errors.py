"""Every exception this project raises on purpose, in one tree.

::

    LMCacheRayError
    ├── ConfigError            (ValueError)    a configuration key or value, from any source
    ├── MetadataError          (ValueError)    an impossible LMCacheMetadata
    ├── ShapeSpecError         (ValueError)    a KV shape or shape-spec text that cannot be meant
    ├── LayoutError            (ValueError)    layouts, or paged KV tensors, that do not fit together
    ├── InvalidRequestError    (ValueError)    tokens, masks, slot mappings, keys, request_configs of one call
    ├── WorkloadError          (ValueError)    a trace that cannot be read, or a workload that cannot be made
    ├── CapacityError          (MemoryError)   an arena that does not fit, or a chunk that does not fit an arena
    ├── ArenaError             (OSError)       an arena file that cannot be made, mapped or trusted
    │   └── ArenaLockedError                   another living process owns it
    ├── StorageError           (OSError)       a tier below memory that cannot be used
    │   ├── DirectoryTakenError                another living cluster keeps its chunks there
    │   └── StorageUnavailableError            a remote that did not answer, or is not asked at present
    ├── DamagedChunkError      (ValueError)    stored bytes that are not the chunk they should be; a miss to callers
    ├── ProtocolError          (RuntimeError)  a step that the protocol forbids (stale generation, unknown plan)
    │   └── IntegrityError                     a self-check found two facts that contradict each other
    ├── ClosedError            (RuntimeError)  a call on a closed engine, arena or cluster
    ├── DeadlineError          (TimeoutError)  a wait that reached its deadline
    ├── BroadcastError         (RuntimeError)  a broadcast that cannot be completed any more
    │   └── BroadcastAborted                   its source failed or died, or its session was broken
    └── ClusterError           (RuntimeError)  the Ray cluster cannot do what was asked
        ├── ClusterNotFoundError (LookupError)
        ├── ClusterExistsError
        ├── RankUnavailableError               a rank's process does not answer
        │   └── RankDiedError                      it is proven to have ended
        └── ForeignPackageError  (ImportError) a node imports a `cluster` or `lmcache_ray` that is not ours

A cache miss is a value, never an exception. Every class takes one message, so that each survives pickling.
"""

import reprlib


class LMCacheRayError(Exception):
    """Root of the tree: catch this to catch everything the project raises on purpose."""


class ConfigError(LMCacheRayError, ValueError):
    """A configuration key or value is wrong; the message names key, value, source and what is accepted."""


class MetadataError(LMCacheRayError, ValueError):
    """A metadata field has an impossible value; the message names the field."""


class ShapeSpecError(LMCacheRayError, ValueError):
    """A shape or shape-spec text is malformed; the message names the group's number and text."""


class LayoutError(LMCacheRayError, ValueError):
    """Layouts (of ranks, of paged KV tensors, of shards) do not fit together."""


class InvalidRequestError(LMCacheRayError, ValueError):
    """An argument of one store, retrieve, lookup, put, get or clear call is wrong."""


class WorkloadError(LMCacheRayError, ValueError):
    """A trace cannot be read (the message names source and line), or a workload cannot be made as asked."""


class CapacityError(LMCacheRayError, MemoryError):
    """Something does not fit; the message names both sizes."""


class ArenaError(LMCacheRayError, OSError):
    """An arena file cannot be created, mapped or trusted."""


class ArenaLockedError(ArenaError):
    """The arena file is owned by another living process."""


class StorageError(LMCacheRayError, OSError):
    """A storage tier cannot be used; the message names the place and why."""


class DirectoryTakenError(StorageError):
    """The directory belongs to another living cluster; the message names that cluster and the process that made it."""


class StorageUnavailableError(StorageError):
    """A remote store did not answer, or is not asked at present because it did not answer before."""


class DamagedChunkError(LMCacheRayError, ValueError):
    """A stored chunk's bytes are not what they should be; the message says what is wrong.

    Internal to storage: readers turn it into a miss that is counted, no caller of a store, lookup or retrieve sees it.
    """


class ProtocolError(LMCacheRayError, RuntimeError):
    """A step that the slot, plan or lease protocol forbids."""


class IntegrityError(ProtocolError):
    """A self-check found a contradiction; the message lists all of them."""


class ClosedError(LMCacheRayError, RuntimeError):
    """The object was closed before the call."""


class DeadlineError(LMCacheRayError, TimeoutError):
    """A wait reached its deadline; the message names what was waited for and for how long."""


class BroadcastError(LMCacheRayError, RuntimeError):
    """A broadcast cannot be completed."""


class BroadcastAborted(BroadcastError):
    """The source of a broadcast failed or died, or the session that orders it was broken."""


class ClusterError(LMCacheRayError, RuntimeError):
    """The Ray cluster cannot do what was asked."""


class ClusterNotFoundError(ClusterError, LookupError):
    """No cache cluster of that name lives in that namespace."""


class ClusterExistsError(ClusterError):
    """A cache cluster of that name already lives in that namespace."""


class UnknownClientError(ClusterError):
    """The coordinator does not know the client, as after its own restart: it has to register (again)."""


class CoordinatorUnavailableError(ClusterError):
    """The coordinator's process has ended, and Ray starts another: the call may or may not have been carried out."""


class StaleEpochError(ClusterError):
    """The call comes from an earlier life of the coordinator, or is meant for one."""


class RankUnavailableError(ClusterError):
    """A rank's process does not answer; the message names the rank. It may still be at work."""


class RankDiedError(RankUnavailableError):
    """A rank's process has ended: it does nothing any more."""


class ForeignPackageError(ClusterError, ImportError):
    """A node would import a `cluster` or `lmcache_ray` package that is not this project's."""


def shown(value: object) -> str:
    """A refused value as error messages show it: what it is, shortened, and its type."""
    return f"{reprlib.repr(value)} ({type(value).__name__})"
