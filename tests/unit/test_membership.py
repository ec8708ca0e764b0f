import pytest

from cluster.membership import Membership, RankState
from cluster.messages import RankHello


def hello(rank: int) -> RankHello:
    return RankHello(rank, rank, 3, "node", 100 + rank, None, 8, 64)


def joined(holders: tuple[int, ...] = (0, 1, 2)) -> Membership:
    membership = Membership(3, holders, now=0.0)
    for rank in range(3):
        membership.joined(hello(rank), now=1.0)
    return membership


def sentences(membership: Membership) -> list[str]:
    return list(membership.problems().values())


def test_a_world_serves_when_every_holder_has_joined() -> None:
    membership = Membership(3, (0, 1), now=0.0)
    assert sentences(membership) == ["rank 0 is starting", "rank 1 is starting", "rank 2 is starting"]
    membership.joined(hello(1), now=1.0)
    assert not membership.can_serve()
    membership.joined(hello(0), now=1.0)
    assert membership.can_serve(), "rank 2 holds nothing"
    assert sentences(membership) == ["rank 2 is starting"]


def test_the_loss_of_a_holder_ends_service_that_of_another_does_not() -> None:
    membership = joined(holders=(0,))
    assert membership.lost(2, "killed", now=2.0)
    assert membership.can_serve() and sentences(membership) == ["rank 2 is lost: killed"]
    assert membership.lost(0, "", now=2.0)
    assert not membership.can_serve()
    assert sentences(membership) == ["rank 0 is lost", "rank 2 is lost: killed"]


def test_a_loss_is_news_once_and_keeps_what_is_known() -> None:
    membership = joined()
    assert membership.lost(1, "first", now=2.0)
    assert not membership.lost(1, "second", now=2.0)
    record = membership.records()[1]
    assert (record.state, record.hello, record.reason, record.since) == (RankState.LOST, hello(1), "first", 2.0)
    assert [membership.is_alive(rank) for rank in range(3)] == [True, False, True]


def test_a_rank_that_joins_again_is_alive() -> None:
    membership = joined()
    membership.lost(1, "killed", now=2.0)
    membership.joined(hello(1), now=1.0)
    assert membership.can_serve() and sentences(membership) == []


def test_what_keeps_a_rank_away_is_told_until_it_is_there() -> None:
    membership = joined()
    membership.kept_away(1, "it is there")
    membership.lost(1, "killed", now=2.0)
    membership.kept_away(1, "its node has no memory")
    assert membership.problems() == {1: "rank 1 is lost: its node has no memory"} and membership.absent() == [1]
    assert membership.records()[1].since == 2.0
    membership.joined(hello(1), now=3.0, start=2)
    assert membership.problems() == {} and membership.records()[1].start == 2


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_the_world_is_not_known(rank: int) -> None:
    with pytest.raises(KeyError):
        joined().is_alive(rank)


def test_a_rank_that_lives_but_answers_no_pings_is_a_problem_until_it_answers() -> None:
    """A stopped process is alive as far as Ray can tell, and makes every store a miss."""
    membership = Membership(2, (0, 1), now=0.0)
    for rank in range(2):
        membership.joined(hello(rank), now=1.0)
    membership.pinged(1, answered=False)
    assert sentences(membership) == [], "one lost ping says nothing"
    membership.pinged(1, answered=False)
    (problem,) = sentences(membership)
    assert problem.startswith("rank 1 is silent")
    assert membership.is_alive(1) and membership.can_serve(), "nothing is known to be lost"
    membership.pinged(1, answered=True)
    assert sentences(membership) == []
    membership.pinged(1, answered=False)
    membership.pinged(1, answered=False)
    membership.lost(1, "it was killed", now=2.0)
    assert sentences(membership) == ["rank 1 is lost: it was killed"]
