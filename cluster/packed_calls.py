"""Arguments and answers of actor calls as one `bytes` each. Pure.

Ray prepares every argument by itself, and any but `bytes` by a pickler that is partly Python: two small arguments cost
a third of a whole no-op call. Pickled here, in C and together, they cost a tenth.
"""

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final

_PROTOCOL: Final = 5  # of every Python that runs this

Calls = Mapping[str, Callable[..., object]]


def pack(value: object) -> bytes:
    """Anything picklable, for `unpack` on the other side."""
    return pickle.dumps(value, _PROTOCOL)


def unpack(packed: bytes) -> Any:
    """The value again, of the type that the sender says."""
    return pickle.loads(packed)


def pack_call(name: str, *arguments: object) -> bytes:
    """The call of `name`, for `run_call` on the other side."""
    return pack((name, arguments))


def run_call(calls: Calls, packed: bytes) -> bytes:
    """Run a packed call, which must be one of `calls`; its packed answer. What it raises is raised."""
    name, arguments = unpack(packed)
    return pack(calls[name](*arguments))
