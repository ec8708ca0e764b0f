"""Rounds of ours and of a peer in turn, and what the two say about each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.claims import samples_json
from benchmarks.measure import Json, Ratio, Samples, Spread, ratio
from benchmarks.memory_copy import LIBC_COPY, TORCH_COPY
from benchmarks.peers.child import PeerProcess


@dataclass(frozen=True, slots=True)
class BothSides:
    """The times of our cases and of the peer's, which has those it can do, under the same names; none without a peer.

    Cases of both were timed in the same rounds, each side beside memory copies of its own.
    """

    own: dict[str, Samples]
    peer: dict[str, Samples]

    def to_json(self) -> dict[str, Json]:
        """All times."""
        return {"lmcache_ray": samples_json(self.own), "lmcache": samples_json(self.peer) or None}

    def time_ratio(self, case: str) -> Ratio:
        """Our time over the peer's."""
        return ratio(self.own[case], self.peer[case])

    def speeds(self, case: str, nbytes: int, copies_suffix: str = "") -> dict[str, Json]:
        """How fast `case` moves `nbytes`: in GB/s, as a share of each memory copy, and that share over the peer's."""
        found: dict[str, Json] = {"gb_per_s": nbytes / self.own[case].median_s / 1e9}
        for copy in (TORCH_COPY, LIBC_COPY):
            found[f"over_{copy}"] = ratio(self.own[copy + copies_suffix], self.own[case]).to_json()
        if case in self.peer:
            for copy in (TORCH_COPY, LIBC_COPY):
                peers = ratio(self.peer[copy + copies_suffix], self.peer[case])
                found[f"lmcache_over_{copy}"] = peers.to_json()
            found["over_lmcache"] = self._speed_over_peer(case, TORCH_COPY + copies_suffix).to_json()
        return found

    def _speed_over_peer(self, case: str, copy: str) -> Ratio:
        """Our share of a memory copy over the peer's: each side against the copy in its own process."""
        ours, theirs = ratio(self.own[copy], self.own[case]), ratio(self.peer[copy], self.peer[case])
        rounds = zip(
            self.own[copy].times_s,
            self.own[case].times_s,
            self.peer[copy].times_s,
            self.peer[case].times_s,
            strict=True,
        )
        per_round = [(copy_s / case_s) / (peer_copy_s / peer_s) for copy_s, case_s, peer_copy_s, peer_s in rounds]
        return Ratio(ours.of_medians / theirs.of_medians, Spread.of(per_round))


def in_turns(
    own_turn: Callable[[], Mapping[str, Samples]], peer: PeerProcess | None, name: str, *, turns: int
) -> BothSides:
    """Our rounds and the peer's rounds `name` in turn, `turns` times after a first one that is not counted."""
    own: list[Mapping[str, Samples]] = []
    theirs: list[Mapping[str, Samples]] = []
    for _ in range(1 + turns):
        own.append(own_turn())
        theirs.append(peer.round(name) if peer is not None else {})
    return BothSides(_joined(own[1:]), _joined(theirs[1:]))


def _joined(turns: list[Mapping[str, Samples]]) -> dict[str, Samples]:
    return {case: Samples.joined(found[case] for found in turns) for case in turns[0]}
