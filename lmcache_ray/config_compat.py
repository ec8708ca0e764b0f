"""LMCache's keys for features that are not here: accepted at LMCache's default, refused otherwise. Pure.

A LMCache file usually lists keys that nobody changed. Such a file must load; but a key that asks for something must
never be dropped in silence. The defaults are those of LMCache 0.3.15 and 0.5.6 (two values where they differ).
"""

from typing import Final

from lmcache_ray.config_spelling import Truth, is_null, text_of

Default = bool | int | float | str | tuple[str, ...] | None

_FEATURES: Final[dict[str, dict[str, Default]]] = {
    "a choice of disk per rank (each rank has a directory of its own below local_disk)": {
        "local_disk_path_sharding": "by_gpu"
    },
    "LMCache's audit of a remote": {"audit_actual_remote_url": None},
    "a choice of tiers per operation": {"retrieve_locations": None, "store_location": None},
    "a reserve of CPU memory": {"reserve_local_cpu_size": 0.0},
    "huge pages": {"local_cpu_use_hugepages": False},
    "layerwise transfer": {"use_layerwise": False},
    "caching of decoded tokens": {"save_decode_cache": False},
    "a choice of hash function (chunk keys are always SHA-256)": {"pre_caching_hash_algorithm": "builtin"},
    "blending": {
        "enable_blending": False,
        "blend_recompute_ratios": None,
        "blend_thresholds": None,
        "blend_check_layers": None,
        "blend_min_tokens": 256,
        "blend_special_str": " # # ",
    },
    "peer-to-peer sharing": {
        "enable_p2p": False,
        "p2p_host": None,
        "p2p_init_ports": None,
        "p2p_lookup_ports": None,
        "transfer_channel": None,
    },
    "LMCache's multi-process server": {"mp_host": None, "mp_port": 5555},
    "LMCache's cache controller": {
        "enable_controller": False,
        "controller_pull_url": None,
        "controller_reply_url": None,
        "lmcache_worker_ports": None,
        "lmcache_worker_ids": None,
        "lmcache_worker_heartbeat_delay_time": 10,
        "lmcache_worker_heartbeat_time": None,
    },
    "disaggregated prefill": {
        "enable_pd": False,
        "pd_role": None,
        "pd_buffer_size": None,
        "pd_buffer_device": None,
        "pd_peer_host": None,
        "pd_peer_init_port": None,
        "pd_peer_alloc_port": None,
        "pd_peer_query_port": None,
        "pd_proxy_host": None,
        "pd_proxy_port": None,
        "pd_allocation_timeout_sec": float("inf"),
        "pd_shutdown_timeout_sec": 5.0,
        "pd_condition_poll_interval_sec": 0.005,
        "pd_max_prefill_len": 0,
        "pd_backend_mode": "async",
        "pd_skip_proxy_notification": False,
        "pd_bidirectional": False,
    },
    "NIXL storage": {"nixl_backends": None, "nixl_buffer_size": None, "nixl_buffer_device": None},
    "GPU direct storage": {
        "gds_path": None,
        "gds_path_sharding": "by_gpu",
        "gds_buffer_size": None,
        "cufile_buffer_size": None,
        "use_gds": True,
        "gds_backend": "cufile",
    },
    "Maru shared memory": {"maru_path": None, "maru_pool_size": 4.0},
    "LMCache's internal API server": {
        "internal_api_server_enabled": False,
        "internal_api_server_host": ("0.0.0.0", "127.0.0.1"),
        "internal_api_server_port_start": 6999,
        "internal_api_server_include_index_list": None,
        "internal_api_server_socket_path_prefix": None,
        "script_allowed_imports": None,
        "run_script_api_enabled": False,
    },
    "options of extra_config": {"extra_config": None},
    "LMCache's lookup clients and servers": {
        "external_lookup_client": None,
        "lookup_server_worker_ids": None,
        "enable_scheduler_bypass_lookup": False,
        "hit_miss_ratio": None,
    },
    "a switch for Python's garbage collector": {"py_enable_gc": True},
    "the cost-aware cache policy": {"cost_aware_half_life_seconds": 60.0, "cost_aware_ewma_alpha": 0.2},
    "NUMA placement": {"numa_mode": None},
    "asynchronous loading": {"enable_async_loading": False},
    "request priorities": {"priority_limit": None},
    "plugins": {"runtime_plugin_locations": None, "storage_plugins": None, "remote_storage_plugins": None},
    "the lazy memory allocator": {
        "enable_lazy_memory_allocator": False,
        "lazy_memory_initial_ratio": 0.2,
        "lazy_memory_expand_trigger_ratio": 0.5,
        "lazy_memory_step_ratio": 0.1,
        "lazy_memory_safe_size": 0.0,
    },
    "chunk statistics": {
        "enable_chunk_statistics": False,
        "chunk_statistics_auto_start_statistics": False,
        "chunk_statistics_auto_exit_timeout_hours": 0.0,
        "chunk_statistics_auto_exit_target_unique_chunks": 0,
        "chunk_statistics_strategy": "memory_bloom_filter",
    },
    "KV events": {"enable_kv_events": False},
    "a choice of GPU connector": {"use_gpu_connector_v3": False},
    "a period of pin checks (pins end by their own deadline)": {"pin_check_interval_sec": 30},
    "a remote configuration service": {"remote_config_url": None, "app_id": None},
    "caching of hidden states": {
        "enable_hidden_state_cache": False,
        "max_hidden_state_cpu_size": 2.0,
        "hidden_state_layers": None,
        "hidden_states_retrieve_mode": "prefix_strict",
    },
}

_OLD_NAMES: Final = {
    "enable_xpyd": "enable_pd",
    "nixl_role": "pd_role",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
}

_DEFAULTS: Final[dict[str, Default]] = {
    key: default for defaults in _FEATURES.values() for key, default in defaults.items()
}
_FEATURE_OF: Final = {key: feature for feature, defaults in _FEATURES.items() for key in defaults}

ABSENT_KEYS: Final[frozenset[str]] = frozenset(_DEFAULTS) | frozenset(_OLD_NAMES)
"""LMCache's keys, old names included, that this project knows but has no feature for."""


def is_absent_flag(key: str) -> bool:
    """Whether the absent feature's key is a boolean."""
    return isinstance(_DEFAULTS[_OLD_NAMES.get(key, key)], bool)


def refusal_of(key: str, value: object) -> str | None:
    """Why `value` cannot be given to `key`, one of `ABSENT_KEYS`; None when it is LMCache's default."""
    name = _OLD_NAMES.get(key, key)
    default = _DEFAULTS[name]
    if is_null(value) or _is_default(value, default):
        return None
    return f"asks for {_FEATURE_OF[name]}, which lmcache_ray does not have; accepted: {_spelled(default)}"


def _is_default(value: object, default: Default) -> bool:
    text = text_of(value)
    if default is None:
        return text in ("", "{}", "[]") or (isinstance(value, dict | list | tuple) and not value)
    if text is None:
        return False
    if isinstance(default, str):
        return text == default.strip()
    if isinstance(default, tuple):
        return text in default
    try:
        if isinstance(default, bool):
            return Truth()(text) == default
        return float("inf" if text == ".inf" else text) == default  # YAML writes infinity with a point
    except ValueError:
        return False


def _spelled(default: Default) -> str:
    if isinstance(default, tuple):
        return " or ".join(default)
    if isinstance(default, str):
        return repr(default)
    return "null" if default is None else str(default).lower()
