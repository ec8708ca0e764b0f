"""The one table of accepted spellings: how a text, from whatever source, becomes a configuration value. Pure.

Files, environment and command line all deliver text, and Python callers' scalars are read as their text too (`5` as
"5", `True` as "True"), so the same text gives the same value, or the same error, everywhere:

=========  ==============================================================================================
kind       accepted
=========  ==============================================================================================
any        blanks and matching quotes around the text are dropped (as LMCache does in the environment)
null       null, ~ (any case), Python's None: the key is unset and takes its default
Truth      true, yes, on, 1, false, no, off, 0 (any case)
Whole      decimal ASCII digits with an optional sign, within bounds; `010` is ten, `1e3` and `5.0` are refused
Number     an ordinary decimal number, `1e3` included, above 0 (or 0, for some keys) and within bounds; nan and inf
           are refused
Choice     one of a few words (any case)
Text       printable text that matches the key's pattern
Directory  an absolute path, or file:// before one; `.`, `..` and double slashes are resolved by the text alone
=========  ==============================================================================================

A spelling is a callable that returns the value or raises `ValueError` with the end of a sentence that begins with the
key and its value ("is not accepted; accepted: ..."). It stands apart from the keys so that each kind exists once.
"""

import numbers
import os
import posixpath
import re
import unicodedata
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

MAX_WHOLE: Final = 2**31 - 1

_WHOLE: Final = re.compile(r"[+-]?0*[0-9]{1,19}")
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_TRUTHS: Final = {
    "true": True, "yes": True, "on": True, "1": True,
    "false": False, "no": False, "off": False, "0": False,
}  # fmt: skip
_NULLS: Final = frozenset({"null", "~"})
_NOT_IN_PATHS: Final = frozenset({"Cc", "Cs"})  # control characters, and bytes that are no UTF-8


class Spelling(Protocol[T_co]):
    """Reads one kind of value."""

    @property
    def accepted(self) -> str:
        """What is accepted, as a noun phrase for messages."""
        ...

    def __call__(self, value: object) -> T_co:
        """The value that `value` spells. Raises `ValueError` when it spells none."""
        ...


def text_of(value: object) -> str | None:
    """The text of a scalar or path without blanks and quotes around it; None for everything else."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, numbers.Real):
        return str(value)
    if not isinstance(value, str):
        return None
    text = value.strip()
    while len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1].strip()
    return text


def is_null(value: object) -> bool:
    """Whether `value` unsets its key."""
    return value is None or (text_of(value) or "").lower() in _NULLS


@dataclass(frozen=True, slots=True)
class Truth:
    """A boolean."""

    @property
    def accepted(self) -> str:
        """See `Spelling`."""
        return "true, yes, on or 1; false, no, off or 0"

    def __call__(self, value: object) -> bool:
        """See `Spelling`."""
        truth = _TRUTHS.get((text_of(value) or "").lower())
        if truth is None:
            raise _refusal(self)
        return truth


@dataclass(frozen=True, slots=True)
class Whole:
    """An integer from `minimum` to `maximum`."""

    minimum: int
    maximum: int = MAX_WHOLE

    @property
    def accepted(self) -> str:
        """See `Spelling`."""
        return f"a whole number from {self.minimum} to {self.maximum}"

    def __call__(self, value: object) -> int:
        """See `Spelling`."""
        text = text_of(value) or ""
        if not _WHOLE.fullmatch(text) or not self.minimum <= int(text) <= self.maximum:
            raise _refusal(self)
        return int(text)


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number of `unit` above 0, or with `can_be_zero` from 0 on, and at most `maximum`."""

    unit: str
    maximum: float
    can_be_zero: bool = False

    @property
    def accepted(self) -> str:
        """See `Spelling`."""
        least = "from 0 to" if self.can_be_zero else "above 0 and at most"
        return f"a number of {self.unit} {least} {self.maximum:,.0f}"

    def __call__(self, value: object) -> float:
        """See `Spelling`."""
        text = text_of(value) or ""
        number = float(text) if _NUMBER.fullmatch(text) else -1.0
        if not 0 <= number <= self.maximum or (number == 0 and not self.can_be_zero):
            raise _refusal(self)
        return abs(number)  # "-0" is 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One of `options`, each in the case in which it is kept."""

    options: tuple[str, ...]

    @property
    def accepted(self) -> str:
        """See `Spelling`."""
        return f"{', '.join(self.options)} (any case)"

    def __call__(self, value: object) -> str:
        """See `Spelling`."""
        text = text_of(value) or ""
        chosen = {option.lower(): option for option in self.options}.get(text.lower())
        if chosen is None or not text.isascii():
            raise _refusal(self)
        return chosen


@dataclass(frozen=True, slots=True)
class Text:
    """Printable, non-empty text that matches the whole of `pattern`; `accepted` says so in words."""

    accepted: str
    pattern: str = ".+"

    def __call__(self, value: object) -> str:
        """See `Spelling`."""
        text = text_of(value) or ""
        if not text.isprintable() or not re.fullmatch(self.pattern, text):
            raise _refusal(self)
        return text


@dataclass(frozen=True, slots=True)
class Directory:
    """An absolute path, kept without `file://` before it, without `.`, `..`, and without superfluous slashes.

    The file system is not asked: links are not followed, and nothing has to be there. `%` stands for itself.
    """

    @property
    def accepted(self) -> str:
        """See `Spelling`."""
        return "an absolute path, /dir or file:///dir"

    def __call__(self, value: object) -> str:
        """See `Spelling`."""
        path = (text_of(value) or "").removeprefix("file://")
        if not path.startswith("/") or any(unicodedata.category(letter) in _NOT_IN_PATHS for letter in path):
            raise _refusal(self)
        return posixpath.normpath("/" + path.lstrip("/"))  # two slashes in front would stay two


@dataclass(frozen=True, slots=True)
class Maybe(Generic[T]):
    """What `inner` accepts, or unset (None). With `empty_is_unset` the empty text is unset too."""

    inner: Spelling[T]
    empty_is_unset: bool = False

    @property
    def accepted(self) -> str:
        """See `Spelling`."""
        return f"{self.inner.accepted}, or null"

    def __call__(self, value: object) -> T | None:
        """See `Spelling`."""
        if is_null(value) or (self.empty_is_unset and text_of(value) == ""):
            return None
        try:
            return self.inner(value)
        except ValueError:
            raise _refusal(self) from None


def _refusal(spelling: Spelling[object]) -> ValueError:
    return ValueError(f"is not accepted; accepted: {spelling.accepted}")
