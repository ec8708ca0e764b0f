"""LMCache's keys: a file with all its defaults loads; a key that asks for an absent feature is refused."""

from pathlib import Path

import pytest

from lmcache_ray.config import LMCacheEngineConfig
from lmcache_ray.config_compat import ABSENT_KEYS
from lmcache_ray.config_sources import KNOWN_KEYS
from lmcache_ray.errors import ConfigError

LMCACHE_0_3_15 = """
chunk_size: 256
local_cpu: true
max_local_cpu_size: 5.0
reserve_local_cpu_size: 0.0
local_disk: null
max_local_disk_size: 0.0
remote_url: null
remote_serde: naive
use_layerwise: false
save_decode_cache: false
pre_caching_hash_algorithm: builtin
enable_blending: false
blend_recompute_ratios: null
blend_thresholds: null
blend_check_layers: null
blend_min_tokens: 256
blend_special_str: " # # "
enable_p2p: false
p2p_host: null
p2p_init_ports: null
p2p_lookup_ports: null
enable_controller: false
lmcache_instance_id: null
controller_pull_url: null
controller_reply_url: null
lmcache_worker_ports: null
lmcache_worker_ids: null
lmcache_worker_heartbeat_delay_time: 10
lmcache_worker_heartbeat_time: null
enable_pd: false
pd_role: null
pd_buffer_size: null
pd_buffer_device: null
pd_peer_host: null
pd_peer_init_port: null
pd_peer_alloc_port: null
pd_proxy_host: null
pd_proxy_port: null
transfer_channel: null
nixl_backends: null
nixl_buffer_size: null
nixl_buffer_device: null
gds_path: null
cufile_buffer_size: null
audit_actual_remote_url: null
internal_api_server_host: 0.0.0.0
extra_config: {}
save_unfull_chunk: false
blocking_timeout_secs: 10
external_lookup_client: null
py_enable_gc: true
cache_policy: LRU
numa_mode: null
enable_async_loading: false
internal_api_server_enabled: false
internal_api_server_port_start: 6999
priority_limit: null
internal_api_server_include_index_list: null
internal_api_server_socket_path_prefix: null
runtime_plugin_locations: []
storage_plugins: null
remote_storage_plugins: null
lookup_timeout_ms: 3000
min_retrieve_tokens: 0
hit_miss_ratio: null
lookup_server_worker_ids: null
enable_scheduler_bypass_lookup: false
script_allowed_imports: null
enable_lazy_memory_allocator: false
lazy_memory_initial_ratio: 0.2
lazy_memory_expand_trigger_ratio: 0.5
lazy_memory_step_ratio: 0.1
lazy_memory_safe_size: 0.0
enable_chunk_statistics: false
chunk_statistics_auto_start_statistics: false
chunk_statistics_auto_exit_timeout_hours: 0.0
chunk_statistics_auto_exit_target_unique_chunks: 0
chunk_statistics_strategy: memory_bloom_filter
enable_kv_events: false
use_gpu_connector_v3: false
pin_timeout_sec: 300
pin_check_interval_sec: 30
remote_config_url: null
app_id: null
"""

ADDED_IN_0_5_6 = """
local_cpu_use_hugepages: false
local_disk_path_sharding: by_gpu
retrieve_locations: null
store_location: null
mp_host: null
mp_port: 5555
pd_peer_query_port: null
pd_allocation_timeout_sec: .inf
pd_shutdown_timeout_sec: 5
pd_condition_poll_interval_sec: 0.005
pd_max_prefill_len: 0
pd_backend_mode: async
pd_skip_proxy_notification: false
pd_bidirectional: false
gds_path_sharding: by_gpu
gds_buffer_size: null
use_gds: true
gds_backend: cufile
maru_path: null
maru_pool_size: 4.0
internal_api_server_host: 127.0.0.1
run_script_api_enabled: false
enable_hidden_state_cache: false
"""

OLD_NAMES = [
    "enable_xpyd", "nixl_peer_host", "nixl_peer_init_port", "nixl_peer_alloc_port", "nixl_proxy_host",
    "nixl_proxy_port", "nixl_role", "controller_url", "lmcache_worker_port", "plugin_locations", "external_backends",
]  # fmt: skip


@pytest.mark.parametrize("text", [LMCACHE_0_3_15, ADDED_IN_0_5_6])
def test_a_file_with_lmcaches_defaults_loads(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"
    path.write_text(text, "utf-8")
    assert LMCacheEngineConfig.from_file(path) == LMCacheEngineConfig()


@pytest.mark.parametrize("name", [*OLD_NAMES, "nixl_buffer_size"])
def test_lmcaches_old_names_are_known(name: str) -> None:
    assert name in KNOWN_KEYS
    assert LMCacheEngineConfig.from_dict({name: None}) == LMCacheEngineConfig()
    with pytest.raises(ConfigError, match=f"{name} = .* which lmcache_ray does not have"):
        LMCacheEngineConfig.from_dict({name: "something"})


@pytest.mark.parametrize("key", sorted(ABSENT_KEYS))
def test_every_absent_feature_is_refused_with_a_sentence(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_dict({key: "something else"})
    assert f"{key} = 'something else' (argument) asks for " in str(caught.value)
    assert "which lmcache_ray does not have; accepted: " in str(caught.value)
    assert LMCacheEngineConfig.from_dict({key: None}) == LMCacheEngineConfig()


@pytest.mark.parametrize("value", [None, {}, "{}", "", "null", "~"])
def test_an_empty_extra_config_asks_for_nothing(value: object) -> None:
    assert LMCacheEngineConfig.from_dict({"extra_config": value}) == LMCacheEngineConfig()


@pytest.mark.parametrize("value", [{"save_only_first_rank": True}, '{"save_only_first_rank": true}', "true", 1])
def test_any_extra_config_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"extra_config = .* asks for options of extra_config"):
        LMCacheEngineConfig.from_dict({"extra_config": value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("lazy_memory_initial_ratio", 2), ("lazy_memory_initial_ratio", ".inf"), ("py_enable_gc", False), ("mp_port", "")],
)
def test_values_near_the_default_are_not_the_default(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} = "):
        LMCacheEngineConfig.from_dict({key: value})


@pytest.mark.parametrize("value", [0.2, "0.2", "2e-1", "0.20"])
def test_the_default_may_be_spelled_in_any_way(value: object) -> None:
    assert LMCacheEngineConfig.from_dict({"lazy_memory_initial_ratio": value}) == LMCacheEngineConfig()
