"""What a full check of a rank's directory finds: where the index and the files contradict each other."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from lmcache_ray.errors import DamagedChunkError
from lmcache_ray.storage.disk_names import StoredChunk
from lmcache_ray.storage.disk_scan import TreeScan


class FindingKind(Enum):
    """What is wrong with a file, or with the lack of one."""

    MISSING = "missing"
    """A chunk that should be there is not."""
    DAMAGED = "damaged"
    """A file is not what it should be, or cannot be read."""
    UNKNOWN = "unknown"
    """A chunk's file, a good one, that nobody expects."""
    TEMPORARY = "temporary"
    """A file that was left half written."""


@dataclass(frozen=True, slots=True)
class DiskFinding:
    """One contradiction. `chunk` is None for a temporary file; `path` is where the file is or should be.

    `is_expected` says whether the chunk should be there: then it is lost.
    """

    kind: FindingKind
    chunk: StoredChunk | None
    path: str
    is_expected: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.path}: {self.detail}"


def find_contradictions(
    scan: TreeScan,
    expected: Iterable[StoredChunk],
    *,
    path_of: Callable[[StoredChunk], str],
    read: Callable[[StoredChunk], object],
) -> Iterator[DiskFinding]:
    """Compare the files of a scan with the chunks that should be there; `read` proves one chunk's file to the last bit.

    `read` raises `DamagedChunkError` or OSError for a file that is not good.
    """
    missing = dict.fromkeys(expected)
    for file in scan.files:
        is_expected = file.chunk in missing
        missing.pop(file.chunk, None)
        detail = _fault_of(file.chunk, read)
        if detail is not None:
            yield DiskFinding(FindingKind.DAMAGED, file.chunk, file.path, is_expected, detail)
        elif not is_expected:
            yield DiskFinding(FindingKind.UNKNOWN, file.chunk, file.path, False, "a good chunk that nobody expects")
    for chunk in missing:
        yield DiskFinding(FindingKind.MISSING, chunk, path_of(chunk), True, "expected, and not there")
    for path in scan.temporary:
        yield DiskFinding(FindingKind.TEMPORARY, None, path, False, "left half written")


def _fault_of(chunk: StoredChunk, read: Callable[[StoredChunk], object]) -> str | None:
    try:
        read(chunk)
    except DamagedChunkError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None
