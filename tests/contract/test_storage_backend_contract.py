"""What every storage backend must do; a new one joins by its entry in `BACKENDS`."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest

from lmcache_ray.errors import InvalidRequestError
from lmcache_ray.storage.backends import open_backend
from lmcache_ray.storage.base import StorageBackend
from lmcache_ray.storage.guarded import GuardedBackend
from tests.redis_server import RedisServer

TIMEOUT_S = 20.0

MakeUrl = Callable[[pytest.FixtureRequest], str]


def file_url(request: pytest.FixtureRequest) -> str:
    tmp_path: Path = request.getfixturevalue("tmp_path")
    return f"file://{tmp_path}/not yet there/@ü"


def memory_url(request: pytest.FixtureRequest) -> str:
    return f"memory://{uuid4().hex}"  # fsspec has one memory for the whole process


def redis_url(request: pytest.FixtureRequest) -> str:
    server: RedisServer = request.getfixturevalue("redis_server")
    return server.url


def unix_url(request: pytest.FixtureRequest) -> str:
    server: RedisServer = request.getfixturevalue("redis_server")
    return server.unix_url


BACKENDS: dict[str, tuple[MakeUrl, bool]] = {
    "file": (file_url, False),
    "memory": (memory_url, False),
    "redis": (redis_url, False),
    "unix": (unix_url, False),
    "file, guarded": (file_url, True),
    "redis, guarded": (redis_url, True),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[StorageBackend]:
    make_url, is_guarded = BACKENDS[request.param]
    made = open_backend(make_url(request), timeout_s=TIMEOUT_S)
    if is_guarded:
        made = GuardedBackend(made, timeout_s=TIMEOUT_S, clock=time.monotonic)
    yield made
    made.close()


def bytes_at(backend: StorageBackend, name: str) -> bytes | None:
    found = backend.get(name)
    return None if found is None else bytes(found)


def names_in(backend: StorageBackend, folder: str) -> list[str]:
    return sorted(stored.name for stored in backend.list(folder))


def test_an_empty_store_has_nothing(backend: StorageBackend) -> None:
    assert backend.get("a/b") is None
    assert backend.get_many(["a/b", "c"]) == [None, None]
    assert backend.exist(["a/b", "c"]) == [False, False]
    assert list(backend.list("")) == []
    assert list(backend.list("a")) == []
    backend.delete(["a/b"])


def test_parts_become_one_object(backend: StorageBackend) -> None:
    backend.put("a/b/c.zstd", [b"head", bytearray(b"\0\xff"), memoryview(b"tail")])
    assert bytes_at(backend, "a/b/c.zstd") == b"head\0\xfftail"
    assert backend.exist(["a/b", "a/b/c.zstd", "a/b/c"]) == [False, True, False]


def test_an_object_may_be_empty_and_may_be_large(backend: StorageBackend) -> None:
    large = bytes(range(256)) * 2**14
    backend.put("x/empty", [])
    backend.put("x/large", [large[:1000], large[1000:]])
    assert bytes_at(backend, "x/empty") == b""
    assert bytes_at(backend, "x/large") == large


def test_a_second_put_takes_the_place_of_the_first(backend: StorageBackend) -> None:
    backend.put("a/b", [b"first, and longer"])
    backend.put("a/b", [b"second"])
    assert bytes_at(backend, "a/b") == b"second"
    assert names_in(backend, "") == ["a/b"]


def test_many_are_answered_in_the_order_asked(backend: StorageBackend) -> None:
    for name in ("b", "a", "c"):
        backend.put(f"x/{name}", [name.encode()])
    found = backend.get_many(["x/c", "x/none", "x/a", "x/c"])
    assert [None if each is None else bytes(each) for each in found] == [b"c", None, b"a", b"c"]
    assert backend.exist(["x/none", "x/b"]) == [False, True]
    assert backend.get_many([]) == [] and backend.exist([]) == []


def test_delete_takes_these_and_no_others(backend: StorageBackend) -> None:
    for name in ("x/a", "x/b", "y/c"):
        backend.put(name, [b"1"])
    backend.delete(["x/a", "x/never", "y/c"])
    assert names_in(backend, "") == ["x/b"]
    backend.delete([])
    backend.put("y/c", [b"2"])
    assert bytes_at(backend, "y/c") == b"2"


def test_more_objects_than_one_request_holds(backend: StorageBackend) -> None:
    names = [f"x/{number:04}" for number in range(1100)]
    for name in names:
        backend.put(name, [b"1"])
    assert names_in(backend, "x") == names
    backend.delete(names)
    assert list(backend.list("")) == []


def test_a_listing_is_of_a_folder_and_tells_size_and_age(backend: StorageBackend) -> None:
    before = time.time()
    for name in ("ab/c/d", "ab/e", "abc/f", "x"):
        backend.put(name, [b"1" * 10_000])
    after = time.time()
    assert names_in(backend, "ab") == ["ab/c/d", "ab/e"]
    assert names_in(backend, "") == ["ab/c/d", "ab/e", "abc/f", "x"]
    for stored in backend.list("ab"):
        assert 10_000 <= stored.nbytes <= 16_000, "the length, or what it takes in the store"
        assert before - 2 <= stored.modified_s <= after + 2, "file systems and servers count in whole seconds"


NO_NAMES = ("", "/a", "a/", "a//b", "../a", "a/../b", "a/./b", ".parts/a", "ä", "a b", "a*", "a\n", "x" * 600)


@pytest.mark.parametrize("call", [
    lambda backend, name: backend.put(name, [b"1"]),
    lambda backend, name: backend.get(name),
    lambda backend, name: backend.get_many(["a", name]),
    lambda backend, name: backend.exist(["a", name]),
    lambda backend, name: backend.delete(["a", name]),
    lambda backend, name: list(backend.list(name or "..")),
], ids=["put", "get", "get_many", "exist", "delete", "list"])  # fmt: skip
def test_what_is_no_name_is_refused(backend: StorageBackend, call: Callable[[StorageBackend, str], object]) -> None:
    for name in NO_NAMES:
        with pytest.raises(InvalidRequestError, match="cannot name an object"):
            call(backend, name)


def test_readers_see_the_old_object_or_the_whole_new_one(backend: StorageBackend) -> None:
    """A writer replaces an object, in several parts; whoever reads meanwhile sees one letter only."""
    num_bytes, letters = 300_000, b"abcdefghijklmnop"
    backend.put("x/y", [b"z" * num_bytes])
    seen: list[bytes] = []
    is_done = threading.Event()

    def read() -> None:
        while not is_done.is_set():
            seen.append(bytes_at(backend, "x/y") or b"nothing")

    reader = threading.Thread(target=read)
    reader.start()
    for letter in letters:
        backend.put("x/y", [bytes([letter]) * (num_bytes // 3)] * 3)
    is_done.set()
    reader.join()
    assert seen
    for found in seen:
        assert len(found) == num_bytes and len(set(found)) == 1


def test_several_threads_at_once(backend: StorageBackend) -> None:
    """Folders that one thread empties and removes are another one's to write into."""

    def work(number: int) -> None:
        for turn in range(20):
            name, value = f"shared/folder/{number}", f"{number} {turn}".encode()
            backend.put(name, [value])
            assert bytes_at(backend, name) == value
            backend.delete([name])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert list(backend.list("")) == []


def test_these_stores_evict_nothing_as_they_are(backend: StorageBackend) -> None:
    assert not backend.evicts_itself
