"""What the environment alone decides: where files that may be lost lie, which server the command talks to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sgl_krul.values import home

__all__ = ["ClientSettings", "cache_home", "client_settings"]


def cache_home(environ: Mapping[str, str]) -> Path:
    """Where sgl-krul keeps files that may be lost: $XDG_CACHE_HOME/sgl-krul, else ~/.cache/sgl-krul."""
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says that a relative value is to be ignored.
    return (base if base.is_absolute() else home(environ) / ".cache") / "sgl-krul"


@dataclass(frozen=True)
class ClientSettings:
    """Which server the `krul` command talks to. `api_key` None: it asks for none."""

    url: str
    api_key: str | None


def client_settings(
    environ: Mapping[str, str], url: str | None = None, api_key: str | None = None
) -> ClientSettings:
    """What was given, else $KRUL_URL and $KRUL_API_KEY, else where `krul serve` listens by default."""
    return ClientSettings(
        url=url or environ.get("KRUL_URL") or "http://127.0.0.1:30000",
        api_key=api_key or environ.get("KRUL_API_KEY") or None,
    )
