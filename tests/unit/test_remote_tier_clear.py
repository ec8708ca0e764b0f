"""Clearing the remote store alone: what is on its way there, or waits to go, does not come after all."""

import threading
from pathlib import Path

from tests.unit.disk_worlds import C, Prompt
from tests.unit.remote_worlds import RemoteWorld, remote_world, users_store, wait_until
from tests.unit.remote_worlds import users_url as users_url  # a fixture

PROMPT, OTHER, LATER = Prompt(1), Prompt(2), Prompt(3)
WHOLE = 3 * C


def clear_remote(world: RemoteWorld, prompt: Prompt | None = None) -> threading.Thread:
    """Begin to clear the store of one prompt, or of all; it is under way when this returns."""
    tokens = None if prompt is None else prompt.tokens
    clearing = threading.Thread(target=lambda: world.world.engines[0].clear(tokens, locations=["remote"]))
    clearing.start()
    wait_until(world.remote._committing.locked)
    return clearing


def test_what_goes_up_or_waits_while_all_is_cleared_does_not_come(tmp_path: Path, users_url: str) -> None:
    store = users_store(users_url)
    with remote_world(tmp_path, users_url) as world:
        store.gate.clear()
        assert world.store(PROMPT) == WHOLE
        wait_until(lambda: bool(store.calls))
        assert world.store(OTHER) == WHOLE, "it waits until the first one is up"
        clearing = clear_remote(world)
        store.gate.set()
        clearing.join()
        world.flush()
        assert (world.lookup(PROMPT, "cpu"), world.lookup(OTHER, "cpu")) == (WHOLE, WHOLE)
        world.drop_local()
        assert (world.lookup(PROMPT), world.lookup(OTHER)) == (0, 0)
        world.shared(LATER)


def test_what_is_not_cleared_goes_on_its_way(tmp_path: Path, users_url: str) -> None:
    store = users_store(users_url)
    with remote_world(tmp_path, users_url) as world:
        store.gate.clear()
        assert world.store(PROMPT) == WHOLE
        wait_until(lambda: bool(store.calls))
        assert (world.store(OTHER), world.store(LATER)) == (WHOLE, WHOLE)
        clearing = clear_remote(world, OTHER)
        store.gate.set()
        clearing.join()
        world.flush()
        world.drop_local()
        assert [world.lookup(prompt) for prompt in (PROMPT, OTHER, LATER)] == [WHOLE, 0, WHOLE]
