"""What a client's views show: chunks that must stay what they are for as long as somebody looks at them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmcache_ray.index.plans import ChunkRef
from tests.simulation.copying import Violation
from tests.simulation.nodes import ArenaFile
from tests.simulation.values import Bytes


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """One answer: chunks, and the arenas that they are seen in."""

    lease_id: str
    refs: Sequence[ChunkRef]
    files: Mapping[int, ArenaFile]

    def check(self, contents: Bytes) -> None:
        """Raises `Violation` if one shows other bytes than its own."""
        for rank, file in self.files.items():
            for ref in self.refs:
                if not contents.are_of(file.slots.data(ref.slot), ref.key, rank):
                    raise Violation(f"a view shows other bytes in slot {ref.slot} of rank {rank}")
