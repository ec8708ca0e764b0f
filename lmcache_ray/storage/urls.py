"""What is read from a remote's URL before anything else knows what to do with it. Pure."""

import re
from typing import Final

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PASSWORD: Final = re.compile(r"(?<=://)([^/@?#]*):([^/?#]*)@")
_SECRET_PARAMETER: Final = re.compile(r"(?<=[?&])([^=&]*(?:pass|secret|token|key)[^=&]*)=([^&#]*)", re.IGNORECASE)


def scheme_of(url: str) -> str | None:
    """The part before ``://``, in lower case; None where there is none."""
    found = _SCHEME.match(url)
    return found[1].lower() if found else None


def masked(url: str) -> str:
    """The URL as messages may show it: passwords, and parameters that look like secrets, as ``***``."""
    without_password = _PASSWORD.sub(r"\1:***@", url)
    return _SECRET_PARAMETER.sub(r"\1=***", without_password)
