"""Which objects go when the store is full, from listings written by hand."""

from lmcache_ray.storage.base import StoredObject
from lmcache_ray.storage.remote_names import ChunkPlace, RemoteNames, Writing
from lmcache_ray.storage.remote_space import Removals, RoomMade, parts_by_chunk, plan_room
from tests.unit.shard_builders import key_of

NAMES = RemoteNames("p", "scope", "naive")
NOW_S = 10_000.0
ORPHANED_BEFORE_S = NOW_S - 3600.0

ONE = Writing("a", 1)
TWO = Writing("b", 2)


def manifest(number: int, age_s: float, names: RemoteNames = NAMES) -> StoredObject:
    return StoredObject(names.manifest(key_of(number)), 10, NOW_S - age_s)


def shards(number: int, age_s: float, writing: Writing = ONE, names: RemoteNames = NAMES) -> list[StoredObject]:
    """Two of 100 bytes."""
    return [StoredObject(names.shard(key_of(number), writing, rank), 100, NOW_S - age_s) for rank in (0, 1)]


def chunk(number: int, age_s: float, names: RemoteNames = NAMES) -> list[StoredObject]:
    """210 bytes."""
    return [*shards(number, age_s + 1, names=names), manifest(number, age_s, names)]


def plan(
    objects: list[StoredObject], nbytes: int, limit_nbytes: int, named: dict[ChunkPlace, Writing | None] | None = None
) -> Removals:
    return plan_room(
        parts_by_chunk(objects, NAMES),
        named or {},
        nbytes=nbytes,
        limit_nbytes=limit_nbytes,
        orphaned_before_s=ORPHANED_BEFORE_S,
    )


def names_of(objects: list[StoredObject]) -> list[str]:
    return [stored.name for stored in objects]


def test_nothing_goes_while_there_is_room() -> None:
    removals = plan([*chunk(1, 50), *chunk(2, 40)], nbytes=80, limit_nbytes=500)
    assert removals == Removals([], [], RoomMade(True, 420, 0, 0))


def test_the_oldest_chunks_go_whole_and_no_more_than_needed() -> None:
    oldest, older, young = chunk(1, 90), chunk(2, 60), chunk(3, 30)
    removals = plan([*young, *oldest, *older], nbytes=100, limit_nbytes=530)
    assert removals.manifests == [oldest[2].name]
    assert removals.shards == names_of(oldest[:2])
    assert removals.room == RoomMade(True, 420, 1, 0)
    removals = plan([*young, *oldest, *older], nbytes=101, limit_nbytes=520)
    assert removals.manifests == [oldest[2].name, older[2].name]
    assert removals.room == RoomMade(True, 210, 2, 0)


def test_a_chunk_is_as_young_as_its_last_use() -> None:
    """Servers tell when an object was used: one of its objects is enough."""
    used = [*shards(1, 500), manifest(1, 1)]
    removals = plan([*used, *chunk(2, 100)], nbytes=100, limit_nbytes=400)
    assert removals.manifests == [NAMES.manifest(key_of(2))]


def test_orphans_go_first_and_in_any_case_but_not_the_young() -> None:
    dead, under_way = shards(1, 3601), shards(2, 3599)
    removals = plan([*dead, *under_way, *chunk(3, 9999)], nbytes=0, limit_nbytes=10**6)
    assert removals == Removals([], names_of(dead), RoomMade(True, 410, 0, 2))


def test_an_earlier_writing_of_a_chunk_is_an_orphan() -> None:
    objects = [*shards(1, 5000, ONE), *shards(1, 4000, TWO), manifest(1, 4000)]
    place = NAMES.place(key_of(1))
    assert parts_by_chunk(objects, NAMES)[place].is_ambiguous
    assert plan(objects, 0, 10**6, {place: TWO}).shards == names_of(objects[:2])
    assert plan(objects, 0, 10**6, {place: ONE}).shards == names_of(objects[2:4])


def test_a_chunk_whose_manifest_says_nothing_goes_as_a_whole() -> None:
    objects = [*shards(1, 5000, ONE), *shards(1, 4000, TWO), manifest(1, 4000)]
    place = NAMES.place(key_of(1))
    assert plan(objects, 0, 10**6, {place: None}) == Removals([], [], RoomMade(True, 410, 0, 0))
    removals = plan(objects, 100, 410, {place: None})
    assert removals.manifests == [objects[4].name]
    assert sorted(removals.shards) == sorted(names_of(objects[:4]))


def test_other_scopes_and_serdes_count_and_go_by_age_too() -> None:
    elsewhere = RemoteNames("p", "another", "fp8")
    removals = plan([*chunk(1, 10), *chunk(1, 20, elsewhere)], nbytes=210, limit_nbytes=420)
    assert removals.manifests == [elsewhere.manifest(key_of(1))]
    assert removals.room.used_nbytes == 210


def test_what_is_not_ours_neither_counts_nor_goes() -> None:
    foreign = [StoredObject("p/scope/readme.txt", 10**9, 0.0), StoredObject("elsewhere", 10**9, 0.0)]
    assert plan([*foreign, *chunk(1, 10)], 0, 300) == Removals([], [], RoomMade(True, 210, 0, 0))


def test_what_can_never_fit_costs_no_chunk() -> None:
    removals = plan(chunk(1, 10), nbytes=1001, limit_nbytes=1000)
    assert removals == Removals([], [], RoomMade(False, 210, 0, 0))


def test_where_writings_under_way_take_the_room_no_chunk_goes_for_nothing() -> None:
    removals = plan([*shards(1, 5), *chunk(2, 10)], nbytes=900, limit_nbytes=1000)
    assert removals == Removals([], [], RoomMade(False, 410, 0, 0))
    assert plan([*shards(1, 5), *chunk(2, 10)], nbytes=800, limit_nbytes=1000).room == RoomMade(True, 200, 1, 0)
