"""A store that is absent, frozen, killed, or that refuses: calls go on with memory and disk and end by themselves, the
engine says what is wrong, and hits return when the store does, without anybody's help.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.errors import StorageError
from lmcache_ray.tiers.hits import TierHits
from tests.redis_server import HOST, RedisServer, free_port
from tests.unit.disk_worlds import C, Prompt
from tests.unit.remote_worlds import QUICK_S, RemoteWorld, remote_world, users_store, wait_until
from tests.unit.remote_worlds import users_url as users_url  # a fixture

WHOLE = 3 * C
PROMPT, OTHER, THIRD = Prompt(1), Prompt(2), Prompt(3)
SECRET = "se-cret"


@contextmanager
def impatient_world(
    directory: Path, url: str, kind: str = "1 rank", *, with_disk: bool = False, **config: object
) -> Iterator[RemoteWorld]:
    """A world that waits little for its store."""
    values = {"blocking_timeout_secs": QUICK_S, "call_timeout_s": 4, **config}
    with remote_world(directory, url, kind, with_disk=with_disk, **values) as world:  # type: ignore[arg-type]
        yield world


def check_local_hits(world: RemoteWorld, local: Prompt, absent: Prompt) -> None:
    """With the store out of reach: what is here is a hit, what is not is a miss, and what is stored is here."""
    assert world.lookup(local) == world.retrieved(local) == WHOLE
    assert world.lookup(absent) == world.retrieved(absent) == 0
    assert world.locate(absent) == TierHits(0, 0, 0, 0)
    assert world.store(absent) == world.lookup(absent) == world.retrieved(absent) == WHOLE


def check_outage(world: RemoteWorld, *words: str) -> None:
    """The engine says, in one sentence, that the remote tier is out of order, and why."""
    wait_until(lambda: bool(world.tiers.problems()))
    (problem,) = world.world.engines[0].problems()
    assert problem.startswith("the remote tier is out of order: ")
    for word in words:
        assert word in problem
    assert SECRET not in problem
    assert not world.world.engines[0].is_healthy()


def check_recovery(world: RemoteWorld, prompt: Prompt) -> None:
    """By itself the store is used again, both ways."""
    wait_until(lambda: world.tiers.problems() == [])
    assert world.world.engines[0].is_healthy()
    assert world.shared(prompt) and world.retrieved(prompt) == WHOLE
    world.check_idle()


# -- not there --------------------------------------------------------------------------------------------------------


def test_a_store_that_is_absent_at_the_start_and_comes_later(tmp_path: Path, redis_server: RedisServer) -> None:
    redis_server.kill()
    with impatient_world(tmp_path, redis_server.url, "2 ranks") as world:
        assert world.tiers.problems() == [], "nobody has asked it yet"
        assert world.lookup(PROMPT) == 0
        assert world.store(PROMPT) == WHOLE
        check_local_hits(world, PROMPT, OTHER)
        check_outage(world, f"redis://{HOST}:{redis_server.port}/0")
        redis_server.start()
        check_recovery(world, THIRD)
        assert world.locate(PROMPT) == TierHits(0, 0, 0, 0), "what could not go up then is local, and was dropped here"
        check_recovery(world, PROMPT)


def test_the_password_is_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is absent, with a password in its URL: neither problems nor representations nor errors show it."""
    url = f"redis://me:{SECRET}@{HOST}:{free_port()}/0"
    with impatient_world(tmp_path, url) as world:
        engine = world.world.engines[0]
        assert world.store(PROMPT) == WHOLE
        check_outage(world, f"redis://***@{HOST}")
        assert world.lookup(OTHER) == world.retrieved(OTHER) == 0
        with pytest.raises(StorageError) as refused:
            engine.clear(locations=["remote"])
        said = [str(refused.value), repr(refused.value), repr(engine), repr(engine._parts), caplog.text]
        assert not [text for text in said if SECRET in text]


def test_the_password_of_a_configuration_is_not_shown() -> None:
    config = LMCacheEngineConfig(remote_url=f"rediss://:{SECRET}@host:1/0?token={SECRET}")
    assert SECRET not in repr(config) + str(config) + config.describe()
    assert SECRET in str(config.to_dict()), "the values themselves are whole"


# -- frozen -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "with_disk"), [("2 ranks", True), ("MLA", False)])
def test_a_frozen_store_costs_little_and_thaws(
    tmp_path: Path, redis_server: RedisServer, kind: str, with_disk: bool
) -> None:
    with impatient_world(tmp_path, redis_server.url, kind, with_disk=with_disk) as world:
        world.shared(PROMPT)
        assert world.store(OTHER) == WHOLE
        world.flush()
        redis_server.freeze()
        for _ in range(4):
            assert world.lookup(PROMPT) == world.retrieved(PROMPT) == 0
        assert world.lookup(OTHER) == world.retrieved(OTHER) == WHOLE
        assert world.store(THIRD) == world.retrieved(THIRD) == WHOLE
        check_outage(world, "did not")
        redis_server.thaw()
        wait_until(lambda: world.tiers.problems() == [])
        assert world.lookup(PROMPT) == world.retrieved(PROMPT) == WHOLE, "nothing was lost"
        check_recovery(world, Prompt(4))


def test_many_failures_at_once_do_not_make_the_pause_longer(tmp_path: Path, users_url: str) -> None:
    """Fifty lookups are refused within the first pause: the store is tried again after a second all the same."""
    store = users_store(users_url)
    with impatient_world(tmp_path, users_url) as world:
        world.shared(PROMPT)
        store.mishap = _refuse
        for number in range(50):
            assert world.lookup(Prompt(100 + number)) == 0
        check_outage(world, "the store wants another password")
        store.mishap = lambda call: None
        wait_until(lambda: world.tiers.problems() == [])
        assert world.retrieved(PROMPT) == WHOLE


def _refuse(call: str) -> None:
    raise StorageError("the store wants another password")


def test_a_store_that_hangs_for_ever_is_left_alone(tmp_path: Path, users_url: str) -> None:
    """Its calls never return: a few threads wait, and no more are begun."""
    store = users_store(users_url)
    before = set(threading.enumerate())  # of other worlds some may hang still
    with impatient_world(tmp_path, users_url) as world:
        world.shared(PROMPT)
        store.gate.clear()
        for number in range(30):
            assert world.store(Prompt(10 + number, num_chunks=1)) == C
            assert world.lookup(Prompt(100 + number)) == world.retrieved(PROMPT) == 0
        check_outage(world)
        num_waiting = sum(thread.name.endswith(" call") for thread in set(threading.enumerate()) - before)
        assert 1 <= num_waiting <= 8
        store.gate.set()
        wait_until(lambda: world.tiers.problems() == [])
        assert world.retrieved(PROMPT) == WHOLE
        check_recovery(world, THIRD)


@pytest.mark.parametrize("kind", ["2 ranks", "MLA"])
def test_a_store_that_freezes_in_the_middle_of_a_load(tmp_path: Path, users_url: str, kind: str) -> None:
    """What had come is a hit; no slot and no lease is left behind, and the rest comes when it answers again."""
    store, long = users_store(users_url), Prompt(1, num_chunks=8)
    with impatient_world(tmp_path, users_url, kind) as world:
        world.shared(long)
        num_shards = len(world.world.layout.holders)
        store.calls.clear()

        def freeze(call: str) -> None:
            if call == "get" and store.num_calls("get") > 6 * num_shards:
                store.gate.clear()
                store.gate.wait()

        store.mishap = freeze
        assert 0 < world.retrieved(long) < 8 * C
        world.check_idle()
        assert world.store(OTHER) == WHOLE
        store.mishap = lambda call: None
        store.gate.set()
        wait_until(lambda: world.tiers.problems() == [])
        assert world.retrieved(long) == 8 * C
        world.check_idle()


def test_a_rank_that_answers_too_late_gets_its_slots_back(
    tmp_path: Path, users_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading that nothing can end holds its slots for as long as it lasts, and not longer."""
    with impatient_world(tmp_path, users_url, "2 ranks", call_timeout_s=1, capacity_chunks=3) as world:
        world.shared(PROMPT)
        may_go_on = threading.Event()
        chunks = world.remote._store.chunks
        monkeypatch.setattr(type(chunks), "load_shard", _held(type(chunks).load_shard, may_go_on))
        assert world.retrieved(PROMPT) == 0
        assert world.store(OTHER) == 0, "all slots are being written"
        may_go_on.set()
        wait_until(world.index_is_empty)
        assert world.store(OTHER) == world.retrieved(OTHER) == WHOLE
        world.world.check_idle()


def _held(load: Callable[..., object], may_go_on: threading.Event) -> Callable[..., object]:
    def held(*arguments: object) -> object:
        may_go_on.wait(20)
        return load(*arguments)

    return held


def test_a_prompt_that_takes_longer_to_put_than_a_call_may_last(tmp_path: Path, users_url: str) -> None:
    """It goes in parts, each of which ends in time; with a limit of our own they are small."""
    store, long = users_store(users_url), Prompt(1, num_chunks=16)
    store.mishap = lambda call: time.sleep(0.05) if call == "put" else None
    with impatient_world(tmp_path, users_url, call_timeout_s=0.4, max_remote_size=64 / 1024**2) as world:
        assert world.store(long) == 16 * C
        world.flush()
        assert (world.remote_traffic.written, world.tiers.problems()) == (16, [])
        world.drop_local()
        assert world.locate(long) == TierHits(16 * C, cpu=0, disk=0, remote=16 * C)


# -- killed -----------------------------------------------------------------------------------------------------------


def test_a_server_that_is_killed_while_much_is_put_and_comes_back_empty(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Twelve prompts on their way: none is lost from memory, none is half there, and it is used again by itself."""
    prompts = [Prompt(10 + number) for number in range(12)]
    with impatient_world(tmp_path, redis_server.url, "2 ranks", capacity_chunks=36) as world:
        for number, prompt in enumerate(prompts):
            assert world.store(prompt) == WHOLE
            if number == 5:
                wait_until(lambda: world.remote_traffic.written > 0)
                redis_server.kill()
        check_outage(world)
        for prompt in prompts:
            assert world.lookup(prompt) == world.retrieved(prompt) == WHOLE
        redis_server.start()
        check_recovery(world, THIRD)
        for prompt in prompts:
            assert world.lookup(prompt) in (0, WHOLE)
            assert world.store(prompt) == WHOLE
            world.flush()
            world.drop_local()
            assert world.retrieved(prompt) == WHOLE


def test_a_server_that_is_killed_while_much_is_loaded_and_comes_back_empty(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    prompts = [Prompt(10 + number) for number in range(12)]
    with impatient_world(tmp_path, redis_server.url, "2 ranks", capacity_chunks=36) as world:
        for prompt in prompts:
            world.shared(prompt)
        for number, prompt in enumerate(prompts):
            if number == 5:
                killing = threading.Thread(target=redis_server.kill)
                killing.start()
            assert world.retrieved(prompt) in (range(0, WHOLE + 1, C) if number >= 5 else (WHOLE,))
        killing.join()
        world.check_idle()
        assert world.lookup(Prompt(99)) == 0
        check_outage(world)
        redis_server.start()
        wait_until(lambda: world.tiers.problems() == [])
        world.drop_local()
        assert [world.lookup(prompt) + world.retrieved(prompt) for prompt in prompts] == [0] * 12
        check_recovery(world, PROMPT)


@pytest.mark.parametrize("fails_after", range(1, 10))
def test_a_store_that_ends_after_any_number_of_puts_has_whole_chunks_only(
    tmp_path: Path, users_url: str, fails_after: int
) -> None:
    """Two ranks put three shards each, then three manifests; whatever was the last, others find a true beginning."""
    store = users_store(users_url)
    with impatient_world(tmp_path, users_url, "2 ranks") as world:

        def fail(call: str) -> None:
            if call == "put" and store.num_calls("put") > fails_after:
                raise ConnectionError("it ended")

        store.mishap = fail
        assert world.store(PROMPT) == WHOLE
        world.flush()
        assert world.retrieved(PROMPT) == WHOLE
        store.mishap = lambda call: None
        with impatient_world(tmp_path, users_url, "2 ranks") as other:
            found = other.lookup(PROMPT)
            assert found == other.retrieved(PROMPT)
            assert found == (WHOLE if fails_after == 9 else 0), "the tail is committed first"
            assert other.store(PROMPT) == WHOLE
            other.flush()
            other.drop_local()
            assert other.retrieved(PROMPT) == WHOLE


# -- unwilling --------------------------------------------------------------------------------------------------------


def test_a_store_that_takes_nothing_more_still_gives(tmp_path: Path, users_url: str) -> None:
    """Full, or read-only: stores are local and hits stay."""
    store = users_store(users_url)

    def refuse(call: str) -> None:
        if call == "put":
            raise StorageError("the store is full")

    with impatient_world(tmp_path, users_url, "2 ranks") as world:
        world.shared(PROMPT)
        store.mishap = refuse
        assert world.store(OTHER) == world.retrieved(OTHER) == WHOLE
        check_outage(world, "the store is full")
        assert world.lookup(PROMPT) == world.retrieved(PROMPT) == WHOLE
        store.mishap = lambda call: None
        check_recovery(world, THIRD)


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with impatient_world(tmp_path, f"file://{tmp_path}/file", "2 ranks") as world:
        assert world.store(PROMPT) == world.lookup(PROMPT) == world.retrieved(PROMPT) == WHOLE
        check_outage(world, f"file://{tmp_path}/file")
        assert world.lookup(OTHER) == world.retrieved(OTHER) == 0
        (tmp_path / "file").unlink()
        check_recovery(world, THIRD)


def test_an_engine_can_be_closed_while_its_store_hangs(tmp_path: Path, users_url: str) -> None:
    store = users_store(users_url)
    with impatient_world(tmp_path, users_url, "2 ranks", call_timeout_s=1) as world:
        store.gate.clear()
        assert world.store(PROMPT) == WHOLE
        world.world.close()
        assert not store.gate.is_set()
