"""The Redis tier. Only `tier` imports redis-py: it opens connections and says in our words what went wrong."""

from __future__ import annotations

from sgl_krul.store.redis.tier import RedisTier

__all__ = ["RedisTier"]
