"""The configuration: its tree, the file it is read from, and what the environment says.

The only place that reads the environment.
"""

from __future__ import annotations

from sgl_krul.config.client import ClientSettings, cache_home, client_settings
from sgl_krul.config.reader import load_config, parse_config, resolve_config, to_mapping
from sgl_krul.config.tree import (
    ChunkConfig,
    CodingMethod,
    Config,
    EstimatorConfig,
    FsyncPolicy,
    LinkConfig,
    MemoryConfig,
    PauseConfig,
    PlacementConfig,
    QualityConfig,
    RedisConfig,
    Replicate,
    RestoreConfig,
    RestoreStrategy,
    SessionConfig,
    SharingKind,
    SsdConfig,
    TenantRuleConfig,
    TenantsConfig,
    WindowKind,
)
from sgl_krul.values import format_duration, format_size

__all__ = [
    "ChunkConfig",
    "ClientSettings",
    "CodingMethod",
    "Config",
    "EstimatorConfig",
    "FsyncPolicy",
    "LinkConfig",
    "MemoryConfig",
    "PauseConfig",
    "PlacementConfig",
    "QualityConfig",
    "RedisConfig",
    "Replicate",
    "RestoreConfig",
    "RestoreStrategy",
    "SessionConfig",
    "SharingKind",
    "SsdConfig",
    "TenantRuleConfig",
    "TenantsConfig",
    "WindowKind",
    "cache_home",
    "client_settings",
    "format_duration",
    "format_size",
    "load_config",
    "parse_config",
    "resolve_config",
    "to_mapping",
]
