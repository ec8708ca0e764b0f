"""Reading typed fields out of JSON text that anybody may have written. Pure.

Apart from the format, since this is what keeps a header, however odd, from being anything but a value of the expected
type or a `DamagedChunkError`.
"""

import json
from collections.abc import Mapping, Sequence

from lmcache_ray.errors import DamagedChunkError, shown


class HeaderFields:
    """One JSON object. Each method gives a field of one type, or raises `DamagedChunkError` naming it."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    @classmethod
    def parse(cls, text: bytes) -> "HeaderFields":
        """:raises DamagedChunkError: the text is no JSON object."""
        try:
            found = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise DamagedChunkError(f"the header is no JSON: {error}") from error
        return cls._of(found, "the header")

    def integer(self, name: str) -> int:
        """At least 0."""
        return _natural(self._field(name), name)

    def integers(self, name: str) -> tuple[int, ...]:
        """Each at least 0."""
        return tuple(_natural(item, name) for item in self._list(name))

    def text(self, name: str) -> str:
        """Any text."""
        found = self._field(name)
        if not isinstance(found, str):
            raise DamagedChunkError(f"header field {name} must be text; got {shown(found)}")
        return found

    def hexadecimal(self, name: str) -> bytes:
        """Bytes written as hexadecimal digits."""
        found = self.text(name)
        try:
            return bytes.fromhex(found)
        except ValueError as error:
            raise DamagedChunkError(f"header field {name} must be hexadecimal; got {shown(found)}") from error

    def flag(self, name: str) -> bool:
        """True or false."""
        found = self._field(name)
        if not isinstance(found, bool):
            raise DamagedChunkError(f"header field {name} must be true or false; got {shown(found)}")
        return found

    def objects(self, name: str) -> list["HeaderFields"]:
        """A list of JSON objects."""
        return [self._of(item, f"each of header field {name}") for item in self._list(name)]

    @classmethod
    def _of(cls, found: object, what: str) -> "HeaderFields":
        if not isinstance(found, dict):
            raise DamagedChunkError(f"{what} must be a JSON object; got {shown(found)}")
        return cls(found)

    def _field(self, name: str) -> object:
        try:
            return self._fields[name]
        except KeyError as error:
            raise DamagedChunkError(f"the header lacks {name}") from error

    def _list(self, name: str) -> Sequence[object]:
        found = self._field(name)
        if not isinstance(found, list):
            raise DamagedChunkError(f"header field {name} must be a list; got {shown(found)}")
        return found


def _natural(found: object, name: str) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise DamagedChunkError(f"header field {name} must be an integer from 0; got {shown(found)}")
    return found
