"""Whether the remote store counts as out of order: calls that nobody waited for tell it, impatient callers do not."""

from pathlib import Path

from tests.unit.disk_worlds import C, Prompt
from tests.unit.remote_worlds import RemoteWorld, remote_world, users_store, wait_until
from tests.unit.remote_worlds import users_url as users_url  # a fixture

PROMPT = Prompt(1)
WHOLE = 3 * C
NO_TIME_S = 0.001
ENOUGH_FOR_THE_BREAKER = 3


def ask_impatiently(world: RemoteWorld) -> None:
    keys = [bytes(32)]
    for _ in range(ENOUGH_FOR_THE_BREAKER):
        assert world.remote.find(keys, timeout_s=NO_TIME_S) == {}


def test_who_has_no_time_does_not_speak_against_the_store(tmp_path: Path, users_url: str) -> None:
    store = users_store(users_url)
    with remote_world(tmp_path, users_url) as world:
        store.gate.clear()
        ask_impatiently(world)
        assert world.tiers.problems() == [] and world.remote.is_asked
        store.gate.set()
        world.shared(PROMPT)


def test_what_only_calls_found_that_nobody_waited_for_is_told_and_mended(tmp_path: Path, users_url: str) -> None:
    store = users_store(users_url)

    def fail(call: str) -> None:
        raise ConnectionError("it has gone")

    with remote_world(tmp_path, users_url) as world:
        world.shared(PROMPT)
        store.gate.clear()
        ask_impatiently(world)
        store.mishap = fail
        store.gate.set()
        wait_until(lambda: any("it has gone" in problem for problem in world.tiers.problems()))
        assert not world.remote.is_asked
        store.mishap = lambda call: None
        wait_until(lambda: world.tiers.problems() == [])
        assert world.lookup(PROMPT) == world.retrieved(PROMPT) == WHOLE
