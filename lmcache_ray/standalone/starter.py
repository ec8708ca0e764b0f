"""`LMCacheStandaloneStarter`: builds, runs and ends a whole world of ranks in this process.

::

    starter = LMCacheStandaloneStarter(config, metadata, parse_kvcache_shape_spec("(2,2,256,4,16):float16:2"))
    engine = starter.start()
    engine.store(tokens, slot_mapping=slots)         # on every rank, out of starter.kv_caches
    starter.stop()
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch

from lmcache_ray.build import resolve, world_parts
from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.engine import LMCacheEngine
from lmcache_ray.errors import ClosedError, ConfigError, ProtocolError
from lmcache_ray.kv_pattern import allocate_kv_caches, fill_fixed_pattern
from lmcache_ray.layout import WorldLayout
from lmcache_ray.metadata import LMCacheMetadata
from lmcache_ray.shape_spec import LayerGroupSpec
from lmcache_ray.standalone.report import describe_world
from lmcache_ray.standalone.sizes import WorldSizes, check_kv_fits, world_sizes
from lmcache_ray.standalone.stop_signals import on_stop_signal
from lmcache_ray.world_engine import WorldEngine

_POLL_S: Final = 0.05


class _State(Enum):
    NEW = "not started"
    RUNNING = "running"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class _World:
    engine: WorldEngine
    kv_caches: tuple[tuple[torch.Tensor, ...], ...]


class LMCacheStandaloneStarter:
    """Runs all ranks of `metadata`'s world in this process, over paged KV that it allocates and fills itself.

    `layer_groups` describe one rank; their num_blocks, in blocks of ``config.block_size`` tokens, size its paged KV.
    Configuration and metadata are copied: later changes to the caller's, or to `config`, change nothing here.
    A starter starts once; after a failed start it may be tried again, after `stop` it is done. Thread-safe.
    """

    def __init__(
        self,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        layer_groups: Sequence[LayerGroupSpec],
        device: str = "cpu",
    ) -> None:
        """Checks everything, takes no memory.

        Raises `ConfigError` for a `device` that KV cannot be copied from, `ShapeSpecError` for groups that cannot be
        meant, `CapacityError` if one chunk is larger than a rank's arena.
        """
        _check_device(device)
        self._config = config.copy()
        self._metadata, self._layout = resolve(self._config, metadata, layer_groups)
        self._sizes = world_sizes(self._config, self._layout, layer_groups)
        self._device = device
        self._lock = threading.Lock()  # one start or stop at a time
        self._state = _State.NEW
        self._world: _World | None = None

    @property
    def config(self) -> LMCacheEngineConfig:
        """A copy of the configuration that this world has."""
        return self._config.copy()

    @property
    def metadata(self) -> LMCacheMetadata:
        """The metadata of rank `worker_id`, with the effective chunk size and the layer groups."""
        return self._metadata

    @property
    def layout(self) -> WorldLayout:
        """Where the bytes of a chunk lie on every rank."""
        return self._layout

    @property
    def sizes(self) -> WorldSizes:
        """What the world takes in memory, running or not."""
        return self._sizes

    @property
    def device(self) -> str:
        """Where the paged KV is."""
        return self._device

    @property
    def is_running(self) -> bool:
        """True between `start` and `stop`."""
        return self._state is _State.RUNNING

    @property
    def lmcache_engine(self) -> LMCacheEngine:
        """Rank `worker_id`'s engine, which acts for the whole world; see `WorldEngine`. Only while running."""
        return self._running().engine

    @property
    def engines(self) -> tuple[LMCacheEngine, ...]:
        """Every rank's own engine. Only while running."""
        return self._running().engine.engines

    @property
    def kv_caches(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """``kv_caches[rank][layer]``: ``[kv_size, num_blocks, block_size, heads, head_size]``. Only while running."""
        return self._running().kv_caches

    @property
    def api_server(self) -> None:
        """None: there is no server."""
        return None

    def describe(self) -> str:
        """What runs here, in lines for a user: ranks, sizes, configuration with origins."""
        return describe_world(self._config, self._metadata, self._layout, self._sizes)

    def start(self) -> LMCacheEngine:
        """Reserve the arenas, fill the paged KV, and return the engine that acts for all ranks.

        Raises `CapacityError` or `ArenaError` if this machine cannot hold the world: nothing is left of it then.
        Raises `ProtocolError` if it runs already and `ClosedError` after `stop`.
        """
        with self._lock:
            if self._state is _State.RUNNING:
                raise ProtocolError("the standalone world is started already; its engine is lmcache_engine")
            if self._state is _State.STOPPED:
                raise ClosedError("the standalone world was stopped; make a new starter")
            self._world = world = self._build()
            self._state = _State.RUNNING
            return world.engine

    def stop(self) -> None:
        """Close every rank and give all memory back. Idempotent; from any thread; ends `run_forever`.

        Memory that callers still refer to (an engine, a KV tensor) is freed with their last reference.
        """
        with self._lock:
            self._state = _State.STOPPED
            world, self._world = self._world, None
            if world is not None:
                world.engine.close()

    async def run_forever(self) -> None:
        """Wait for `stop`, SIGINT or SIGTERM, then stop. The signals count only if this is the main thread.

        Raises `ProtocolError` before `start`. Returns at once after `stop`.
        """
        if self._state is _State.NEW:
            raise _not_started()
        is_signalled = False

        def note_signal() -> None:
            nonlocal is_signalled
            is_signalled = True

        with on_stop_signal(note_signal):
            try:
                # Polled: a signal handler may not take the locks by which it could wake this loop without fail.
                while self.is_running and not is_signalled:
                    await asyncio.sleep(_POLL_S)
            finally:
                self.stop()

    def _build(self) -> _World:
        config, metadata = self._config, self._metadata
        parts = world_parts(config, metadata)
        try:
            check_kv_fits(self._sizes)
            kv_caches = tuple(tuple(caches) for caches in self._make_kv_caches())
            return _World(WorldEngine(parts, metadata.worker_id, kv_caches), kv_caches)
        except BaseException:  # an interrupt must not leave the arenas either
            for part in parts:
                part.on_close()
            raise

    def _make_kv_caches(self) -> list[list[torch.Tensor]]:
        """Every rank's paged KV. The pattern knows no rank, so it is made once and copied."""
        worlds = [
            allocate_kv_caches(layout, num_blocks=self._sizes.num_blocks, block_size=self._config.block_size)
            for layout in self._layout.ranks
        ]
        fill_fixed_pattern(self._layout.ranks[0], worlds[0])
        for caches in worlds[1:]:
            for cache, filled in zip(caches, worlds[0], strict=True):
                cache.copy_(filled)
        return worlds

    def _running(self) -> _World:
        world = self._world
        if world is not None:
            return world
        if self._state is _State.STOPPED:
            raise ClosedError("the standalone world was stopped")
        raise _not_started()


def _not_started() -> ProtocolError:
    return ProtocolError("the standalone world is not started: call start() first")


def _check_device(device: str) -> None:
    """Refuses all but the CPU, and says whether torch or this project's connector is what is missing."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device = {device!r} is not a device; accepted: cpu") from None
    if parsed.type == "cpu":
        return
    try:
        torch.empty(1, device=parsed)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device = {device!r}: torch cannot allocate there ({reason}); accepted: cpu") from error
    raise ConfigError(
        f"device = {device!r}: torch can allocate there, but KV is copied from and to CPU memory only; accepted: cpu"
    )
