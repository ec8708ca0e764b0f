"""Which backend a URL means, what is refused, and that nothing is connected to before the first call."""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmcache_ray.errors import ConfigError, StorageError, StorageUnavailableError
from lmcache_ray.storage.backends import ENTRY_POINT_GROUP, open_backend
from lmcache_ray.storage.base import StorageBackend
from lmcache_ray.storage.fsspec_backend import FsspecBackend
from tests.redis_server import RedisServer, free_port


def opened(url: str) -> StorageBackend:
    return open_backend(url, timeout_s=5.0)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path; a package's files written there are as good as installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("a_users_store", None)


def install(folder: Path, *points: EntryPoint, code: str = "") -> None:
    metadata = folder / "a_users_store-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: a-users-store\nVersion: 1.0\n")
    lines = [f"[{ENTRY_POINT_GROUP}]", *(f"{point.name} = {point.value}" for point in points)]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    (folder / "a_users_store.py").write_text(code)


@pytest.mark.parametrize("url", ["lm://host:65432", "mooncakestore://h", "s4://bucket", "nothing here://x"])
def test_an_unknown_scheme_is_refused_with_known_ones(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        opened(url)
    text = str(refused.value)
    assert "no backend has the scheme" in text
    assert url in text
    for scheme in ("file://", "s3://", "gs://", "memory://", "redis://", "rediss://", "unix://"):
        assert scheme in text


@pytest.mark.parametrize("url", ["", "/a/path", "host:6379"])
def test_a_url_needs_a_scheme(url: str) -> None:
    with pytest.raises(ConfigError, match="has no scheme"):
        opened(url)


@pytest.mark.parametrize(("url", "reason"), [
    ("file://relative/path", "not an absolute path"),
    ("file://", "not an absolute path"),
    ("s3://", "bucket|s3fs"),
    ("unix://", "names no socket"),
    ("redis://host:notaport/0", "cannot be read"),
    ("redis://host/a-name", "number of a database"),
    ("redis://host/0?colour=red", "colour"),
    ("redis://host/0?decode_responses=1", "decode_responses"),
    ("redis://host/0?socket_timeout=soon", "socket_timeout"),
])  # fmt: skip
def test_what_cannot_be_meant_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        opened(url)
    assert "remote_url" in str(refused.value)


@pytest.mark.parametrize("url", ["redis://user:se-cret@host/x", "xyz://user:se-cret@host/x", "redis://:se-cret@h:1x"])
def test_passwords_are_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        opened(url)
    assert "se-cret" not in str(refused.value)
    assert "***" in str(refused.value)


def test_a_server_that_is_absent_is_no_error_before_the_first_call() -> None:
    backend = opened(f"redis://user:se-cret@127.0.0.1:{free_port()}/0")
    for call in (lambda: backend.get("a"), lambda: backend.put("a", [b"1"]), lambda: backend.evicts_itself):
        with pytest.raises(StorageUnavailableError, match=r"127\.0\.0\.1") as refused:
            call()
        assert "se-cret" not in str(refused.value)


def test_the_redis_package_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lmcache_ray.storage.redis_backend", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"needs the package redis.*pip install 'lmcache-ray\[redis\]'"):
        opened("redis://host/0")


def test_fsspec_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lmcache_ray.storage.fsspec_backend", raising=False)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"needs the package fsspec.*pip install 'lmcache-ray\[fsspec\]'"):
        opened("file:///tmp/x")


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_the_package_of_a_bucket_may_be_missing() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'lmcache-ray\[s3\]'"):
        opened("s3://bucket/prefix")


def test_an_entry_point_adds_a_scheme(installed: Path) -> None:
    install(
        installed,
        EntryPoint("mine", "a_users_store:open_mine", ENTRY_POINT_GROUP),
        code="def open_mine(url, timeout_s):\n    return url, timeout_s\n",
    )
    made: object = open_backend("MINE://anything", timeout_s=2.5)
    assert made == ("MINE://anything", 2.5)
    with pytest.raises(ConfigError, match="mine://"):
        opened("yours://anything")


def test_an_entry_point_wins_over_what_is_built_in(installed: Path) -> None:
    install(
        installed,
        EntryPoint("redis", "a_users_store:open_mine", ENTRY_POINT_GROUP),
        code="def open_mine(url, timeout_s):\n    return 'mine'\n",
    )
    made: object = opened("redis://host/0")
    assert made == "mine"


@pytest.mark.parametrize("code", ["import no_such_package_at_all\n", "open_yours = None\n"])
def test_an_entry_point_that_cannot_be_loaded_is_named(installed: Path, code: str) -> None:
    install(installed, EntryPoint("mine", "a_users_store:open_mine", ENTRY_POINT_GROUP), code=code)
    with pytest.raises(ConfigError, match=r"'mine'.*a_users_store:open_mine.*lmcache_ray\.storage_backends"):
        opened("mine://x")


def test_a_folder_that_is_a_file_is_a_fault_of_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    backend = opened(f"file://{tmp_path}/file")
    for call in (lambda: backend.put("a/b", [b"1"]), lambda: backend.get("a"), lambda: list(backend.list("a"))):
        with pytest.raises(StorageError, match="file") as refused:
            call()
        assert not isinstance(refused.value, StorageUnavailableError), "it answers, and will not answer otherwise"
    assert (tmp_path / "file").read_text() == "not a folder"


def test_half_written_files_of_dead_writers_are_swept_and_never_listed(tmp_path: Path) -> None:
    aside = tmp_path / ".parts"
    aside.mkdir()
    for name, age_s in (("old", 7200), ("young", 60)):
        (aside / name).write_text("half")
        modified = (aside / name).stat().st_mtime - age_s
        os.utime(aside / name, (modified, modified))
    backend = opened(f"file://{tmp_path}")
    assert list(backend.list("")) == []
    backend.put("a/b", [b"1"])
    assert [path.name for path in aside.iterdir()] == ["young"]
    assert [stored.name for stored in backend.list("")] == ["a/b"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    backend = opened(f"file://{tmp_path}")
    backend.put("a", [b"a file where a folder should be"])
    with pytest.raises(StorageError, match="could not put a/b"):
        backend.put("a/b", [b"1"])
    assert list((tmp_path / ".parts").iterdir()) == []


def test_empty_folders_go_and_others_stay(tmp_path: Path) -> None:
    backend = opened(f"file://{tmp_path}")
    for name in ("x/y/1", "x/z/2"):
        backend.put(name, [b"1"])
    (tmp_path / "x" / "z" / "somebody's file").write_text("stays")
    backend.delete(["x/y/1", "x/z/2"])
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {".parts", "x", "x/z", "x/z/somebody's file"}


def test_a_filesystem_that_cannot_write_says_so(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")

    class ReadOnly(fsspec.AbstractFileSystem):  # type: ignore[misc,name-defined]
        protocol = "readonly"

        def _open(self, path: str, mode: str = "rb", **kwargs: object) -> object:
            raise NotImplementedError("only for reading")

    backend = FsspecBackend(ReadOnly(), "root", place="readonly://root", puts_whole=True)
    with pytest.raises(StorageError, match="readonly://root could not put a"):
        backend.put("a", [b"1"])


def test_a_redis_server_with_a_limit_evicts_by_itself(redis_server: RedisServer) -> None:
    redis_server.kill()
    redis_server.start(["--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru"])
    assert opened(redis_server.url).evicts_itself
    redis_server.kill()
    redis_server.start(["--maxmemory", "2mb", "--maxmemory-policy", "volatile-lru"])
    backend = opened(redis_server.url)
    assert not backend.evicts_itself, "that policy drops keys with a time to live only, which ours have not"
    with pytest.raises(StorageError, match="refused to take a") as refused:
        backend.put("a", [bytes(4 * 2**20)])
    assert not isinstance(refused.value, StorageUnavailableError)


def test_a_redis_listing_does_not_count_as_a_use(redis_server: RedisServer) -> None:
    redis = pytest.importorskip("redis")
    backend = opened(redis_server.url)
    backend.put("x/a", [b"1"])
    client = redis.Redis.from_url(redis_server.url)
    while not (idle_s := client.object("IDLETIME", "x/a")):
        pass
    list(backend.list("x"))
    assert client.object("IDLETIME", "x/a") >= idle_s
