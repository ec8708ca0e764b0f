"""Whether a cluster is whole, and what is wrong since when if it is not. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthProblem:
    """One thing that is wrong: a sentence, the rank it is about if it is about one, and since when if that is known.

    `since` is the time of day, in seconds since the Unix epoch.
    """

    what: str
    rank: int | None = None
    since: float | None = None


@dataclass(frozen=True, slots=True)
class ClusterHealth:
    """A cluster's health at one moment. One that cannot serve answers every lookup and retrieve with a miss."""

    can_serve: bool
    problems: tuple[HealthProblem, ...]

    @property
    def is_healthy(self) -> bool:
        """True if nothing is wrong."""
        return not self.problems
