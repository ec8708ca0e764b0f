"""Whether a tier below memory can be used, why not, and when to try again. Pure.

A tier that fails is left alone for a while, which doubles with each failure in a row: it costs nothing meanwhile, and
comes back by itself.
"""

from typing import Final

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0


class TierHealth:
    """One tier's health. Times are in seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._problem: str | None = None
        self._since = 0.0
        self._pause_s = 0.0
        self._retry_at = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the last use went well."""
        return self._problem is None

    def may_try(self, now: float) -> bool:
        """Whether it is good, or time to see if it is again."""
        return self.is_good or now >= self._retry_at

    def failed(self, problem: str, now: float) -> None:
        """A use failed, for a reason that lies in the tier itself.

        One that fails before it is time to try again is no further try: the pause stays as it is.
        """
        is_another_try = self.may_try(now)
        if self._problem is None:
            self._since = now
        self._problem = problem
        if not is_another_try:
            return
        self._pause_s = min(_LONGEST_PAUSE_S, self._pause_s * 2 or _FIRST_PAUSE_S)
        self._retry_at = now + self._pause_s

    def try_soon(self) -> None:
        """There is reason to believe that it is in order again: no pause before the next try."""
        self._retry_at = 0.0

    def went_well(self) -> None:
        """A use went well."""
        self._problem = None
        self._pause_s = 0.0

    def problem(self, now: float) -> str | None:
        """Why it is out of order, and for how long; None while it is good."""
        return None if self._problem is None else f"{self._problem} (for {now - self._since:.0f} s)"
