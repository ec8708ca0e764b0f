"""Names of a cluster's actors, and what a status tells of a rank."""

from cluster.membership import RankRecord, RankState
from cluster.messages import RankHello
from cluster.world import cluster_prefix, coordinator_name, rank_name, rank_status

HELLO = RankHello(2, 1, 2, "node", 99, "/dev/shm/a", 8, 64)


def test_actors_are_named_after_their_cluster() -> None:
    names = [coordinator_name("a"), rank_name("a", 0), rank_name("a", 10)]
    assert len(set(names)) == 3
    assert all(name.startswith(cluster_prefix("a")) for name in names)


def test_a_cluster_is_not_taken_for_one_whose_name_begins_alike() -> None:
    assert not rank_name("ab", 0).startswith(cluster_prefix("a"))


def test_a_rank_that_has_not_joined_is_known_by_number_alone() -> None:
    status = rank_status(2, RankRecord(RankState.STARTING, since=1.0), 0)
    assert (status.worker_id, status.alive, status.slots_total) == (2, False, 0)
    assert status.local_worker_id is status.node_id is status.pid is status.arena_path is None


def test_a_rank_is_told_as_it_said_when_it_joined_and_after_its_loss() -> None:
    for state, alive in ((RankState.ALIVE, True), (RankState.LOST, False)):
        status = rank_status(2, RankRecord(state, 1.0, HELLO, "why", start=7), 3)
        assert (status.worker_id, status.local_worker_id, status.local_world_size) == (2, 1, 2)
        assert (status.node_id, status.pid, status.arena_path, status.epoch) == ("node", 99, "/dev/shm/a", 7)
        assert (status.alive, status.slots_used, status.slots_total) == (alive, 3, 8)
