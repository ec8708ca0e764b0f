"""What may go wrong in a simulated world, how often in this one, and what did.

Every seed draws its own weights: most kinds are rare or absent in one world, so that the others get room to do harm.
"""

from collections import Counter
from enum import Enum
from random import Random
from typing import Final


class Fault(Enum):
    """One kind of mishap."""

    MESSAGE_LOST = "a message is lost"
    ANSWER_LOST = "an answer is lost"
    MESSAGE_LATE = "a message is late, and others overtake it"
    MESSAGE_TWICE = "a message comes twice"
    COPY_SLOW = "copying into or out of a slot takes long"
    RANK_STOPPED = "a rank stands still, beyond every deadline, and goes on"
    RANK_KILLED = "a rank dies and comes back to its arena"
    RANKS_KILLED = "all ranks die at once"
    NODE_GONE = "a rank's node is gone with its arena and disk, and the rank comes back elsewhere"
    COORDINATOR_KILLED = "the coordinator dies"
    COORDINATOR_KILLED_RECOVERING = "the coordinator dies while it recovers"
    RANK_KILLED_RECOVERING = "a rank dies while the coordinator recovers"
    COORDINATOR_STOPPED = "the coordinator stands still and goes on"
    CLIENT_KILLED = "a client dies, and its node can tell"
    CLIENT_GONE = "a client dies, and nobody can tell"
    CLIENT_STOPPED = "a client stands still, perhaps in the middle of a direct write, and goes on"
    RECORD_UNREACHABLE = "the coordinator's record cannot be saved"
    DISK_FAILS = "a disk refuses"
    DISK_SLOW = "a disk is slow"
    DISK_TORN = "a file is cut short"
    DISK_DAMAGED = "a byte on disk changes"
    REMOTE_DOWN = "the remote store is down"
    REMOTE_SLOW = "the remote store is slow"
    CLOCK_JUMP = "the clock jumps forward"


_SLOWEST_S: Final = 12.0
_RATES: Final = (0.002, 0.01, 0.05)
_OFTEN: Final = (0.01, 0.05, 0.2)
"""For what does harm only if something else happens at the same time."""
_ALWAYS_SOME: Final = 0.5  # of the kinds are there in one world


class Faults:
    """The mishaps of one world. `happened` counts them; nothing happens any more after `cease`."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.happened: Counter[Fault] = Counter()
        self._rates = {
            fault: rng.choice(_OFTEN if fault is Fault.COPY_SLOW else _RATES)
            for fault in Fault
            if rng.random() < _ALWAYS_SOME
        }
        self._is_on = True

    def __contains__(self, fault: object) -> bool:
        return self._is_on and fault in self._rates

    def begin(self) -> None:
        """From now on things may go wrong."""
        self._is_on = True

    def cease(self) -> None:
        """From now on all goes well."""
        self._is_on = False

    def count(self, fault: Fault) -> None:
        """It has happened."""
        self.happened[fault] += 1

    def strikes(self, fault: Fault) -> bool:
        """Whether it happens now; then it is counted."""
        rate = self._rates.get(fault) if self._is_on else None
        if rate is None or self._rng.random() >= rate:
            return False
        self.happened[fault] += 1
        return True

    def slowness(self, fault: Fault) -> float:
        """What something takes that may be slow, in seconds: mostly next to nothing."""
        if self.strikes(fault):
            return self._rng.random() ** 2 * _SLOWEST_S
        return 0.0 if self._rng.random() < 0.7 else self._rng.random() * 0.02

    def weights(self, kinds: dict[Fault, float]) -> dict[Fault, float]:
        """Those of `kinds` that this world has."""
        return {fault: weight for fault, weight in kinds.items() if fault in self}
