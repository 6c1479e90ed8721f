"""The tree of the configuration: frozen; each key with its default and how it is read."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from sgl_krul.config.client import cache_home
from sgl_krul.values import (
    Leaf,
    choice_leaf,
    count_leaf,
    duration_leaf,
    flag_leaf,
    fraction_leaf,
    level_leaf,
    path_leaf,
    read_size,
    size_leaf,
    text_leaf,
)

__all__ = [
    "ChunkConfig",
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
    "default_ssd_path",
]

FsyncPolicy = Literal["always", "commit", "never"]
Replicate = Literal["ssd", "redis", "both"]
RestoreStrategy = Literal["optimal", "load", "recompute", "half", "paper"]
CodingMethod = Literal["auto", "krul", "fixed", "int8", "int4"]
SharingKind = Literal["merged", "raw"]
WindowKind = Literal["relative", "absolute"]
_MAX_CHUNK_TOKENS = 1 << 20  # what a chunk header can say


def default_ssd_path(environ: Mapping[str, str]) -> Path:
    return cache_home(environ) / "sessions"


@dataclass(frozen=True)
class MemoryConfig:
    """The memory tier."""

    capacity_bytes: int = field(default=4 << 30, metadata=size_leaf(at_least=1))
    prefault_bytes: int = field(default=1 << 30, metadata=size_leaf(at_least=0))


@dataclass(frozen=True)
class SsdConfig:
    """The SSD tier. `path` is made when it is not there."""

    path: Path = field(default_factory=lambda: default_ssd_path(os.environ), metadata=path_leaf())
    capacity_bytes: int = field(default=64 << 30, metadata=size_leaf(at_least=1))
    free_space_floor_bytes: int = field(default=2 << 30, metadata=size_leaf(at_least=0))
    fsync: FsyncPolicy = field(default="commit", metadata=choice_leaf("always", "commit", "never"))
    daily_write_bytes: int = field(default=0, metadata=size_leaf(at_least=0))


@dataclass(frozen=True)
class RedisConfig:
    """The Redis tier. `url` has no default; `ttl_s`: what nobody used for so long vanishes by itself."""

    url: str = field(
        repr=False,  # may hold a password
        metadata=text_leaf(
            "a URL such as redis://127.0.0.1:6379/0 or redis+cluster://host1:6379,host2:6379", secret=True
        ),
    )
    username: str | None = field(default=None, metadata=text_leaf("a user name, or null", optional=True))
    password: str | None = field(
        default=None, repr=False, metadata=text_leaf("a password, or null", optional=True, secret=True)
    )
    tls_ca_file: Path | None = field(default=None, metadata=path_leaf(optional=True))
    key_prefix: str = field(default="krul", metadata=text_leaf("a word before every key"))
    capacity_bytes: int = field(default=64 << 30, metadata=size_leaf(at_least=1))
    ttl_s: float = field(default=7 * 86400.0, metadata=duration_leaf(at_least_s=60))
    timeout_s: float = field(default=2.0, metadata=duration_leaf(at_least_s=0.01, at_most_s=60))
    connect_timeout_s: float = field(default=1.0, metadata=duration_leaf(at_least_s=0.01, at_most_s=60))
    connections: int = field(default=8, metadata=count_leaf(at_most=256))
    max_in_flight_bytes: int = field(default=256 << 20, metadata=size_leaf(at_least=1 << 20))
    lease_s: float = field(default=30.0, metadata=duration_leaf(at_least_s=1, at_most_s=3600))


@dataclass(frozen=True)
class PlacementConfig:
    """Where paused sessions lie, and when they move on to a slower tier."""

    replicate: Replicate = field(default="ssd", metadata=choice_leaf("ssd", "redis", "both"))
    memory_max_bytes: int = field(default=0, metadata=size_leaf(at_least=0))
    memory_age_s: float = field(default=600.0, metadata=duration_leaf(at_least_s=0))
    demote_after_s: float = field(default=0.0, metadata=duration_leaf(at_least_s=0))
    high_watermark: float = field(default=0.9, metadata=fraction_leaf())
    low_watermark: float = field(default=0.8, metadata=fraction_leaf())
    interval_s: float = field(default=30.0, metadata=duration_leaf(at_least_s=0.1))


@dataclass(frozen=True)
class TenantRuleConfig:
    """Sessions whose id begins with `prefix` belong to `tenant`; the longest prefix that fits counts.

    `quota_bytes` 0: that of TenantsConfig.
    """

    prefix: str
    tenant: str
    quota_bytes: int = 0


_RULE_KEYS = tuple(key.name for key in fields(TenantRuleConfig))


def _read_rules(value: object, environ: Mapping[str, str]) -> tuple[TenantRuleConfig, ...]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    rules: list[TenantRuleConfig] = []
    for number, item in enumerate(value, start=1):
        try:
            rule = _read_rule(item)
            _check_rule(rule, rules)
        except ValueError as error:
            raise ValueError(f"rule {number}: {error}; known keys: {', '.join(_RULE_KEYS)}") from error
        rules.append(rule)
    return tuple(rules)


def _read_rule(rule: object) -> TenantRuleConfig:
    if not isinstance(rule, dict):
        raise ValueError("not a mapping")
    for key in rule:
        if key not in _RULE_KEYS:
            raise ValueError(f"unknown key {reprlib.repr(key)}")
    texts: dict[str, Any] = {"prefix": rule.get("prefix"), "tenant": rule.get("tenant", rule.get("prefix"))}
    for name, text in texts.items():
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name}: {'missing' if text in (None, '') else 'not a text'}")
    try:
        quota = read_size(rule.get("quota_bytes", 0), at_least=0)
    except ValueError as error:
        raise ValueError(f"quota_bytes: {error}") from error
    return TenantRuleConfig(texts["prefix"], texts["tenant"], quota)


def _check_rule(rule: TenantRuleConfig, others: list[TenantRuleConfig]) -> None:
    for number, other in enumerate(others, start=1):
        if other.prefix == rule.prefix:
            raise ValueError(f"prefix: {reprlib.repr(rule.prefix)} is that of rule {number} too")
        quotas = {rule.quota_bytes, other.quota_bytes} - {0}
        if other.tenant == rule.tenant and len(quotas) == 2:
            raise ValueError(f"quota_bytes: tenant {reprlib.repr(rule.tenant)} has another in rule {number}")


_RULES = Leaf(_read_rules, "a list of rules such as {prefix: team-a-, tenant: team-a, quota_bytes: 50GiB}")


@dataclass(frozen=True)
class TenantsConfig:
    """Whose sessions are whose, and how much each may store. `quota_bytes` 0: no bound."""

    separator: str = field(default="/", metadata=text_leaf("a text, or '' for no tenants", empty=True))
    quota_bytes: int = field(default=0, metadata=size_leaf(at_least=0))
    rules: tuple[TenantRuleConfig, ...] = field(default=(), metadata={"leaf": _RULES})


@dataclass(frozen=True)
class ChunkConfig:
    """How many tokens are stored together."""

    tokens: int = field(default=256, metadata=count_leaf(step=16, at_most=_MAX_CHUNK_TOKENS))


@dataclass(frozen=True)
class SessionConfig:
    """`idle_pause_s`: a chat idle for so long is paused; `ttl_s`: a paused one unused for so long is deleted;
    0 is off for both. `archive_key` seals exported files: servers that exchange them have the same.
    """

    idle_pause_s: float = field(default=0.0, metadata=duration_leaf(at_least_s=0))
    hold_deadline_s: float = field(default=30.0, metadata=duration_leaf(at_least_s=0.001))
    busy_timeout_s: float = field(default=30.0, metadata=duration_leaf(at_least_s=0))
    stale_ttl_s: float = field(default=30 * 86400.0, metadata=duration_leaf(at_least_s=1))
    ttl_s: float = field(default=0.0, metadata=duration_leaf(at_least_s=0))
    archive_key: str | None = field(
        default=None, repr=False, metadata=text_leaf("a secret text, or null", optional=True, secret=True)
    )


@dataclass(frozen=True)
class RestoreConfig:
    """How sessions come back. `max_layer_wait_s`: how long a forward may wait for one layer; `max_step_s`:
    how long a restore may recompute in one round of the scheduler; `staging_bytes`: what the loaders of
    all restores to the device hold together at most; `rates_file` None: in the cache directory.
    """

    workers: int = field(default=2, metadata=count_leaf(at_most=64))
    max_layer_wait_s: float = field(default=0.02, metadata=duration_leaf(at_least_s=0, at_most_s=1))
    strategy: RestoreStrategy = field(
        default="optimal", metadata=choice_leaf("optimal", "load", "recompute", "half", "paper")
    )
    recompute: bool = field(default=True, metadata=flag_leaf())
    max_slice_tokens: int = field(default=512, metadata=count_leaf(step=16, at_most=_MAX_CHUNK_TOKENS))
    max_step_s: float = field(default=0.05, metadata=duration_leaf(at_least_s=0.001, at_most_s=10))
    staging_bytes: int = field(default=64 << 20, metadata=size_leaf(at_least=1 << 20))
    rates_file: Path | None = field(default=None, metadata=path_leaf(optional=True))


@dataclass(frozen=True)
class PauseConfig:
    """Threads that write paused sessions."""

    workers: int = field(default=1, metadata=count_leaf(at_most=64))


@dataclass(frozen=True)
class EstimatorConfig:
    """How alike the layers attend in each session, from sampled rows of attention. `budget_bytes`: what
    queries, and the rows they are made into, hold together at most; `windows`: which tokens are the first and
    the last 10%, of each row's own context or of the whole history; `gamma`: from which mass on them a layer
    is I-R.
    """

    enabled: bool = field(default=False, metadata=flag_leaf())
    rows_per_1000: int = field(default=8, metadata=count_leaf(at_most=1000))
    budget_bytes: int = field(default=128 << 20, metadata=size_leaf(at_least=1 << 20))
    windows: WindowKind = field(default="relative", metadata=choice_leaf("relative", "absolute"))
    gamma: float = field(default=0.5, metadata=fraction_leaf(zero=True))


@dataclass(frozen=True)
class QualityConfig:
    """What a session may lose when it is stored: `level` names the loss budget, or is it. `method`: what is
    tried; `share`, `gamma`, `sharing`: of the pairs of layers that some methods make. A pause prices what is
    tried on the leading `tokens` of the session, `deadline_s` long at most, with queries of which
    `queries_bytes` are kept for all sessions together.
    """

    level: str | float = field(default="exact", metadata=level_leaf("exact", "high", "balanced", "small"))
    method: CodingMethod = field(
        default="auto", metadata=choice_leaf("auto", "krul", "fixed", "int8", "int4")
    )
    share: float = field(default=0.5, metadata=fraction_leaf())
    gamma: float = field(default=0.5, metadata=fraction_leaf(zero=True))
    sharing: SharingKind = field(default="merged", metadata=choice_leaf("merged", "raw"))
    tokens: int = field(default=2048, metadata=count_leaf(step=16, at_most=8192))
    deadline_s: float = field(default=5.0, metadata=duration_leaf(at_least_s=0.1, at_most_s=600))
    queries_bytes: int = field(default=256 << 20, metadata=size_leaf(at_least=1 << 20))

    @property
    def codes(self) -> bool:
        """Whether anything may be coded."""
        return self.level not in ("exact", 0.0)


@dataclass(frozen=True)
class LinkConfig:
    """A link emulated before a tier, for tests and benchmarks: reads take as long as over it. The keys are
    those of store.link.LinkTier.
    """

    bytes_per_s: int = field(metadata=size_leaf(at_least=1))
    tier: Literal["ssd"] = field(default="ssd", metadata=choice_leaf("ssd"))
    latency_s: float = field(default=0.0, metadata=duration_leaf(at_least_s=0, at_most_s=60))
    jitter: float = field(default=0.0, metadata=fraction_leaf(zero=True))
    seed: int = field(default=1, metadata=count_leaf(at_most=2**63 - 1))
    change_after_bytes: int = field(default=0, metadata=size_leaf(at_least=0))
    change_to_bytes_per_s: int = field(default=0, metadata=size_leaf(at_least=0))
    dead_after_s: float = field(default=1.0, metadata=duration_leaf(at_least_s=0, at_most_s=3600))


@dataclass(frozen=True)
class Config:
    """The whole configuration. `ssd` and `redis` are None where there is no such tier, `link` where none is
    emulated."""

    memory: MemoryConfig = field(default_factory=MemoryConfig)
    ssd: SsdConfig | None = field(default_factory=SsdConfig)
    redis: RedisConfig | None = None
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    chunk: ChunkConfig = field(default_factory=ChunkConfig)
    session: SessionConfig = field(default_factory=SessionConfig)
    restore: RestoreConfig = field(default_factory=RestoreConfig)
    pause: PauseConfig = field(default_factory=PauseConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    link: LinkConfig | None = None
