"""Untagged broadcasts whose calls come as messages: an overtaken one, or one that never comes, misleads nobody.

Rank 0 sends, rank 1 receives; both number their calls, as ranks in processes of their own do.
"""

import pytest

from lmcache_ray.broadcast.exchange import Exchange
from lmcache_ray.broadcast.tags import Aborted, Call, Payload, TakeResult
from lmcache_ray.errors import BroadcastAborted

PROCESS = 7


@pytest.fixture
def exchange() -> Exchange:
    return Exchange("life", 2, 1.0)


def take(exchange: Exchange, number: int, *, rank: int = 1, src: int = 0) -> TakeResult:
    return exchange.poll(exchange.begin(rank, src, None, call=Call(PROCESS, number)), rank, 0.0)


def test_numbered_calls_meet_in_their_order(exchange: Exchange) -> None:
    for number in range(3):
        exchange.publish(f"object {number}", 0, None, call=Call(PROCESS, number))
        assert take(exchange, number) == Payload(f"object {number}")


def test_a_receiver_whose_call_comes_after_its_next_gets_no_object_of_another_call(exchange: Exchange) -> None:
    exchange.publish("first", 0, None, call=Call(PROCESS, 0))
    exchange.publish("second", 0, None, call=Call(PROCESS, 1))
    answer = take(exchange, 1)
    assert isinstance(answer, Aborted) and "calls 0 to 0 of rank 1 have not come" in answer.reason
    with pytest.raises(BroadcastAborted, match="call 0 of rank 1 came after its call 1"):
        take(exchange, 0)


def test_an_object_that_comes_late_is_nobodys(exchange: Exchange) -> None:
    with pytest.raises(BroadcastAborted, match="have not come"):
        exchange.publish("second", 0, None, call=Call(PROCESS, 1))
    with pytest.raises(BroadcastAborted, match="came after"):
        exchange.publish("first", 0, None, call=Call(PROCESS, 0))
    assert isinstance(take(exchange, 0), Aborted)
    exchange.publish("third", 0, None, call=Call(PROCESS, 2))
    assert take(exchange, 1) == Payload("third"), "both have been told, and count anew"


def test_a_new_process_of_a_rank_begins_its_count_anew(exchange: Exchange) -> None:
    exchange.publish("first", 0, None, call=Call(PROCESS, 0))
    assert take(exchange, 0) == Payload("first")
    exchange.rank_lost(1)
    exchange.rank_back(1)
    assert isinstance(take(exchange, 0), Aborted), "it has lost count of the session"
    with pytest.raises(BroadcastAborted, match="rank 1 restarted"):
        exchange.publish("second", 0, None, call=Call(PROCESS, 1))
    exchange.publish("third", 0, None, call=Call(PROCESS, 2))
    assert take(exchange, 1) == Payload("third")


def test_what_a_dead_process_of_a_rank_has_sent_concerns_nobody(exchange: Exchange) -> None:
    exchange.rank_lost(0)
    exchange.rank_back(0, process=PROCESS + 1)
    with pytest.raises(BroadcastAborted, match="earlier process"):
        exchange.publish("late", 0, None, call=Call(PROCESS, 0))
    exchange.publish("first", 0, None, call=Call(PROCESS + 1, 0))
    assert take(exchange, 0) == Payload("first")


def test_calls_in_one_process_need_no_numbers(exchange: Exchange) -> None:
    exchange.publish("first", 0, None)
    assert exchange.poll(exchange.begin(1, 0, None), 1, 0.0) == Payload("first")
