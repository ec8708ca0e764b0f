"""Tiers as values: what the configuration's keys come to, what contradicts itself, and what is never shown."""

import pickle

import pytest

from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.errors import ConfigError, IntegrityError
from lmcache_ray.tiers.counts import TierClearCounts
from lmcache_ray.tiers.hits import TierHits
from lmcache_ray.tiers.spec import DiskSpec, RemoteSpec, Tier, TierSpec, masked, tier_spec

GIB = 2**30


def spec_of(**keys: object) -> TierSpec:
    config = LMCacheEngineConfig.from_dict(keys)
    return tier_spec(
        local_cpu=config.local_cpu,
        local_disk=config.local_disk,
        max_local_disk_size=config.max_local_disk_size,
        remote_url=config.remote_url,
        remote_prefix=config.remote_prefix,
        remote_serde=config.remote_serde,
        blocking_timeout_secs=config.blocking_timeout_secs,
        max_remote_size=config.max_remote_size,
    )


def test_memory_is_the_only_tier_unless_others_are_asked_for() -> None:
    assert spec_of() == TierSpec(keeps_in_memory=True, disk=None, remote=None)
    assert spec_of(max_local_disk_size=20, remote_serde="zstd") == spec_of(), "limits and serdes alone are no tier"
    assert not spec_of().has_lower


def test_a_disk() -> None:
    spec = spec_of(local_disk="file:///kv/", max_local_disk_size=0.5, local_cpu=False)
    assert spec == TierSpec(False, DiskSpec("/kv", GIB // 2), None)
    assert spec.has_lower


def test_a_remote() -> None:
    spec = spec_of(remote_url="s3://bucket", remote_serde="FP8", blocking_timeout_secs=2, max_remote_size=3)
    assert spec == TierSpec(True, None, RemoteSpec("s3://bucket", "lmcache_ray", "fp8", 2.0, 3 * GIB))
    assert spec.has_lower
    own = spec_of(remote_url="memory://", remote_prefix="team-a").remote
    assert own == RemoteSpec("memory://", "team-a", "naive", 10.0, None)


def test_tiers_that_cannot_be_are_refused_here_too() -> None:
    with pytest.raises(ConfigError, match="local_cpu is false, and neither local_disk nor remote_url"):
        TierSpec(keeps_in_memory=False)
    with pytest.raises(ConfigError, match="local_disk is 'kv'; accepted: an absolute path"):
        DiskSpec("kv", 1)
    with pytest.raises(ConfigError, match="max_local_disk_size comes to 0 bytes"):
        DiskSpec("/kv", 0)


CONTRADICTIONS = [
    ({"local_disk": "/kv"}, "local_disk = '/kv' is a disk tier without room: max_local_disk_size = 0.0 GiB"),
    ({"local_disk": "/kv", "max_local_disk_size": "1e-12"}, "max_local_disk_size = 1e-12 GiB is less than a byte"),
    ({"local_cpu": False}, "local_cpu = false leaves no tier to cache in: local_disk = null and remote_url = null"),
]


@pytest.mark.parametrize(("keys", "words"), CONTRADICTIONS)
def test_keys_that_contradict_each_other_are_refused_as_the_configuration_refuses_them(
    keys: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        spec_of(**keys)
    assert words in str(refused.value) and "; accepted: " in str(refused.value)
    with pytest.raises(ConfigError) as judged:
        LMCacheEngineConfig.from_dict(keys).validate()
    assert str(judged.value).startswith(f"{refused.value} (local_")


def test_the_specs_reach_other_processes_whole() -> None:
    spec = spec_of(local_disk="/kv", max_local_disk_size=1, remote_url="redis://:hunter2@host")
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec.remote is not None and spec.remote.url == "redis://:hunter2@host"
    assert "hunter2" not in repr(spec) and "redis://***@host" in repr(spec)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://user:pw@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://:p@ss/w0rd=@host", "rediss://***@host"),
        ("unix:///run/valkey.sock?db=1&password=pw", "unix:///run/valkey.sock?db=1&password=***"),
        ("s3://bucket?endpoint=x&secret=a/b+c=&region=eu", "s3://bucket?endpoint=x&secret=***&region=eu"),
        ("file:///home/a@b/kv", "file:///home/a@b/kv"),
        (":pw@host:6379", "***@host:6379"),
    ],
)
def test_what_is_secret_in_a_url_is_not_shown(url: str, shown: str) -> None:
    assert masked(url) == shown
    assert repr(RemoteSpec(url, "p", "naive", 1.0)) == (
        f"RemoteSpec(url={shown!r}, prefix='p', serde='naive', timeout_s=1.0, max_nbytes=None)"
    )


def test_tiers_are_named_as_their_text() -> None:
    assert [tier.value for tier in Tier] == ["cpu", "disk", "remote"]
    assert Tier("disk") is Tier.DISK and Tier.DISK == "disk"


def test_hits_are_those_of_the_tiers() -> None:
    hits = TierHits(num_tokens=700, cpu=512, disk=0, remote=188)
    assert (hits.num_tokens, hits.cpu, hits.disk, hits.remote) == (700, 512, 0, 188)
    assert TierHits(0, 0, 0, 0).num_tokens == 0


@pytest.mark.parametrize("counts", [(10, 5, 4, 0), (10, 11, 0, -1), (0, 0, 0, 1)])
def test_hits_that_do_not_add_up_are_refused(counts: tuple[int, int, int, int]) -> None:
    with pytest.raises(IntegrityError, match=f"a hit of {counts[0]} tokens"):
        TierHits(*counts)


def test_clear_counts_reach_other_processes_whole() -> None:
    counts = TierClearCounts({Tier.CPU: 2, Tier.REMOTE: 3}, {Tier.CPU: 1, Tier.REMOTE: 0}, 3, 1, (0, 2))
    assert pickle.loads(pickle.dumps(counts)) == counts
