"""Who uses a cluster: known or forgotten, never something in between."""

import threading

import pytest

from cluster.clients import Clients
from cluster.messages import ClientHello
from lmcache_ray.errors import UnknownClientError


def hello(client_id: str) -> ClientHello:
    return ClientHello(client_id, node_id="node", pid=1, liveness_path=None)


def test_leaving_gives_back_what_the_client_had_once_known_or_not() -> None:
    forgotten: list[str] = []
    clients = Clients(forgotten.append)
    clients.enter(hello("a"))
    clients.enter(hello("b"))
    clients.leave("a")
    clients.leave("never seen")
    assert forgotten == ["a", "never seen"]
    assert [client.client_id for client in clients.all()] == ["b"] and len(clients) == 1


def test_what_is_done_for_a_known_client_is_forgotten_with_it() -> None:
    """A plan opened for a client just after it was forgotten would have a writer that nobody can prove dead."""
    events: list[str] = []
    clients = Clients(lambda client_id: events.append("forgotten"))
    clients.enter(hello("a"))
    inside, go_on = threading.Event(), threading.Event()

    def plan() -> None:
        with clients.while_known("a"):
            inside.set()
            assert go_on.wait(10)
            events.append("planned")

    planner = threading.Thread(target=plan)
    planner.start()
    assert inside.wait(10)
    leaver = threading.Thread(target=clients.leave, args=("a",))
    leaver.start()
    leaver.join(0.05)
    assert events == [], "leaving waits for the plan"
    go_on.set()
    planner.join(10)
    leaver.join(10)
    assert events == ["planned", "forgotten"]
    with pytest.raises(UnknownClientError, match="client 'a' is not registered"), clients.while_known("a"):
        events.append("planned again")
    assert events == ["planned", "forgotten"]
