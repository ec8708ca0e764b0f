"""Names of tiers, and what a clear reports per rank."""

import pytest

from lmcache_ray.clearing import ClearResult, tiers_of
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.layout import Placement, ShardSpec, uniform_world
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.spec import Tier

GROUP = ShardSpec((0,), range(1), 4, KVDtype.UINT8)
PER_RANK = uniform_world([GROUP], chunk_size=4, world_size=3, placement=Placement.PER_RANK)
FIRST_RANK = uniform_world([GROUP], chunk_size=4, world_size=3, placement=Placement.FIRST_RANK)


@pytest.mark.parametrize(
    ("tiers", "meant"),
    [
        (None, {Tier.CPU, Tier.DISK, Tier.REMOTE}),
        (["cpu"], {Tier.CPU}),
        (["LocalCPUBackend"], {Tier.CPU}),
        (("disk", "cpu"), {Tier.DISK, Tier.CPU}),
        ({"remote"}, {Tier.REMOTE}),
        ([], set()),
        ([Tier.DISK], {Tier.DISK}),
        (["LocalDiskBackend", "RemoteBackend", "remote"], {Tier.DISK, Tier.REMOTE}),
    ],
)
def test_our_names_and_those_of_lmcache_mean_the_same_tiers(tiers: list[str] | None, meant: set[Tier]) -> None:
    assert tiers_of(tiers, argument="locations") == meant


@pytest.mark.parametrize(
    ("tiers", "named"),
    [
        (["cpu", "CPU"], "'CPU'.*LocalCPUBackend"),
        (["P2PBackend"], "P2PBackend"),
        (["disk", None], "tier None"),
        ([["cpu"]], r"tier \['cpu'\]"),
        ("cpu", "a list"),
    ],
)
def test_unknown_tiers_are_refused(tiers: object, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"locations.*{named}"):
        tiers_of(tiers, argument="locations")  # type: ignore[arg-type]


# Five chunks lay in memory and on disk, two of them leased in memory; three more lay on disk alone.
IN_TWO_TIERS = TierClearCounts({Tier.DISK: 8, Tier.CPU: 3}, {Tier.CPU: 2, Tier.DISK: 0}, 6, 2, (1,))


def test_each_chunk_of_the_world_counts_once() -> None:
    result = ClearResult.of(IN_TWO_TIERS, PER_RANK)
    assert result.removed == {"cpu": [3, 3, 3], "disk": [8, 8, 8]}
    assert result.kept == {"cpu": [2, 2, 2], "disk": [0, 0, 0]}
    assert (result.num_removed, result.num_kept, result.pending) == (6, 2, (1,))
    assert list(result.removed) == list(result.kept) == ["cpu", "disk"], "the fastest first"


def test_ranks_that_hold_nothing_clear_nothing() -> None:
    result = ClearResult.of(TierClearCounts({Tier.REMOTE: 4}, {Tier.REMOTE: 1}, 4, 1), FIRST_RANK)
    assert result == ClearResult({"remote": [4, 0, 0]}, {"remote": [1, 0, 0]}, (), 4, 1)


def test_a_world_that_has_memory_alone() -> None:
    result = ClearResult.of(TierClearCounts({Tier.CPU: 5}, {Tier.CPU: 2}, 5, 2, (1,)), PER_RANK)
    assert result == ClearResult({"cpu": [5, 5, 5]}, {"cpu": [2, 2, 2]}, (1,), 5, 2)


def test_a_clear_of_no_tier() -> None:
    assert ClearResult.of(TierClearCounts({}, {}, 0, 0), FIRST_RANK) == ClearResult({}, {}, (), 0, 0)


@pytest.mark.parametrize("tiers", ["cpu", 5, {"cpu": 1}])
def test_tiers_that_are_no_list_are_refused(tiers: object) -> None:
    with pytest.raises(InvalidRequestError, match="locations must be a list of tier names"):
        tiers_of(tiers, argument="locations")  # type: ignore[arg-type]
