"""The configuration's keys: one static field each, with its default and the spelling that reads it.

Apart from `config.py` so that the list of keys can be read at a glance; `configs/full.yaml` is the same list for
users, and a test keeps the two equal. Fields are declared plainly, so editors and type checkers see every key.
"""

from typing import Annotated, Final, Literal, get_type_hints

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from lmcache_ray.config_spelling import Choice, Directory, Maybe, Number, Spelling, Text, Truth, Whole

CACHE_POLICIES: Final = ("LRU", "LFU", "FIFO")
REMOTE_SERDES: Final = ("naive", "zstd", "fp8")

_MAX_GIB: Final = 2.0**20
_MAX_SECONDS: Final = 1e9  # about 30 years; the waiting calls of every platform take it
_NAME: Final = Text(
    "1 to 63 letters, digits, '.', '_' or '-', a letter or digit first", "[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
)
_URL: Final = Text("a URL, scheme://...", r"[A-Za-z][A-Za-z0-9+.-]*://.*")

Flag = Annotated[bool, BeforeValidator(Truth())]
Count = Annotated[int, BeforeValidator(Whole(0))]
PositiveCount = Annotated[int, BeforeValidator(Whole(1))]
OptionalPositiveCount = Annotated[int | None, BeforeValidator(Maybe(Whole(1)))]
Gibibytes = Annotated[float, BeforeValidator(Number("GiB", _MAX_GIB))]
GibibytesOrZero = Annotated[float, BeforeValidator(Number("GiB", _MAX_GIB, can_be_zero=True))]
OptionalGibibytes = Annotated[float | None, BeforeValidator(Maybe(Number("GiB", _MAX_GIB)))]
Seconds = Annotated[float, BeforeValidator(Number("seconds", _MAX_SECONDS))]
Policy = Annotated[Literal["LRU", "LFU", "FIFO"], BeforeValidator(Choice(CACHE_POLICIES))]
OptionalText = Annotated[str | None, BeforeValidator(Maybe(Text("printable text"), empty_is_unset=True))]
AbsolutePath = Annotated[str, BeforeValidator(Text("an absolute path", "/.*"))]
OptionalDirectory = Annotated[str | None, BeforeValidator(Maybe(Directory(), empty_is_unset=True))]
OptionalUrl = Annotated[str | None, BeforeValidator(Maybe(_URL, empty_is_unset=True))]
Serde = Annotated[Literal["naive", "zstd", "fp8"], BeforeValidator(Choice(REMOTE_SERDES))]
Name = Annotated[str, BeforeValidator(_NAME)]


@dataclass(kw_only=True)
class ConfigValues:
    """Every key with its value, each checked by itself when built. Sizes are GiB (2^30 bytes) per rank.

    Which keys need each other, `LMCacheEngineConfig.validate` says.
    """

    chunk_size: PositiveCount = 256
    """Tokens of one chunk, the unit of caching. Wins over the metadata's."""
    max_local_cpu_size: Gibibytes = 5.0
    """Size of a rank's arena in GiB, unless `capacity_chunks` says it in chunks."""
    capacity_chunks: OptionalPositiveCount = None
    """Chunks that a rank's arena holds; overrides `max_local_cpu_size`."""
    arena_dir: AbsolutePath = "/dev/shm"
    """Directory of a cluster's arena files: a memory file system on every node."""
    save_unfull_chunk: Flag = False
    """Whether the partial chunk at a prompt's end is cached too."""
    cache_policy: Policy = "LRU"
    """Which chunks are evicted first."""
    max_local_disk_size: GibibytesOrZero = 0.0
    """Limit in GiB of a rank's files on disk. Must be above 0 with `local_disk`; means nothing without it."""
    local_disk: OptionalDirectory = None
    """Directory of the disk tier on every node; unset means that there is none."""
    remote_url: OptionalUrl = None
    """Where the remote tier is; unset means that there is none. Which schemes are known, its opener says."""
    remote_serde: Serde = "naive"
    """How chunks are written to the remote: as they are, compressed, or as 8-bit floats, which loses precision."""
    remote_prefix: Name = "lmcache_ray"
    """What the names of all objects in the remote begin with."""
    blocking_timeout_secs: Seconds = 10.0
    """Seconds after which one call to the remote is given up."""
    max_remote_size: OptionalGibibytes = None
    """Limit in GiB of everything below `remote_prefix`, of all ranks together; unset means no limit of our own."""
    local_cpu: Flag = True
    """Whether chunks are kept in memory. Without it memory only stages what is on disk or in the remote."""
    block_size: PositiveCount = 16
    """Tokens of one block of the paged KV that this project allocates itself."""
    model_revision: OptionalText = None
    """Revision of the model's weights; part of every chunk key."""
    lmcache_instance_id: OptionalText = None
    """Name of this instance in an engine's repr and the standalone's report; never part of a key."""
    min_retrieve_tokens: Count = 0
    """Shorter prefix hits are not retrieved."""
    lookup_timeout_ms: PositiveCount = 3000
    """Milliseconds after which a lookup answers 0."""
    lease_timeout_s: Seconds = 300.0
    """Seconds after which a pin that nobody released or renewed ends. LMCache's name: `pin_timeout_sec`."""
    call_timeout_s: Seconds = 30.0
    """Seconds by which every store, retrieve or clear returns."""
    restart_window_s: Seconds = 60.0
    """Seconds since the last sign of life of another cluster's files after which a sweep removes them."""
    cluster_name: Name = "default"
    """Name of the cache cluster."""
    cluster_namespace: Name = "lmcache_ray"
    """Ray namespace of the cache cluster's actors."""

    @property
    def pin_timeout_sec(self) -> float:
        """LMCache's name of `lease_timeout_s`."""
        return self.lease_timeout_s


ALIASES: Final = {"pin_timeout_sec": "lease_timeout_s"}
"""Second names of keys."""


def spellings() -> dict[str, Spelling[object]]:
    """The spelling of every key, in the order of the fields."""
    hints = get_type_hints(ConfigValues, include_extras=True)
    return {key: _spelling_of(hint) for key, hint in hints.items()}


def _spelling_of(hint: object) -> Spelling[object]:
    marks: tuple[object, ...] = getattr(hint, "__metadata__", ())
    (spelling,) = (mark.func for mark in marks if isinstance(mark, BeforeValidator))
    return spelling  # type: ignore[return-value]  # pydantic types it as any validator function


SPELLINGS: Final = spellings()
