"""From where a prompt's cached part would come. Pure."""

from dataclasses import dataclass

from lmcache_ray.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class TierHits:
    """Tokens of a prompt's leading cached run, each chunk's counted for the fastest tier that holds it.

    A statement about the moment of the lookup: chunks move between tiers. Raises `IntegrityError` if the tiers' counts
    are not those of the whole.
    """

    num_tokens: int
    cpu: int
    disk: int
    remote: int

    def __post_init__(self) -> None:
        counts = (self.cpu, self.disk, self.remote)
        if min(counts) < 0 or sum(counts) != self.num_tokens:
            raise IntegrityError(f"a hit of {self.num_tokens} tokens cannot come from tiers with {counts} of them")
