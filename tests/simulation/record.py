"""What outlives every process of a simulated cluster, as Ray's own store does: the record of its name."""

from cluster.record import ClusterRecord
from lmcache_ray.errors import ClusterError
from tests.simulation.copying import Violation
from tests.simulation.faults import Fault, Faults


class Record:
    """The record of the cluster's name: a `RecordKeeper` that outlives every process."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._record = ClusterRecord()

    def load(self) -> ClusterRecord:
        """See `RecordKeeper`."""
        return self._record

    def save(self, record: ClusterRecord) -> None:
        """See `RecordKeeper`."""
        if self._faults.strikes(Fault.RECORD_UNREACHABLE):
            raise ClusterError("the record cannot be reached")
        if record.epoch < self._record.epoch:
            raise Violation(f"the record goes back from epoch {self._record.epoch} to {record.epoch}")
        self._record = record
