"""What a broadcast is called, and what a rank that asks for it is told. Pure.

Apart from the log because these values cross process borders: a receiver in another process names a tag and is given
one of the results.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Epoch: TypeAlias = str | int


@dataclass(frozen=True, slots=True)
class NamedTag:
    """A broadcast from rank `src` under a name that every rank knows and that is used for one attempt only."""

    epoch: Epoch
    src: int
    name: str


@dataclass(frozen=True, slots=True)
class SessionTag:
    """The `sequence`-th untagged broadcast (from 0) of a session, from rank `src`."""

    epoch: Epoch
    src: int
    session: int
    sequence: int


Tag: TypeAlias = NamedTag | SessionTag


class Call(NamedTuple):
    """An untagged call of a rank, as that counts them itself: `number` from 0 on, in its process `process`."""

    process: int
    number: int


@dataclass(frozen=True, slots=True)
class Pending:
    """The source has neither published nor failed: ask again."""


@dataclass(frozen=True, slots=True)
class Payload:
    """What the source published."""

    value: object


@dataclass(frozen=True, slots=True)
class Aborted:
    """It will never come; final."""

    reason: str


TakeResult: TypeAlias = Pending | Payload | Aborted
