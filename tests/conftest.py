"""What the tests share: the hypothesis profile, a small layout, and tiers that are sound at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sgl_krul.store.memory import MemoryTier
from sgl_krul.store.ssd import SsdTier
from tests.sessions import LAYOUT, free_slots, open_ssd

# A shared machine may stall at any moment: no test fails for that.
settings.register_profile("krul", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("krul")

MEMORY_PAGES = 64


@pytest.fixture
def memory() -> Iterator[MemoryTier]:
    """Room for 64 pages of LAYOUT. At the end nothing may be pinned or reserved."""
    memory = MemoryTier(LAYOUT.layers, LAYOUT.page_segment_bytes, MEMORY_PAGES * LAYOUT.page_bytes)
    yield memory
    assert memory.check() == []
    assert free_slots(memory) == MEMORY_PAGES


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Where the SSD tier of a test lives."""
    return tmp_path / "store"


@pytest.fixture
def ssd(store: Path) -> Iterator[SsdTier]:
    """An SSD tier below `store`."""
    with open_ssd(store) as tier:
        yield tier
        assert tier.check() == []
