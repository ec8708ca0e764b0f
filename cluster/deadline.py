"""One deadline for a call that waits several times."""

import time
from typing import Final

REPORT_S: Final = 1.0
"""What a call may take beyond its deadline to report what it did: leases and slots depend on it."""


class Deadline:
    """`timeout_s` seconds from now."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def to_report_s(self) -> float:
        """Seconds for the report that ends the call, granted even when the deadline has passed."""
        return max(REPORT_S, self._end - time.monotonic())
