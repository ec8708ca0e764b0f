"""Names of tiers, and what a clear reports per rank."""

import pytest

from lmcache_ray.clearing import ClearResult, names_cpu_tier
from lmcache_ray.dtypes import KVDtype
from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.index_service import ClearCounts
from lmcache_ray.layout import Placement, ShardSpec, uniform_world

GROUP = ShardSpec((0,), range(1), 4, KVDtype.UINT8)
PER_RANK = uniform_world([GROUP], chunk_size=4, world_size=3, placement=Placement.PER_RANK)
FIRST_RANK = uniform_world([GROUP], chunk_size=4, world_size=3, placement=Placement.FIRST_RANK)


@pytest.mark.parametrize(
    ("tiers", "in_memory"),
    [
        (None, True),
        (["cpu"], True),
        (["LocalCPUBackend"], True),
        (("disk", "cpu"), True),
        ([], False),
        (["disk"], False),
        (["LocalDiskBackend", "RemoteBackend", "remote"], False),
    ],
)
def test_our_names_and_those_of_lmcache_mean_the_same_tiers(tiers: list[str] | None, in_memory: bool) -> None:
    assert names_cpu_tier(tiers, argument="locations") is in_memory


@pytest.mark.parametrize(
    ("tiers", "named"), [(["cpu", "CPU"], "'CPU'.*LocalCPUBackend"), (["P2PBackend"], "P2PBackend"), ("cpu", "a list")]
)
def test_unknown_tiers_are_refused(tiers: object, named: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"locations.*{named}"):
        names_cpu_tier(tiers, argument="locations")  # type: ignore[arg-type]


def test_each_chunk_of_the_world_counts_once() -> None:
    result = ClearResult.of_memory(ClearCounts(5, 2, (1,)), PER_RANK)
    assert result == ClearResult({"cpu": [5, 5, 5]}, {"cpu": [2, 2, 2]}, (1,))
    assert (result.num_removed, result.num_kept) == (5, 2)


def test_ranks_that_hold_nothing_clear_nothing() -> None:
    result = ClearResult.of_memory(ClearCounts(5, 2), FIRST_RANK)
    assert result == ClearResult({"cpu": [5, 0, 0]}, {"cpu": [2, 0, 0]})
    assert (result.num_removed, result.num_kept) == (5, 2)
    assert ClearResult.nothing(PER_RANK) == ClearResult({"cpu": [0, 0, 0]}, {"cpu": [0, 0, 0]})


@pytest.mark.parametrize("tiers", ["cpu", 5, {"cpu": 1}])
def test_tiers_that_are_no_list_are_refused(tiers: object) -> None:
    with pytest.raises(InvalidRequestError, match="locations must be a list of tier names"):
        names_cpu_tier(tiers, argument="locations")  # type: ignore[arg-type]
