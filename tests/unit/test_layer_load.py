"""Memory to device, layer by layer: right bytes with a fast, a slow and a failing loader."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sgl_krul.engine.layer_load import LayerCounter, LayerLoad
from sgl_krul.store.memory import MemoryTier, PinnedPages, runs
from sgl_krul.store.workers import Workers
from tests.pools import KvPages, fill_rows, make_pool, page_bytes, pages_of
from tests.sessions import free_slots

SLOTS = 8
LOADER = "krul-test-loader"


class Watched(KvPages):
    """Pages that call `on_copy(layer, is the loader's thread)` before each copy to the device."""

    on_copy: Callable[[int, bool], None] = staticmethod(lambda layer, loader: None)

    def to_device(self, layer: int, rows: Any, moves: Sequence[tuple[int, int, int]]) -> None:
        """See KvPages."""
        self.on_copy(layer, threading.current_thread().name.startswith(LOADER))
        super().to_device(layer, rows, moves)


@dataclass
class Bench:
    """Eight pages in memory, and a device to bring them to."""

    pool: Any
    pages: Watched
    memory: MemoryTier
    rows: list[Any]
    workers: Workers

    def pin(self, keys: Sequence[str]) -> PinnedPages:
        """Pin pages."""
        pinned = self.memory.pin(keys)
        assert pinned is not None
        return pinned

    def load(self, keys: Sequence[str], targets: Sequence[int]) -> LayerLoad:
        """A load of pages (by key) to device pages; not started."""
        pinned = self.pin(keys)
        moves = runs(pinned.slots, np.array(targets, np.int64))
        return LayerLoad(self.pages, self.memory, [(pinned, moves)])

    def landed(self, layer: int, keys: Sequence[str], targets: Sequence[int]) -> bool:
        """Whether one layer of the pages is on the device."""
        wanted = [self.rows[layer][int(key)].tobytes() for key in keys]
        return wanted == [page_bytes(self.pool, layer, target) for target in targets]


KEYS, TARGETS = ["0", "1", "5", "3"], [4, 5, 2, 9]


@pytest.fixture
def bench() -> Iterator[Bench]:
    pool = make_pool()
    _, layout = pages_of(pool)
    memory = MemoryTier(layout.layers, layout.page_segment_bytes, SLOTS * layout.page_bytes)
    rows = fill_rows(layout, SLOTS)
    for page in range(SLOTS):
        memory.put(str(page), b"", [layer[page].tobytes() for layer in rows])
    workers = Workers("test-loader", 1)
    yield Bench(pool, Watched(pool, layout), memory, rows, workers)
    workers.close()
    assert memory.check() == []
    assert free_slots(memory) == SLOTS  # nothing stays pinned


def test_every_layer_is_there_when_it_is_waited_for(bench: Bench) -> None:
    load = bench.load(KEYS, TARGETS)
    load.start(bench.workers)
    for layer in range(3):
        load.wait(layer, 5.0)
        assert bench.landed(layer, KEYS, TARGETS)
    load.finish()
    assert load.takeovers == 0


def test_several_requests_are_one_load(bench: Bench) -> None:
    parts = [(["0", "1"], [3, 4]), (["7"], [0]), (["2", "6", "4"], [8, 7, 6])]
    loads = [(pinned := bench.pin(keys), runs(pinned.slots, np.array(to, np.int64))) for keys, to in parts]
    load = LayerLoad(bench.pages, bench.memory, loads)
    load.start(bench.workers)
    load.finish()
    for layer in range(3):
        for keys, targets in parts:
            assert bench.landed(layer, keys, targets)


def test_a_slow_loader_is_taken_over_from(bench: Bench) -> None:
    """The forward waits for max_wait_s at most, then copies the layer; the loader's copy does no harm."""
    go = threading.Event()

    def stall(layer: int, loader: bool) -> None:
        if loader:
            assert go.wait(20)

    bench.pages.on_copy = stall
    load = bench.load(KEYS, TARGETS)
    load.start(bench.workers)
    for layer in range(3):
        begin = time.monotonic()
        load.wait(layer, 0.01)
        assert time.monotonic() - begin < 5
        assert bench.landed(layer, KEYS, TARGETS)
    assert load.takeovers == 3
    bench.memory.clear()  # a flush: the pages are held still, the loader has not ended
    go.set()
    load.finish()
    assert all(bench.landed(layer, KEYS, TARGETS) for layer in range(3))


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_loader_that_fails_is_taken_over_from_at_once(bench: Bench, broken: int) -> None:
    """Whoever waits does not wait for it again in every layer."""

    def fail(layer: int, loader: bool) -> None:
        if loader and layer == broken:
            raise RuntimeError("a bug in the loader")

    bench.pages.on_copy = fail
    load = bench.load(KEYS, TARGETS)
    load.start(bench.workers)
    while bench.workers.pending:
        time.sleep(0.001)
    begin = time.monotonic()
    for layer in range(3):
        load.wait(layer, 3.0)
        assert bench.landed(layer, KEYS, TARGETS)
    assert time.monotonic() - begin < 2.0
    assert load.takeovers == 3 - broken
    load.finish()


@pytest.mark.parametrize("broken", [0, 2])
def test_finish_brings_what_a_failed_loader_did_not(bench: Bench, broken: int) -> None:
    def fail(layer: int, loader: bool) -> None:
        if loader and layer == broken:
            raise RuntimeError("a bug in the loader")

    bench.pages.on_copy = fail
    load = bench.load(KEYS, TARGETS)
    load.start(bench.workers)
    load.finish()
    assert all(bench.landed(layer, KEYS, TARGETS) for layer in range(3))


def test_finish_waits_for_the_loader(bench: Bench) -> None:
    go = threading.Event()
    ended = threading.Event()

    def stall(layer: int, loader: bool) -> None:
        assert go.wait(20)

    bench.pages.on_copy = stall
    load = bench.load(KEYS, TARGETS)
    load.start(bench.workers)

    def finish() -> None:
        load.finish()
        ended.set()

    thread = threading.Thread(target=finish)
    thread.start()
    assert not ended.wait(0.05)
    go.set()
    assert ended.wait(20)
    thread.join()
    assert all(bench.landed(layer, KEYS, TARGETS) for layer in range(3))


# -- the counter --


def test_the_counter_knows_whose_layer_is_asked_for(bench: Bench) -> None:
    counter = LayerCounter(5.0)
    one, two = bench.load(["0", "1"], [3, 4]), bench.load(["2"], [7])
    first, second = counter.add(one), counter.add(two)
    assert first != second
    for load in (one, two):
        load.start(bench.workers)
    counter.set_consumer(second)
    counter.wait_until(2)
    assert bench.landed(2, ["2"], [7])
    counter.set_consumer(-1)
    counter.wait_until(0)  # a batch that loads nothing does not wait
    counter.set_consumer(first)
    counter.wait_until(1)
    assert bench.landed(1, ["0", "1"], [3, 4])
    counter.finish(first)
    counter.wait_until(2)  # whose load is over is not waited for
    counter.finish(first)
    counter.finish(99)
    counter.finish(second)
    assert counter.takeovers == 0


def test_the_counter_adds_up_takeovers(bench: Bench) -> None:
    go = threading.Event()

    def stall(layer: int, loader: bool) -> None:
        if loader:
            assert go.wait(20)

    bench.pages.on_copy = stall
    counter = LayerCounter(0.001)
    load = bench.load(KEYS, TARGETS)
    load.start(bench.workers)
    counter.set_consumer(counter.add(load))
    for layer in range(3):
        counter.wait_until(layer)
        assert bench.landed(layer, KEYS, TARGETS)
    go.set()
    counter.reset()
    assert counter.takeovers == 3
