"""Memory to device, layer by layer: right bytes with a fast, a slow and a failing loader."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from sgl_krul.engine.layer_load import LayerCounter, LayerLoad
from tests.layer_loads import LoadBench, open_bench

KEYS, TARGETS = ["0", "1", "5", "3"], [4, 5, 2, 9]


@pytest.fixture
def bench() -> Iterator[LoadBench]:
    with open_bench() as bench:
        yield bench


def load_of(bench: LoadBench, keys: Sequence[str], targets: Sequence[int]) -> LayerLoad:
    """A load of pages (by key) to device pages; not started."""
    return LayerLoad(bench.pages, bench.memory, [bench.part(keys, targets)])


def test_every_layer_is_there_when_it_is_waited_for(bench: LoadBench) -> None:
    load = load_of(bench, KEYS, TARGETS)
    load.start(bench.workers)
    for layer in range(3):
        load.wait(layer, 5.0)
        assert bench.landed(layer, KEYS, TARGETS)
    load.finish()
    assert load.takeovers == 0


def test_several_requests_are_one_load(bench: LoadBench) -> None:
    parts = [(["0", "1"], [3, 4]), (["7"], [0]), (["2", "6", "4"], [8, 7, 6])]
    load = LayerLoad(bench.pages, bench.memory, [bench.part(keys, to) for keys, to in parts])
    load.start(bench.workers)
    load.finish()
    for layer in range(3):
        for keys, targets in parts:
            assert bench.landed(layer, keys, targets)


def test_a_slow_loader_is_taken_over_from(bench: LoadBench) -> None:
    """The forward waits for max_wait_s at most, then copies the layer; the loader's copy does no harm."""
    go = threading.Event()

    def stall(layer: int, loader: bool) -> None:
        if loader:
            assert go.wait(20)

    bench.pages.on_copy = stall
    load = load_of(bench, KEYS, TARGETS)
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
def test_a_loader_that_fails_is_taken_over_from_at_once(bench: LoadBench, broken: int) -> None:
    """Whoever waits does not wait for it again in every layer."""

    def fail(layer: int, loader: bool) -> None:
        if loader and layer == broken:
            raise RuntimeError("a bug in the loader")

    bench.pages.on_copy = fail
    load = load_of(bench, KEYS, TARGETS)
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
def test_finish_brings_what_a_failed_loader_did_not(bench: LoadBench, broken: int) -> None:
    def fail(layer: int, loader: bool) -> None:
        if loader and layer == broken:
            raise RuntimeError("a bug in the loader")

    bench.pages.on_copy = fail
    load = load_of(bench, KEYS, TARGETS)
    load.start(bench.workers)
    load.finish()
    assert all(bench.landed(layer, KEYS, TARGETS) for layer in range(3))


def test_finish_waits_for_the_loader(bench: LoadBench) -> None:
    go = threading.Event()
    ended = threading.Event()

    def stall(layer: int, loader: bool) -> None:
        assert go.wait(20)

    bench.pages.on_copy = stall
    load = load_of(bench, KEYS, TARGETS)
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


def test_the_counter_knows_whose_layer_is_asked_for(bench: LoadBench) -> None:
    counter = LayerCounter(5.0)
    one, two = load_of(bench, ["0", "1"], [3, 4]), load_of(bench, ["2"], [7])
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


def test_the_counter_adds_up_takeovers(bench: LoadBench) -> None:
    go = threading.Event()

    def stall(layer: int, loader: bool) -> None:
        if loader:
            assert go.wait(20)

    bench.pages.on_copy = stall
    counter = LayerCounter(0.001)
    load = load_of(bench, KEYS, TARGETS)
    load.start(bench.workers)
    counter.set_consumer(counter.add(load))
    for layer in range(3):
        counter.wait_until(layer)
        assert bench.landed(layer, KEYS, TARGETS)
    go.set()
    assert counter.check() == ["batch 0: its load was never finished"]
    counter.reset()
    assert counter.takeovers == 3
    assert counter.check() == []


def test_the_last_layer_means_all_of_them(bench: LoadBench) -> None:
    """A prefill replayed as one CUDA graph waits for the last layer alone (`_wait_for_layer_loads`)."""
    go = threading.Event()

    def stall(layer: int, loader: bool) -> None:
        if loader and layer == 1:
            assert go.wait(20)

    bench.pages.on_copy = stall
    counter = LayerCounter(0.01)
    assert (counter.consumer_index, counter.num_layers) == (-1, 0)
    load = load_of(bench, KEYS, TARGETS)
    load.start(bench.workers)
    index = counter.add(load)
    counter.set_consumer(index)
    assert (counter.consumer_index, counter.num_layers) == (index, 3)
    counter.wait_until(2)
    assert all(bench.landed(layer, KEYS, TARGETS) for layer in range(3))
    go.set()
    counter.finish(index)
    assert counter.consumer_index == -1
    assert counter.takeovers == 2


def test_a_failure_wakes_who_waits(bench: LoadBench) -> None:
    """The forward is waiting already when the loader fails: it does not wait out its time."""
    go = threading.Event()

    def fail(layer: int, loader: bool) -> None:
        if loader:
            assert go.wait(20)
            raise RuntimeError("a bug in the loader")

    bench.pages.on_copy = fail
    load = load_of(bench, KEYS, TARGETS)
    load.start(bench.workers)
    threading.Timer(0.05, go.set).start()
    begin = time.monotonic()
    load.wait(0, 15.0)
    assert time.monotonic() - begin < 10.0
    assert bench.landed(0, KEYS, TARGETS)
    load.finish()


def test_the_loader_leaves_out_what_was_taken_over(bench: LoadBench) -> None:
    """It gets ahead of the forward again."""
    go = threading.Event()
    copied: list[int] = []

    def stall(layer: int, loader: bool) -> None:
        if loader:
            copied.append(layer)
            assert go.wait(20)

    bench.pages.on_copy = stall
    load = load_of(bench, KEYS, TARGETS)
    load.start(bench.workers)
    for layer in (0, 1):
        load.wait(layer, 0.01)
    go.set()
    load.finish()
    assert copied == [0, 2]
