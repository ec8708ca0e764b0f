"""From where a prompt's cached part would come. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_ray.errors import IntegrityError
from lmcache_ray.prompt import Prompt
from lmcache_ray.tiers.spec import Tier


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


def prompt_hits(prompt: Prompt, tiers: Sequence[Tier]) -> TierHits:
    """The hits of a prompt whose leading chunks lie in `tiers`."""
    tokens = dict.fromkeys(Tier, 0)
    for tier, (begin, end) in zip(tiers, prompt.spans, strict=False):
        tokens[tier] += end - begin
    return TierHits(sum(tokens.values()), tokens[Tier.CPU], tokens[Tier.DISK], tokens[Tier.REMOTE])
