"""Places for bytes. `store` knows bytes, not tensors."""

from __future__ import annotations

from sgl_krul.store.link import LinkTier
from sgl_krul.store.memory import MemoryTier, PageReservation, PinnedPages, Slots, runs
from sgl_krul.store.redis import RedisTier
from sgl_krul.store.ssd import FsyncPolicy, SsdTier
from sgl_krul.store.tier import Buffer, CheckedTier, Entry, Tier, TierUsage, check_key

__all__ = [
    "Buffer",
    "CheckedTier",
    "Entry",
    "FsyncPolicy",
    "LinkTier",
    "MemoryTier",
    "PageReservation",
    "PinnedPages",
    "RedisTier",
    "Slots",
    "SsdTier",
    "Tier",
    "TierUsage",
    "check_key",
    "runs",
]
