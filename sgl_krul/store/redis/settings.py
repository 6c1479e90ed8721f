"""What a Redis tier is told, checked once."""

from __future__ import annotations

import math
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from sgl_krul.errors import ConfigError
from sgl_krul.store.redis.address import RedisUrl
from sgl_krul.store.redis.pieces import MAX_PIECE_BYTES

__all__ = ["RedisSettings"]

_PREFIX = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_OWNER = re.compile(r"[!-~]{1,200}")
_MAX_S = 10 * 365 * 86400.0


@dataclass(frozen=True)
class RedisSettings:
    """The arguments of RedisTier.open, with the URL read.

    Raises:
        ConfigError: one that cannot be.
    """

    url: RedisUrl
    tls_ca_file: Path | None
    key_prefix: str
    capacity_bytes: int
    ttl_s: float
    timeout_s: float
    connect_timeout_s: float
    connections: int
    max_in_flight_bytes: int
    lease_s: float
    owner: str

    def __post_init__(self) -> None:
        if _PREFIX.fullmatch(self.key_prefix) is None:
            raise ConfigError(f"redis.key_prefix {self.key_prefix[:80]!r}: expected {_PREFIX.pattern}")
        if _OWNER.fullmatch(self.owner) is None:
            raise ConfigError(f"owner {self.owner[:80]!r}: expected {_OWNER.pattern}, as in host:pid")
        for name, least in (
            ("capacity_bytes", 1),
            ("connections", 1),
            ("max_in_flight_bytes", MAX_PIECE_BYTES),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"redis.{name} {getattr(self, name)}: expected at least {least}")
        for name, shortest in (
            ("ttl_s", 1.0),
            ("timeout_s", 0.01),
            ("connect_timeout_s", 0.01),
            ("lease_s", 0.1),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and shortest <= value <= _MAX_S):
                raise ConfigError(f"redis.{name} {value}: expected {shortest:g} to {_MAX_S:g} seconds")
        if self.tls_ca_file is not None:
            self._check_ca_file(self.tls_ca_file)

    def _check_ca_file(self, path: Path) -> None:
        if not self.url.tls:
            raise ConfigError(f"redis.tls_ca_file {path}: the URL is not one of TLS; write rediss://")
        try:
            ssl.create_default_context(cafile=path)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"redis.tls_ca_file {path}: {error}; expected certificates in PEM format"
            ) from error
