"""The Redis tier. Only `tier` imports redis-py."""

from __future__ import annotations

from sgl_krul.store.redis.tier import RedisTier

__all__ = ["RedisTier"]
