"""The small object that makes a chunk in a remote store count: which writing of it every rank has put there. Pure.

One line of JSON, at most 64 KiB, whose last field is a checksum (XXH3-128) of the line without it. It is read by
writing it again: text that this page would not have written, down to the blanks, is damaged.
"""

import json
from dataclasses import dataclass
from typing import Final

import xxhash
from typing_extensions import Buffer

from lmcache_ray.errors import DamagedChunkError
from lmcache_ray.storage.header_fields import HeaderFields
from lmcache_ray.storage.remote_names import Writing

VERSION: Final = 1
MAX_NBYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Manifest:
    """One committed chunk. `holders` are the ranks with a shard, `nbytes` those of all shards before the serde."""

    key: bytes
    writing: Writing
    fingerprint: bytes
    serde: str
    holders: tuple[int, ...]
    nbytes: int


def pack_manifest(manifest: Manifest) -> bytes:
    """The object's bytes."""
    fields = {
        "version": VERSION,
        "key": manifest.key.hex(),
        "origin": manifest.writing.origin,
        "generation": f"{manifest.writing.generation:016x}",
        "fingerprint": manifest.fingerprint.hex(),
        "serde": manifest.serde,
        "holders": manifest.holders,
        "nbytes": manifest.nbytes,
    }
    return _json({**fields, "checksum": xxhash.xxh3_128_hexdigest(_json(fields))})


def parse_manifest(stored: Buffer) -> Manifest:
    """What a manifest says. Raises `DamagedChunkError` for anything that `pack_manifest` does not write."""
    nbytes = memoryview(stored).nbytes
    if nbytes > MAX_NBYTES:
        raise DamagedChunkError(f"a manifest of {nbytes} bytes; at most {MAX_NBYTES} are read")
    text = bytes(stored)
    fields = HeaderFields.parse(text)
    version = fields.integer("version")
    if version != VERSION:
        raise DamagedChunkError(f"a manifest of version {version}; this program reads version {VERSION}")
    generation = int.from_bytes(fields.hexadecimal("generation"), "big")
    manifest = Manifest(
        key=fields.hexadecimal("key"),
        writing=Writing(fields.text("origin"), generation),
        fingerprint=fields.hexadecimal("fingerprint"),
        serde=fields.text("serde"),
        holders=fields.integers("holders"),
        nbytes=fields.integer("nbytes"),
    )
    if pack_manifest(manifest) != text:
        raise DamagedChunkError("the manifest is damaged (wrong checksum)")
    return manifest


def _json(fields: dict[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
