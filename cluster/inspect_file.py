"""`python -m cluster inspect FILE`: a chunk's file as a person or a program reads it. Needs no cluster, and no Ray.

What the file says is anybody's text: it is shown so that a terminal takes it for nothing but text.
"""

import argparse
import reprlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Final

from lmcache_ray.storage.chunk_format import ChunkHead, ChunkHeader
from lmcache_ray.storage.inspection import FileState, Inspection, inspect_file

from .outcome import Outcome

_EXIT_STATUS: Final = {FileState.SOUND: 0, FileState.DAMAGED: 1, FileState.UNREADABLE: 2}
_MAX_LETTERS: Final = 80  # of a text in a header
_LABEL_WIDTH: Final = 13


def inspect(arguments: argparse.Namespace) -> Outcome:
    """Say what a chunk's file says of itself and whether it is whole; exit status 1 if not, 2 if it cannot be read."""
    found = inspect_file(arguments.file)
    if not arguments.json and found.state is FileState.UNREADABLE:
        print(f"error: {_plain(found.path)} {found.problem}", file=sys.stderr)
    elif not arguments.json:
        print("\n".join(_lines(found)))
    return Outcome(_as_json(found), _EXIT_STATUS[found.state])


def _lines(found: Inspection) -> Iterator[str]:
    yield f"{_plain(found.path)}: {found.state.value}: {found.problem or 'all lengths and checksums hold'}"
    yield _line("file", f"{found.file_nbytes:,} bytes")
    if found.head is not None:
        yield from _head_lines(found.head)


def _head_lines(head: ChunkHead) -> Iterator[str]:
    header = head.header
    precision = "loses precision" if header.is_lossy else "keeps every bit"
    yield _line("head", f"{head.head_nbytes:,} bytes")
    yield _line("data", f"{head.data_nbytes:,} bytes, XXH3-128 {head.data_digest.hex()}")
    yield _line("key", header.key.hex())
    yield _line("generation", _generation(header))
    yield _line("tokens", f"{header.num_tokens} of {header.chunk_size}")
    yield _line("rank", f"{header.rank} of {header.world_size}, {_field(header.placement)}")
    yield _line("fingerprint", header.fingerprint.hex())
    for number, group in enumerate(header.groups, start=1):
        yield _line(f"group {number}", f"{list(group.shape)} of {_field(group.dtype)} from byte {group.offset:,}")
    yield _line("serde", f"{_field(header.serde)} ({precision}), of {header.raw_nbytes:,} bytes")
    yield _line("origin", _field(header.origin) if header.origin else "none: written to a disk")


def _line(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}}{text}"


def _plain(text: str) -> str:
    """`text` without anything that a terminal would obey, or that could not be written to it."""
    return text if text and text.isprintable() else repr(text)


def _field(text: str) -> str:
    """A header's text as `_plain` gives it, and not too much of it."""
    return _plain(text) if len(text) <= _MAX_LETTERS else reprlib.repr(text)


def _as_json(found: Inspection) -> dict[str, object]:
    """All keys are there in each case, None where nothing is known. `header` is as the file has it."""
    head = found.head
    return {
        "path": found.path,
        "state": found.state.value,
        "problem": found.problem or None,
        "file_nbytes": found.file_nbytes,
        "head_nbytes": None if head is None else head.head_nbytes,
        "data_nbytes": None if head is None else head.data_nbytes,
        "data_checksum": None if head is None else head.data_digest.hex(),
        "header": None if head is None else _header_fields(head.header),
    }


def _header_fields(header: ChunkHeader) -> dict[str, object]:
    digests = {"key": header.key.hex(), "fingerprint": header.fingerprint.hex()}
    return asdict(header) | digests | {"generation": _generation(header)}


def _generation(header: ChunkHeader) -> str:
    """As in the header and in the names of files."""
    return f"{header.generation:016x}"
