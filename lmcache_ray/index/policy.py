"""Which chunk goes first when room is needed: the protocol of eviction policies, and their names.

A policy sees slot numbers only: no keys, bytes, time or leases. Who may be evicted is the index's affair; a policy says
in which order to ask.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from lmcache_ray.errors import ConfigError
from lmcache_ray.index.fifo import FIFOPolicy
from lmcache_ray.index.lfu import LFUPolicy
from lmcache_ray.index.lru import LRUPolicy


class EvictionPolicy(Protocol):
    """An order over the admitted slots.

    Callers pass the slots of one prompt *tail first*, so that equals among them leave tail first: a prefix without its
    tail is of use, a tail without its prefix is not.
    """

    def admit(self, slots: Iterable[int]) -> None:
        """Take in slots, none of which is admitted now, one after the other."""
        ...

    def touch(self, slots: Iterable[int]) -> None:
        """Note a use of admitted slots, one after the other."""
        ...

    def remove(self, slots: Iterable[int]) -> None:
        """Forget slots; KeyError at the first that is not admitted, with those before it possibly forgotten."""
        ...

    def candidates(self) -> Iterator[int]:
        """Every admitted slot once, in the order in which they should go.

        The caller may stop early and may pass over slots; it changes the policy only when it has stopped iterating.
        """
        ...


POLICIES: Final[Mapping[str, Callable[[], EvictionPolicy]]] = {
    "LRU": LRUPolicy,
    "LFU": LFUPolicy,
    "FIFO": FIFOPolicy,
}


def make_policy(name: str) -> EvictionPolicy:
    """A new, empty policy by its name, in any case of letters; ConfigError if there is none of that name."""
    policy_class = POLICIES.get(name.upper())
    if policy_class is None:
        raise ConfigError(f"unknown cache policy {name!r}; known are {', '.join(POLICIES)}")
    return policy_class()
