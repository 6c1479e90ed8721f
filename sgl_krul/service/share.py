"""One rank's share of a configuration: budgets are the server's, so each rank has its part of them."""

from __future__ import annotations

from dataclasses import replace

from sgl_krul.config import Config
from sgl_krul.errors import ConfigError

__all__ = ["check_share", "share_of"]


def check_share(config: Config, size: int) -> None:
    """Refuse what is not served with tensor parallelism: what ranks would do each by its own clock or disk.

    Raises:
        ConfigError: the message begins with the key, as in "redis: ...".
    """
    if size == 1:
        return
    refused = {
        "redis": config.redis is not None,
        "session.ttl_s": config.session.ttl_s > 0,
        "placement.memory_max_bytes": config.placement.memory_max_bytes > 0,
        "estimator.enabled": config.estimator.enabled,  # a row is the mean of heads that lie on all ranks
    }
    for key, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"{key}: not served with --tp-size {size} yet, expected it unset: leave {key} out, or run "
                "with --tp-size 1"
            )


def share_of(config: Config, rank: int, size: int) -> Config:
    """The configuration of `rank`: bytes divided by `size`, and a store directory of its own."""
    if size == 1:
        return config
    memory = replace(
        config.memory,
        capacity_bytes=_part(config.memory.capacity_bytes, size),
        prefault_bytes=_part(config.memory.prefault_bytes, size),
    )
    ssd = config.ssd and replace(
        config.ssd,
        path=config.ssd.path / f"rank{rank}",
        capacity_bytes=_part(config.ssd.capacity_bytes, size),
        daily_write_bytes=_part(config.ssd.daily_write_bytes, size),
    )
    tenants = replace(
        config.tenants,
        quota_bytes=_part(config.tenants.quota_bytes, size),
        rules=tuple(
            replace(rule, quota_bytes=_part(rule.quota_bytes, size)) for rule in config.tenants.rules
        ),
    )
    restore = replace(config.restore, staging_bytes=_part(config.restore.staging_bytes, size))
    return replace(config, memory=memory, ssd=ssd, tenants=tenants, restore=restore)


def _part(total: int, size: int) -> int:
    """0 (often: no bound) stays 0, and nothing else becomes it."""
    return -(-total // size)
