"""Device to memory while a session is active."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from sgl_krul.engine.write_through import WriteThrough, device_pages
from sgl_krul.store.memory import MemoryTier
from tests.pools import KvPages, make_pool, page_bytes, pages_of, slots_of
from tests.sessions import free_slots

SLOTS = 6


class Watched(KvPages):
    """Pages that call `on_copy(layer)` before each copy to memory."""

    on_copy: Callable[[int], None] = staticmethod(lambda layer: None)

    def to_host(self, layer: int, rows: Any, moves: Sequence[tuple[int, int, int]]) -> None:
        """See KvPages."""
        self.on_copy(layer)
        super().to_host(layer, rows, moves)


@dataclass
class Bench:
    """A pool, a memory of six pages, and the write-through between them."""

    pool: Any
    pages: Watched
    memory: MemoryTier
    writer: WriteThrough

    def stored(self, key: str, page: int) -> bool:
        """Whether `key` holds the bytes of a device page."""
        pinned = self.memory.pin([key])
        if pinned is None:
            return False
        with pinned:
            slot = int(pinned.slots[0])
            return all(
                self.memory.layer(layer)[slot].tobytes() == page_bytes(self.pool, layer, page)
                for layer in range(3)
            )

    def settle(self) -> None:
        """Wait until every copy is done."""
        while self.writer.completed < self.writer.pending:
            time.sleep(0.001)


@pytest.fixture
def bench() -> Iterator[Bench]:
    pool = make_pool()
    _, layout = pages_of(pool)
    memory = MemoryTier(layout.layers, layout.page_segment_bytes, SLOTS * layout.page_bytes)
    pages = Watched(pool, layout)
    bench = Bench(pool, pages, memory, WriteThrough(pages, memory))
    yield bench
    bench.writer.close()
    assert memory.check() == []
    assert free_slots(memory) == SLOTS


def test_page_numbers_of_token_slots() -> None:
    assert device_pages(slots_of([3, 0, 7]), 16).tolist() == [3, 0, 7]
    assert device_pages(slots_of([3])[:0], 16).tolist() == []


def test_nodes_are_copied_in_the_order_they_came(bench: Bench) -> None:
    bench.writer.submit(["a", "b"], slots_of([5, 2]), [])
    bench.writer.submit(["c"], slots_of([9]), [])
    assert bench.writer.pending == 2
    bench.settle()
    assert bench.writer.take_completed() is True
    assert bench.writer.take_completed() is True
    assert bench.writer.pending == bench.writer.completed == 0
    assert [bench.stored(key, page) for key, page in (("a", 5), ("b", 2), ("c", 9))] == [True] * 3


def test_pages_that_are_there_are_not_copied_again(bench: Bench) -> None:
    bench.writer.submit(["a", "b"], slots_of([5, 2]), [])
    bench.writer.submit(["a", "c", "b"], slots_of([7, 8, 9]), [])  # pages 7 and 9 would be other bytes
    bench.settle()
    assert bench.stored("a", 5)
    assert bench.stored("c", 8)
    assert bench.stored("b", 2)
    assert bench.memory.usage().objects == 3


def test_a_full_memory_leaves_the_node_on_the_device(bench: Bench) -> None:
    held = bench.memory.reserve([f"held/{index}" for index in range(5)])
    assert held is not None
    bench.writer.submit(["a", "b"], slots_of([5, 2]), [])
    bench.writer.submit(["c"], slots_of([9]), [])
    bench.settle()
    assert bench.writer.take_completed() is False
    assert bench.writer.take_completed() is True
    assert bench.memory.leading(["a"]) == 0
    bench.memory.abandon(held)


def test_a_copy_that_fails_is_logged_and_the_next_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(layer: int) -> None:
        if layer == 1:
            raise RuntimeError("a bug")

    bench.pages.on_copy = fail
    bench.writer.submit(["a"], slots_of([5]), [])
    bench.settle()
    assert bench.writer.take_completed() is False
    assert "the pages stay on the device only: RuntimeError('a bug')" in caplog.text
    assert bench.memory.leading(["a"]) == 0
    bench.pages.on_copy = lambda layer: None
    bench.writer.submit(["a"], slots_of([5]), [])
    bench.settle()
    assert bench.writer.take_completed() is True
    assert bench.stored("a", 5)


def test_events_are_waited_for_before_a_byte_is_read(bench: Bench) -> None:
    steps: list[str] = []

    class Ready:
        def synchronize(self) -> None:
            steps.append("ready")

    bench.pages.on_copy = lambda layer: steps.append(f"layer {layer}")
    bench.writer.submit(["a"], slots_of([5]), [Ready(), Ready()])
    bench.settle()
    assert steps == ["ready", "ready", "layer 0", "layer 1", "layer 2"]


def test_the_barrier_waits_for_what_was_submitted(bench: Bench) -> None:
    go = threading.Event()

    def stall(layer: int) -> None:
        assert go.wait(20)

    bench.pages.on_copy = stall
    bench.writer.submit(["a"], slots_of([5]), [])
    passed = threading.Event()

    def wait() -> None:
        bench.writer.barrier()
        passed.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not passed.wait(0.05)
    assert bench.writer.completed == 0
    go.set()
    assert passed.wait(20)
    thread.join()
    assert bench.stored("a", 5)
    bench.writer.quiesce()
    assert bench.writer.pending == 0
    bench.writer.barrier()


def test_a_flush_of_memory_in_the_middle_publishes_nothing(bench: Bench) -> None:
    bench.pages.on_copy = lambda layer: bench.memory.clear() if layer == 1 else None
    bench.writer.submit(["a"], slots_of([5]), [])
    bench.writer.quiesce()
    assert bench.memory.usage().objects == 0
