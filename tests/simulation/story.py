"""The story of a world: a line for everything that happens, if somebody wants to hear it."""

from collections.abc import Callable


class Story:
    """Lines of (time, actor, what). Nothing is kept, or even put into words, unless `is_told`."""

    def __init__(self, clock: Callable[[], float], *, is_told: bool) -> None:
        self._clock = clock
        self.is_told = is_told
        self.lines: list[str] = []

    def tell(self, actor: object, what: str, *values: object) -> None:
        """``what % values`` happened to `actor`, or was done by it."""
        if self.is_told:
            self.lines.append(f"{self._clock():9.3f}  {actor!s:<14} {what % values if values else what}")
