"""The remote tier as its users see it, one engine or world at a time in one process: what was stored by one is a hit
for another, byte by byte, in memory, on disk and in the store by turns; and what each of the options changes.
"""

import threading
import uuid
from pathlib import Path

import pytest
import torch

from lmcache_ray.errors import ConfigError
from lmcache_ray.tiers.hits import TierHits
from tests.redis_server import RedisServer
from tests.unit.disk_worlds import WORLDS, C, DiskWorld, Prompt
from tests.unit.engine_builders import KV, poison, random_rows, rows_of
from tests.unit.remote_worlds import remote_world, users_store, wait_until
from tests.unit.remote_worlds import users_url as users_url  # a fixture

WHOLE = 3 * C
PROMPT, OTHER = Prompt(1), Prompt(2)
HOLDERS = {"1 rank": [True], "2 ranks": [True, True], "MLA": [True, False]}
GIB = 2**30


@pytest.fixture(params=["file", "memory", "redis", "unix"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store of each kind that needs no account."""
    if request.param in ("redis", "unix"):
        server: RedisServer = request.getfixturevalue("redis_server")
        return server.url if request.param == "redis" else server.unix_url
    return f"file://{tmp_path}/remote" if request.param == "file" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    """A folder."""
    return f"file://{tmp_path}/remote"


def in_remote(num_tokens: int) -> TierHits:
    return TierHits(num_tokens, cpu=0, disk=0, remote=num_tokens)


def in_memory(num_tokens: int) -> TierHits:
    return TierHits(num_tokens, cpu=num_tokens, disk=0, remote=0)


# -- one store, several lives and clusters ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "num_groups"), [("1 rank", 1), ("2 ranks", 3), ("MLA", 2)])
def test_what_a_closed_engine_has_stored_is_a_hit(tmp_path: Path, url: str, kind: str, num_groups: int) -> None:
    with remote_world(tmp_path, url, kind, num_groups) as first:
        assert [first.store(PROMPT), first.store(OTHER)] == [WHOLE, WHOLE]
    with remote_world(tmp_path, url, kind, num_groups) as second:
        assert second.locate(PROMPT) == in_remote(WHOLE)
        assert second.lookup(PROMPT) == second.retrieved(PROMPT) == WHOLE
        assert second.locate(PROMPT) == in_memory(WHOLE)
        assert second.retrieved(OTHER) == second.retrieved(PROMPT) == WHOLE
        assert (second.remote_traffic.read, second.remote_traffic.written) == (6, 0)
        second.check_idle()
        assert second.tiers.problems() == []


def test_two_clusters_share_hits_in_both_directions(tmp_path: Path, url: str) -> None:
    with remote_world(tmp_path, url, "2 ranks", 2) as one, remote_world(tmp_path, url, "2 ranks", 2) as two:
        one.shared(PROMPT)
        two.shared(OTHER)
        assert (two.lookup(PROMPT), two.retrieved(PROMPT)) == (WHOLE, WHOLE)
        assert (one.lookup(OTHER), one.retrieved(OTHER)) == (WHOLE, WHOLE)
        before = two.remote_traffic.written
        two.drop_local()
        assert two.store(PROMPT) == WHOLE
        two.flush()
        assert two.remote_traffic.written == before, "it is there already"
        assert one.world.engines[0].clear(PROMPT.tokens).removed["remote"] == [3, 3]
        assert two.locate(PROMPT) == in_memory(WHOLE)
        two.drop_local()
        assert (two.retrieved(PROMPT), two.retrieved(OTHER)) == (0, WHOLE)
        one.check_idle()
        two.check_idle()


def test_others_are_not_disturbed(tmp_path: Path, file_url: str) -> None:
    """Another model, another layout, another chunk size, another prefix: misses, also where the store is cleared."""
    with remote_world(tmp_path, file_url, "2 ranks") as mine:
        mine.shared(PROMPT)
        others: list[dict[str, object]] = [
            {"model": "another"}, {"num_groups": 2}, {"kind": "1 rank"}, {"chunk_size": 2 * C}, {"model_revision": "2"},
            {"remote_prefix": "another"}, {"remote_serde": "zstd"},
        ]  # fmt: skip
        for changed in others:
            with remote_world(tmp_path, file_url, **{"kind": "2 ranks", **changed}) as other:  # type: ignore[arg-type]
                assert (other.lookup(PROMPT), other.retrieved(PROMPT)) == (0, 0), changed
                if changed != {"remote_serde": "zstd"}:  # that is of the same world, whatever the serde
                    assert other.world.engines[0].clear().num_removed == 0
        assert mine.retrieved(PROMPT) == WHOLE


def test_mla_worlds_of_other_sizes_share(tmp_path: Path, file_url: str) -> None:
    with remote_world(tmp_path, file_url, "MLA", 2, world_size=3) as three:
        three.shared(PROMPT)
    for world_size in (1, 2):
        with remote_world(tmp_path, file_url, "MLA", 2, world_size=world_size) as other:
            assert other.retrieved(PROMPT) == WHOLE


def test_a_prompt_that_goes_on_is_stored_where_it_ends(tmp_path: Path, file_url: str) -> None:
    long = Prompt(1, num_chunks=6)
    with remote_world(tmp_path, file_url) as first:
        first.shared(PROMPT)
    with remote_world(tmp_path, file_url) as second:
        assert second.store(long) == 6 * C
        second.flush()
        assert second.remote_traffic.written == 3, "the beginning is there already"
    with remote_world(tmp_path, file_url) as third:
        assert third.retrieved(long) == 6 * C


def test_a_partial_last_chunk(tmp_path: Path, file_url: str) -> None:
    prompt = Prompt(3, num_chunks=3, cut=1)
    with remote_world(tmp_path, file_url, "2 ranks", 2, save_unfull_chunk=True) as first:
        first.shared(prompt)
    with remote_world(tmp_path, file_url, "2 ranks", 2, save_unfull_chunk=True) as second:
        assert second.retrieved(prompt) == WHOLE - 1


# -- the serdes -------------------------------------------------------------------------------------------------------


def fill_with_numbers(world: DiskWorld, *, seed: int) -> None:
    """Finite KV instead of odd bits."""
    torch.manual_seed(seed)
    for kv in world.kvs:
        for tensor in kv:
            numbers = torch.randn(tensor.shape) * 3.0
            tensor.copy_(numbers.abs().to(torch.uint8) if tensor.dtype == torch.uint8 else numbers.to(tensor.dtype))


def rows(kv: KV, wanted: object) -> list[torch.Tensor]:
    """Per layer ``[kv_size, rows, heads * head_size]``."""
    return [tensor.reshape(tensor.shape[0], -1, tensor.shape[3] * tensor.shape[4])[:, wanted] for tensor in kv]


def test_zstd_is_exact_and_smaller_where_something_repeats(tmp_path: Path) -> None:
    sizes = {}
    for serde in ("naive", "zstd"):
        folder = tmp_path / serde
        with remote_world(tmp_path, f"file://{folder}", "2 ranks", 3, remote_serde=serde, chunk_size=16) as world:
            prompt = Prompt(4, num_chunks=12)
            for kv in world.kvs:
                for tensor in kv:
                    tensor.view(torch.uint8)[:, ::2] = 7
            world.shared(prompt)
            assert world.retrieved(prompt) == 48
        sizes[serde] = sum(path.stat().st_size for path in folder.rglob("*.r*"))
    assert sizes["zstd"] < 0.8 * sizes["naive"]


def test_fp8_rounds_16_bit_groups_within_its_bound_and_keeps_all_others(tmp_path: Path, file_url: str) -> None:
    with remote_world(tmp_path, file_url, "2 ranks", 3, remote_serde="fp8") as world:
        fill_with_numbers(world, seed=1)
        assert world.store(PROMPT) == WHOLE
        assert world.retrieved(PROMPT) == WHOLE, "what has not left memory is exact"
        world.flush()
        world.drop_local()
        target = random_rows(WHOLE, seed=9)
        assert world.world.retrieve(PROMPT.tokens, target) == list(range(WHOLE))
        num_rounded = 0
        for kv, original in zip(world.world.kvs, world.kvs, strict=True):
            for found, wanted in zip(rows(kv, target), rows(original, PROMPT.rows), strict=True):
                if wanted.dtype != torch.bfloat16:
                    assert torch.equal(found, wanted)
                    continue
                error, exact = (found.float() - wanted.float()).abs(), wanted.float().abs()
                assert (error <= exact / 16 + exact / 256 + exact.max() / (448 * 1024)).all()
                num_rounded += int((error > 0).sum())
        assert num_rounded > 0, "the test tests nothing"


@pytest.mark.parametrize("with_disk", [False, True])
def test_exact_and_rounded_chunks_are_never_taken_for_each_other(
    tmp_path: Path, file_url: str, with_disk: bool
) -> None:
    """In either order, in one store and one disk directory."""
    for number, serdes in enumerate([("fp8", "naive"), ("naive", "fp8"), ("zstd", "fp8")]):
        prompt = Prompt(10 + number)
        with remote_world(tmp_path, file_url, "2 ranks", remote_serde=serdes[0], with_disk=with_disk) as first:
            assert first.store(prompt) == WHOLE
        with remote_world(tmp_path, file_url, "2 ranks", remote_serde=serdes[1], with_disk=with_disk) as second:
            assert second.locate(prompt) == TierHits(0, 0, 0, 0)
            assert (second.lookup(prompt), second.retrieved(prompt)) == (0, 0)
        with remote_world(tmp_path, file_url, "2 ranks", remote_serde=serdes[0], with_disk=with_disk) as third:
            assert third.lookup(prompt) == WHOLE
            if serdes[0] != "fp8":
                assert third.retrieved(prompt) == WHOLE


# -- coming up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WORLDS)
def test_a_lookup_begins_to_load(tmp_path: Path, file_url: str, kind: str) -> None:
    with remote_world(tmp_path, file_url, kind) as first:
        first.shared(PROMPT)
    with remote_world(tmp_path, file_url, kind) as second:
        assert second.lookup(PROMPT) == WHOLE
        wait_until(lambda: second.locate(PROMPT) == in_memory(WHOLE))
        second.check_idle()
        assert second.retrieved(PROMPT) == WHOLE
        assert second.remote_traffic.read == 3, "once"


def test_looking_in_some_tiers_asks_the_store_only_if_it_is_one_of_them(tmp_path: Path, users_url: str) -> None:
    store = users_store(users_url)
    with remote_world(tmp_path, users_url) as world:
        world.shared(PROMPT)
        num_calls = len(store.calls)
        assert (world.lookup(PROMPT, "cpu"), world.lookup(PROMPT, "cpu", "disk")) == (0, 0)
        assert len(store.calls) == num_calls
        assert world.lookup(PROMPT, "cpu", "remote") == world.lookup(PROMPT, "RemoteBackend") == WHOLE


def test_what_is_in_memory_costs_the_store_no_call(tmp_path: Path, users_url: str) -> None:
    store = users_store(users_url)
    with remote_world(tmp_path, users_url) as world:
        assert world.store(PROMPT) == WHOLE
        world.flush()
        num_calls = len(store.calls)
        assert world.lookup(PROMPT) == world.retrieved(PROMPT) == WHOLE
        assert len(store.calls) == num_calls


@pytest.mark.parametrize("kind", WORLDS)
def test_a_retrieve_waits_for_a_store_that_is_slow(tmp_path: Path, users_url: str, kind: str) -> None:
    store = users_store(users_url)
    with remote_world(tmp_path, users_url, kind) as world:
        world.shared(PROMPT)
        may_go_on = threading.Event()
        store.mishap = lambda call: _wait(may_go_on) if call == "get" else None
        found: list[int] = []
        retrieving = threading.Thread(target=lambda: found.append(world.retrieved(PROMPT)))
        retrieving.start()
        wait_until(lambda: store.num_calls("get") > 0)
        assert found == []
        may_go_on.set()
        retrieving.join()
        assert found == [WHOLE]
        world.check_idle()


def test_a_retrieve_ends_in_time_with_what_came_by_then(tmp_path: Path, users_url: str) -> None:
    """The first chunks come, the others hang: those are a hit, and nothing is left behind."""
    store, long = users_store(users_url), Prompt(1, num_chunks=8)
    num_quick = 3
    with remote_world(tmp_path, users_url) as first:
        first.shared(long)
    with remote_world(tmp_path, users_url, call_timeout_s=0.6) as world:
        hang = threading.Event()
        store.calls.clear()
        store.mishap = lambda call: _wait(hang) if call == "get" and store.num_calls("get") > num_quick else None
        assert world.retrieved(long) in (num_quick * C, (num_quick - 1) * C), "two threads ask at a time"
        world.check_idle()
        hang.set()
        assert world.retrieved(long) == 8 * C
        assert world.store(OTHER) == WHOLE
        world.check_idle()


def _wait(event: threading.Event) -> None:
    event.wait(20)


@pytest.mark.parametrize("kind", WORLDS)
def test_a_beginning_in_memory_and_the_rest_in_the_store(tmp_path: Path, file_url: str, kind: str) -> None:
    long = Prompt(1, num_chunks=7)
    with remote_world(tmp_path, file_url, kind, 2) as world:
        world.shared(long)
        assert world.retrieved(PROMPT) == WHOLE
        assert world.locate(long) == TierHits(7 * C, cpu=WHOLE, disk=0, remote=4 * C)
        assert (world.lookup(long), world.retrieved(long)) == (7 * C, 7 * C)
        assert world.remote_traffic.read == 7, "each once"
        world.check_idle()


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("start", [WHOLE, WHOLE + 3])
def test_a_start_in_the_middle_loads_only_what_is_wanted(
    tmp_path: Path, file_url: str, kind: str, start: int
) -> None:
    """The beginning lies on disk, the rest in the remote store alone."""
    long, num_tokens = Prompt(1, num_chunks=6), 6 * C
    with remote_world(tmp_path, file_url, kind, 2, with_disk=True) as world:
        world.shared(long)
        assert world.retrieved(PROMPT) == WHOLE
        world.flush()
        world.drop_memory()
        assert world.locate(long) == TierHits(num_tokens, cpu=0, disk=WHOLE, remote=WHOLE)
        read_before = world.remote_traffic.read
        target = random_rows(num_tokens, seed=5)
        for kv in world.world.kvs:
            poison(kv)
        found = world.world.retrieve(long.tokens, target, mask=torch.arange(num_tokens) >= start)
        assert found == list(range(start, num_tokens))
        for kv, original in zip(world.world.kvs, world.kvs, strict=True):
            assert rows_of(kv, target[start:]) == rows_of(original, long.rows[start:])
            assert set(rows_of(kv, target[:start])) == {0x5A}, "rows before the start are not touched"
        assert (world.remote_traffic.read - read_before, world.traffic.read) == (6 - start // C, 0)
        world.check_idle()


@pytest.mark.parametrize("kind", WORLDS)
def test_a_start_in_the_middle_of_what_lies_in_the_store_alone(tmp_path: Path, file_url: str, kind: str) -> None:
    with remote_world(tmp_path, file_url, kind) as world:
        world.shared(PROMPT)
        found = world.world.retrieve(PROMPT.tokens, random_rows(WHOLE), mask=torch.arange(WHOLE) >= C + 1)
        assert found == list(range(C + 1, WHOLE))
        world.check_idle()


# -- with a disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WORLDS)
def test_memory_disk_and_store_by_turns(tmp_path: Path, file_url: str, kind: str) -> None:
    long = Prompt(1, num_chunks=6)
    with remote_world(tmp_path, file_url, kind, 2, with_disk=True) as world:
        world.shared(long)
        assert world.retrieved(Prompt(1, num_chunks=4)) == 4 * C
        world.flush()
        assert world.traffic.written == 6 + 4, "what comes from the store goes to the disk"
        assert world.remote_traffic.written == 6, "and does not go back"
        world.drop_memory()
        assert world.retrieved(Prompt(1, num_chunks=1)) == C
        assert world.locate(long) == TierHits(6 * C, cpu=C, disk=3 * C, remote=2 * C)
        assert world.lookup(long, "cpu") == C
        assert world.lookup(long, "cpu", "disk") == world.lookup(long, "disk") == 4 * C
        assert world.lookup(long) == world.retrieved(long) == 6 * C
        assert (world.remote_traffic.read, world.traffic.read) == (4 + 2, 4)
        world.check_idle()
    with remote_world(tmp_path, file_url, kind, 2, with_disk=True) as again:
        assert again.locate(long) == TierHits(6 * C, cpu=0, disk=6 * C, remote=0)
        assert again.retrieved(long) == 6 * C
        assert again.remote_traffic.read == 0


@pytest.mark.parametrize("kind", WORLDS)
def test_clear_counts_in_each_tier(tmp_path: Path, file_url: str, kind: str) -> None:
    def per_rank(count: int) -> list[int]:
        return [count if holds else 0 for holds in HOLDERS[kind]]

    nothing = per_rank(0)
    with remote_world(tmp_path, file_url, kind, with_disk=True) as world:
        engine = world.world.engines[0]
        assert [world.store(PROMPT), world.store(OTHER)] == [WHOLE, WHOLE]
        world.flush()
        cleared = engine.clear(PROMPT.tokens, locations=["remote"])
        assert cleared.removed == {"cpu": nothing, "disk": nothing, "remote": per_rank(3)}
        assert (cleared.num_removed, cleared.num_kept, cleared.pending) == (3, 0, ())
        assert engine.clear(PROMPT.tokens, locations=["RemoteBackend"]).num_removed == 0, "that was all"
        world.drop_local()
        assert (world.lookup(PROMPT), world.retrieved(PROMPT), world.retrieved(OTHER)) == (0, 0, WHOLE)
        world.flush()
        assert engine.lookup(OTHER.tokens, lookup_id="mine", pin=True) == WHOLE
        cleared = engine.clear()
        assert cleared.removed == {"cpu": nothing, "disk": nothing, "remote": per_rank(3)}
        assert cleared.kept == {"cpu": per_rank(3), "disk": per_rank(3), "remote": nothing}
        assert (cleared.num_removed, cleared.num_kept) == (0, 3)
        engine.lookup_unpin("mine")
        cleared = engine.clear()
        assert cleared.removed == {"cpu": per_rank(3), "disk": per_rank(3), "remote": nothing}
        assert world.lookup(OTHER) == 0
        world.check_idle()


def test_what_is_cleared_while_it_goes_up_does_not_come_back(tmp_path: Path, users_url: str) -> None:
    store = users_store(users_url)
    with remote_world(tmp_path, users_url) as world:
        store.gate.clear()
        assert world.store(PROMPT) == WHOLE
        wait_until(lambda: bool(store.calls))
        clearing = threading.Thread(target=world.world.engines[0].clear)
        clearing.start()
        wait_until(lambda: world.lookup(PROMPT, "cpu") == 0)
        store.gate.set()
        clearing.join()
        world.flush()
        assert (world.lookup(PROMPT), world.retrieved(PROMPT)) == (0, 0)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize("with_disk", [False, True])
def test_memory_as_a_passage(tmp_path: Path, file_url: str, kind: str, with_disk: bool) -> None:
    with remote_world(tmp_path, file_url, kind, with_disk=with_disk, local_cpu=False, capacity_chunks=6) as world:
        for number in range(8):
            assert world.store(Prompt(number)) == WHOLE
            world.flush()
            assert world.index_is_empty()
        for number in range(8):
            assert world.lookup(Prompt(number)) == world.retrieved(Prompt(number)) == WHOLE
        wait_until(world.index_is_empty)
        world.check_idle()
        if not with_disk:
            assert world.locate(PROMPT) == in_remote(WHOLE)


@pytest.mark.parametrize("kind", ["1 rank", "2 ranks"])
def test_the_limit_of_our_own_is_kept_and_the_oldest_go(tmp_path: Path, kind: str) -> None:
    folder, limit_nbytes, num_prompts = tmp_path / "remote", 96 * 1024, 40
    with remote_world(tmp_path, f"file://{folder}", kind, max_remote_size=limit_nbytes / GIB) as world:
        stored = [Prompt(number) for number in range(num_prompts)]
        for prompt in stored:
            assert world.store(prompt) == WHOLE
            world.flush()
            assert size_of(folder) <= limit_nbytes
        traffic = world.remote_traffic
        assert (traffic.written, traffic.failed, traffic.dropped) == (3 * num_prompts, 0, 0)
        assert traffic.evicted > 3 * 10, "far more was stored"
        world.drop_local()
        counts = [world.locate(prompt).remote for prompt in stored]
        assert counts == sorted(counts), "the oldest first"
        assert counts[0] == 0 and counts[-5:] == [WHOLE] * 5
        assert world.retrieved(stored[-1]) == WHOLE
        assert world.tiers.problems() == []


def test_a_limit_that_holds_less_than_one_prompt_holds_its_beginning(tmp_path: Path) -> None:
    folder, limit_nbytes, long = tmp_path / "remote", 16 * 1024, Prompt(1, num_chunks=15)
    with remote_world(tmp_path, f"file://{folder}", max_remote_size=limit_nbytes / GIB) as world:
        assert world.store(long) == 15 * C
        world.flush()
        world.drop_local()
        assert size_of(folder) <= limit_nbytes
        assert 0 < world.retrieved(long) < 15 * C
        assert world.tiers.problems() == []


def size_of(folder: Path) -> int:
    """Bytes of all objects."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# -- a store of one's own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WORLDS)
def test_a_store_of_ones_own(tmp_path: Path, users_url: str, kind: str) -> None:
    with remote_world(tmp_path, users_url, kind, 2) as first:
        first.shared(PROMPT)
        assert users_store(users_url).objects
    with remote_world(tmp_path, users_url, kind, 2) as second:
        assert second.retrieved(PROMPT) == WHOLE
        assert second.world.engines[0].clear(locations=["remote"]).num_removed == 3
        assert users_store(users_url).objects == {}
    assert users_store(users_url).num_calls("close") == 2


def test_a_scheme_that_nobody_knows_is_refused_without_its_password(tmp_path: Path) -> None:
    url = "yourstore://me:se-cret@somewhere"
    with (
        pytest.raises(ConfigError, match="no backend has the scheme 'yourstore'") as refused,
        remote_world(tmp_path, url),
    ):
        pass
    assert "se-cret" not in str(refused.value) and "mystore" not in str(refused.value)
