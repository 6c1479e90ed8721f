"""Where a pause finds pages: memory first, then the device until it is revoked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sgl_krul.engine.page_source import DevicePageSource
from sgl_krul.store.memory import MemoryTier
from tests.pools import KvPages, make_pool, page_bytes, pages_of
from tests.sessions import free_slots

SLOTS = 8
KEYS = [f"ns/{index}" for index in range(6)]
ON_DEVICE = [5, 2, 3, 9, 10]  # device pages of the first five


class Watched(KvPages):
    """Pages that call `on_copy(layer)` before each copy to memory."""

    on_copy: Callable[[int], None] = staticmethod(lambda layer: None)

    def to_host(self, layer: int, rows: Any, moves: Sequence[tuple[int, int, int]]) -> None:
        """See KvPages."""
        self.on_copy(layer)
        super().to_host(layer, rows, moves)


@dataclass
class Bench:
    """A pool with five pages of a session of six."""

    pool: Any
    pages: Watched
    memory: MemoryTier
    source: DevicePageSource

    def remember(self, index: int) -> None:
        """Put a page into memory; the sixth has bytes of its own."""
        self.memory.put(KEYS[index], b"", [self.true(layer, index) for layer in range(3)])

    def true(self, layer: int, index: int) -> bytes:
        """What the session's page is."""
        size = self.pages.layout.page_segment_bytes
        return bytes([layer + 1]) * size if index == 5 else page_bytes(self.pool, layer, ON_DEVICE[index])

    def read(self, first: int, count: int) -> bool | None:
        """None when it is not to be had; else whether the bytes are right."""
        with self.source.segments(first, count) as segments:
            if segments is None:
                return None
            wanted = [b"".join(self.true(layer, first + n) for n in range(count)) for layer in range(3)]
            return [b"".join(layer) for layer in segments] == wanted


@pytest.fixture
def bench() -> Iterator[Bench]:
    pool = make_pool()
    _, layout = pages_of(pool)
    memory = MemoryTier(layout.layers, layout.page_segment_bytes, SLOTS * layout.page_bytes)
    pages = Watched(pool, layout)
    yield Bench(pool, pages, memory, DevicePageSource(pages, memory, KEYS, np.array(ON_DEVICE, np.int64)))
    assert memory.check() == []
    assert free_slots(memory) == SLOTS


@pytest.mark.parametrize("present", [[], [0], [2], [0, 1, 2, 3, 4], [1, 3], [4], [0, 4]])
def test_pages_come_from_wherever_they_are(bench: Bench, present: list[int]) -> None:
    for index in present:
        bench.remember(index)
    for first, count in ((0, 5), (0, 1), (1, 3), (4, 1), (3, 2)):
        assert bench.read(first, count) is True


def test_what_is_in_memory_whole_is_not_copied(bench: Bench) -> None:
    for index in (2, 0, 1, 5):
        bench.remember(index)
    bench.pages.on_copy = lambda layer: pytest.fail("the device was read")
    with bench.source.segments(0, 3) as segments:
        assert segments is not None
        arena = bench.memory.layer(1)
        assert all(np.shares_memory(np.frombuffer(part, np.uint8), arena) for part in segments[1])
    assert bench.read(0, 3) is True
    assert bench.read(5, 1) is True


def test_pages_in_use_are_not_evicted(bench: Bench) -> None:
    for index in range(3):
        bench.remember(index)
    with bench.source.segments(0, 3) as segments:
        assert segments is not None
        for index in range(2 * SLOTS):
            bench.memory.put(f"flood/{index}", b"", [bytes(bench.pages.layout.page_segment_bytes)] * 3)
        wanted = [b"".join(bench.true(layer, n) for n in range(3)) for layer in range(3)]
        assert [b"".join(layer) for layer in segments] == wanted


def test_a_page_that_is_nowhere(bench: Bench) -> None:
    assert bench.read(5, 1) is None
    assert bench.read(4, 2) is None
    assert bench.read(0, 6) is None
    bench.remember(5)
    assert bench.read(4, 2) is True


def test_after_revoke_memory_alone_counts(bench: Bench) -> None:
    bench.remember(0)
    bench.remember(1)
    bench.source.revoke()
    bench.source.revoke()
    assert bench.read(0, 2) is True
    assert bench.read(0, 3) is None
    assert bench.read(3, 1) is None


def test_revoke_waits_for_a_read_under_way(bench: Bench) -> None:
    """The engine frees the pages when revoke() returns: not a byte may be read after it."""
    reading, go, revoked = threading.Event(), threading.Event(), threading.Event()
    results: list[bool | None] = []

    def stall(layer: int) -> None:
        if layer == 1:
            reading.set()
            assert go.wait(20)

    def revoke() -> None:
        bench.source.revoke()
        revoked.set()

    bench.pages.on_copy = stall
    reader = threading.Thread(target=lambda: results.append(bench.read(0, 5)))
    reader.start()
    assert reading.wait(20)
    revoker = threading.Thread(target=revoke)
    revoker.start()
    assert not revoked.wait(0.05)
    go.set()
    reader.join(20)
    revoker.join(20)
    assert revoked.is_set()
    assert results == [True]
    bench.pages.on_copy = lambda layer: pytest.fail("the device was read")
    assert bench.read(0, 1) is None


def test_what_was_read_stays_when_the_device_changes(bench: Bench) -> None:
    with bench.source.segments(0, 2) as segments:
        assert segments is not None
        wanted = [b"".join(bench.true(layer, n) for n in range(2)) for layer in range(3)]
        bench.source.revoke()
        for buffer in (*bench.pool.k_buffer, *bench.pool.v_buffer):
            buffer.zero_()
        assert [b"".join(layer) for layer in segments] == wanted
