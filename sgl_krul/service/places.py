"""The tiers of a configuration, opened."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sgl_krul.config import Config, format_duration, format_size
from sgl_krul.errors import ConfigError, StoreUnavailable
from sgl_krul.store.link import LinkTier
from sgl_krul.store.placement import Policy
from sgl_krul.store.redis import RedisTier
from sgl_krul.store.redis.address import parse_redis_url
from sgl_krul.store.ssd import SsdTier
from sgl_krul.store.tier import CheckedTier
from sgl_krul.store.tiered import TieredStore

__all__ = ["check_places", "open_redis", "open_ssd", "open_store", "policy_of", "read_archive_key"]

logger = logging.getLogger(__name__)

_KEY_BYTES = 32


def check_places(config: Config) -> None:
    """Refuse settings of places that can't work. No server is asked and nothing is made: it takes no time.

    Raises:
        ConfigError: the message begins with the key, as in "redis.url: ...".
    """
    redis = open_redis(config)
    if redis is not None:
        redis.close()


def open_store(config: Config) -> TieredStore:
    """The tiers below memory. A Redis that is down is no error: it is a miss until it is back.

    Raises:
        StoreUnavailable: the store directory can't be used.
        ConfigError: an address of Redis that can't be one.
    """
    redis = open_redis(config)
    return TieredStore(_linked(open_ssd(config), config), redis, policy=policy_of(config))


def _linked(ssd: CheckedTier | None, config: Config) -> CheckedTier | None:
    """The tier, behind an emulated link if one is configured."""
    link = config.link
    if link is None or ssd is None:
        return ssd
    logger.warning(
        "krul: reads of the tier %r are slowed to those over a link of %s/s and %s latency (section link of "
        "the configuration): for tests and benchmarks only",
        link.tier,
        format_size(link.bytes_per_s),
        format_duration(link.latency_s),
    )
    return LinkTier(ssd, **_keys(link, "tier"))


def open_ssd(config: Config) -> SsdTier | None:
    """The SSD tier, if one is configured. Raises StoreUnavailable."""
    return None if config.ssd is None else SsdTier(config.ssd.path, **_keys(config.ssd, "path"))


def open_redis(config: Config) -> RedisTier | None:
    """The Redis tier, if one is configured. Raises ConfigError that begins with the key."""
    settings = config.redis
    if settings is None:
        return None
    try:
        parse_redis_url(settings.url, username=settings.username, password=settings.password)
    except ConfigError as error:
        raise ConfigError(f"redis.url: {error}") from None
    owner = f"{socket.gethostname()}:{os.getpid()}"
    return RedisTier.open(settings.url, owner=owner, **_keys(settings, "url"))


def read_archive_key(config: Config, home: Path) -> bytes:
    """What exported files are sealed with: session.archive_key, else a random one that is kept in `home`.

    Raises:
        StoreUnavailable: `home` can't be written or read.
    """
    if config.session.archive_key is not None:
        return config.session.archive_key.encode()
    path = home / "archive.key"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=home) as file:  # for its owner only
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                with suppress(FileExistsError):  # of two servers that start at once, one is the first
                    os.link(file.name, path)
        return path.read_bytes()
    except OSError as error:
        raise StoreUnavailable(
            f"{path}: {error.strerror}: make it writable, or set session.archive_key"
        ) from error


def policy_of(config: Config) -> Policy:
    """Where sessions go, as placement takes it."""
    placement = config.placement
    return Policy(
        replicate=placement.replicate,
        demote_after_s=placement.demote_after_s,
        high_watermark=placement.high_watermark,
        low_watermark=placement.low_watermark,
        ttl_s=config.session.ttl_s,
    )


def _keys(section: Any, *without: str) -> dict[str, Any]:
    """The keys of a section as arguments: they have the same names."""
    return {name: value for name, value in asdict(section).items() if name not in without}
