"""Layer loads on a device that copies beside the forward: the events, in every order the test wants.

`FakeDevice` copies only when told. So a forward that is launched here before any copy has run shows what a
GPU does: nobody but the two lines of the device waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from sgl_krul.engine.layer_load import LayerCounter, LayerLoad
from sgl_krul.engine.upload import Upload
from tests.devices import FakeDevice
from tests.layer_loads import LAYERS, LoadBench, open_bench
from tests.pools import KvPages, page_bytes

PATIENT_S = 15.0  # a wait that a test does not want to end
KEYS, TARGETS = ["0", "1", "5", "3"], [4, 5, 2, 9]
OTHER_KEYS, OTHER_TARGETS = ["2", "7"], [7, 0]


class Watched(Upload):
    """Calls `on_send(layer)` in the loader before it enqueues a part of a layer."""

    on_send: Callable[[int], None] = staticmethod(lambda layer: None)

    def send(self, layer: int, rows: Any, runs: Sequence[tuple[int, int, int]]) -> None:
        """See Upload."""
        self.on_send(layer)
        super().send(layer, rows, runs)


class Stage:
    """A device, one upload to it, and forwards that note what they read."""

    def __init__(self, bench: LoadBench, staging_slots: int = 0) -> None:
        self.bench = bench
        self.device = FakeDevice()
        slot_bytes = bench.pages.layout.k_page_bytes * 2
        self.upload = Watched(bench.pages, self.device, staging_slots=staging_slots, slot_bytes=slot_bytes)
        self.counter = LayerCounter(PATIENT_S)
        self.seen: list[tuple[int, bool]] = []

    def load(self, *parts: tuple[list[str], list[int]]) -> LayerLoad:
        """A load of one batch; not started."""
        return LayerLoad(
            self.bench.pages, self.bench.memory, [self.bench.part(*part) for part in parts], self.upload
        )

    def start(self, *parts: tuple[list[str], list[int]]) -> int:
        """Start a load and enter it."""
        load = self.load(*parts)
        load.start(self.bench.workers)
        return self.counter.add(load)

    def forward(self, index: int, keys: list[str], targets: list[int]) -> None:
        """Launch a forward: each layer asks first, and reads when the device comes to it."""
        self.counter.set_consumer(index)
        for layer in range(LAYERS):
            self.counter.wait_until(layer)
            self.device.launch(lambda layer=layer: self.read(layer, keys, targets))

    def read(self, layer: int, keys: list[str], targets: list[int]) -> None:
        """What a layer sees at the moment it runs."""
        self.seen.append((layer, self.bench.landed(layer, keys, targets)))

    def loader_done(self) -> None:
        """Wait until the loader has nothing left to enqueue."""
        deadline = time.monotonic() + PATIENT_S
        while self.bench.workers.pending:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.fixture
def bench() -> Iterator[LoadBench]:
    with open_bench() as bench:
        yield bench


@pytest.fixture
def stage(bench: LoadBench) -> Iterator[Stage]:
    stage = Stage(bench)
    yield stage
    assert stage.counter.check() == []
    assert stage.device.pending == 0


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, threading.Event]:
    """Run in a thread; the event says that it has ended."""
    ended = threading.Event()

    def run() -> None:
        work()
        ended.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def test_a_forward_is_launched_whole_while_no_copy_has_run(stage: Stage) -> None:
    index = stage.start((KEYS, TARGETS))
    stage.forward(index, KEYS, TARGETS)
    assert stage.device.pending == LAYERS
    assert stage.seen == []
    for layer in range(LAYERS):
        assert not stage.bench.landed(layer, KEYS, TARGETS)
        assert stage.device.step() == 1
        assert stage.seen == [(done, True) for done in range(layer + 1)]  # each right after its copy
    assert stage.device.waiters == []
    stage.counter.finish(index)
    assert stage.counter.takeovers == 0


def test_copies_ahead_of_the_forward_are_not_waited_for(stage: Stage) -> None:
    index = stage.start((KEYS, TARGETS))
    stage.loader_done()
    stage.device.step(2)
    stage.forward(index, KEYS, TARGETS)
    assert stage.seen == [(0, True), (1, True)]
    stage.device.step()
    assert stage.seen[2:] == [(2, True)]
    stage.counter.finish(index)


def test_pages_are_not_overwritten_while_they_are_read(stage: Stage) -> None:
    """An earlier forward still reads what was in the pages: the copies run after it."""
    before = page_bytes(stage.bench.pool, 0, TARGETS[0])
    read: list[bytes] = []
    stage.device.hold_compute(True)
    stage.device.launch(lambda: read.append(page_bytes(stage.bench.pool, 0, TARGETS[0])))
    index = stage.start((KEYS, TARGETS))
    stage.loader_done()
    assert stage.device.step(100) == 0
    stage.device.hold_compute(False)
    assert read == [before]
    assert stage.device.step(100) == LAYERS
    stage.counter.finish(index)


def test_a_late_loader_is_taken_over_from_and_its_copies_are_waited_for(stage: Stage) -> None:
    go = threading.Event()

    def stall(layer: int) -> None:
        if layer == 1:
            assert go.wait(PATIENT_S)

    stage.upload.on_send = stall
    load = stage.load((KEYS, TARGETS))
    load.start(stage.bench.workers)
    for layer in range(LAYERS):
        load.wait(layer, PATIENT_S if layer == 0 else 0.01)
        stage.device.launch(lambda layer=layer: stage.read(layer, KEYS, TARGETS))
    assert load.takeovers == 2
    assert stage.seen == []  # layer 0 is enqueued only; what was taken over is behind it in the forward
    stage.device.step()
    assert stage.seen == [(0, True), (1, True), (2, True)]
    go.set()
    stage.loader_done()
    assert stage.device.pending == 1  # layer 1: the loader was at it; layer 2 it leaves out
    thread, ended = in_thread(load.finish)
    assert not ended.wait(0.05)
    stage.device.step()
    assert ended.wait(PATIENT_S)
    thread.join()


def test_what_a_failed_loader_enqueued_is_waited_for(stage: Stage) -> None:
    """It fails between two parts of layer 1: the first part's copy still runs, later."""
    calls: list[int] = []

    def fail(layer: int) -> None:
        calls.append(layer)
        if calls.count(1) == 2:
            raise RuntimeError("a bug in the loader")

    stage.upload.on_send = fail
    load = stage.load((KEYS, TARGETS), (OTHER_KEYS, OTHER_TARGETS))
    load.start(stage.bench.workers)
    stage.loader_done()
    assert stage.device.pending == 3
    begin = time.monotonic()
    for layer in range(LAYERS):
        load.wait(layer, PATIENT_S)
        stage.device.launch(lambda layer=layer: stage.read(layer, KEYS, TARGETS))
        stage.device.launch(lambda layer=layer: stage.read(layer, OTHER_KEYS, OTHER_TARGETS))
    assert time.monotonic() - begin < PATIENT_S / 2
    assert load.takeovers == 2
    stage.device.step(2)
    assert stage.seen == [(layer, True) for layer in range(LAYERS) for _ in range(2)]
    thread, ended = in_thread(load.finish)
    assert not ended.wait(0.05)
    stage.device.step()
    assert ended.wait(PATIENT_S)
    thread.join()


def test_finish_waits_for_its_own_load_only(stage: Stage) -> None:
    first = stage.start((KEYS, TARGETS))
    second = stage.start((OTHER_KEYS, OTHER_TARGETS))
    stage.loader_done()
    thread, ended = in_thread(lambda: stage.counter.finish(first))
    stage.device.step(LAYERS - 1)
    assert not ended.wait(0.05)
    stage.device.step(1)
    assert ended.wait(PATIENT_S)
    thread.join()
    assert stage.device.pending == LAYERS  # the second has not moved
    assert all(stage.bench.landed(layer, KEYS, TARGETS) for layer in range(LAYERS))
    stage.device.step(LAYERS)
    stage.counter.finish(second)


def test_two_batches_read_their_own(stage: Stage) -> None:
    """The scheduler runs ahead: both forwards are launched before a byte has moved."""
    first = stage.start((KEYS, TARGETS))
    second = stage.start((OTHER_KEYS, OTHER_TARGETS))
    stage.forward(first, KEYS, TARGETS)
    stage.forward(second, OTHER_KEYS, OTHER_TARGETS)
    stage.forward(-1, [], [])
    for _ in range(2 * LAYERS):
        stage.device.step()
    assert stage.seen == [(layer, True) for _ in range(3) for layer in range(LAYERS)]
    stage.counter.finish(first)
    stage.counter.finish(second)
    assert (stage.device.waiters, stage.counter.takeovers) == ([], 0)


def test_a_reset_in_the_middle_leaves_nothing_behind(stage: Stage) -> None:
    index = stage.start((KEYS, TARGETS))
    stage.start((OTHER_KEYS, OTHER_TARGETS))
    stage.forward(index, KEYS, TARGETS)
    stage.device.step()
    thread, ended = in_thread(stage.counter.reset)
    assert not ended.wait(0.05)
    stage.device.step(100)
    assert ended.wait(PATIENT_S)
    thread.join()
    assert stage.counter.consumer_index == -1
    stage.counter.wait_until(2)  # nobody's layer
    index = stage.start((OTHER_KEYS, OTHER_TARGETS))
    stage.forward(index, OTHER_KEYS, OTHER_TARGETS)
    stage.device.step(100)
    stage.counter.finish(index)
    assert stage.seen[-LAYERS:] == [(layer, True) for layer in range(LAYERS)]


def test_the_last_layer_alone_stands_for_all(stage: Stage) -> None:
    """One CUDA graph for the whole prefill asks once."""
    index = stage.start((KEYS, TARGETS))
    stage.counter.set_consumer(index)
    stage.counter.wait_until(stage.counter.num_layers - 1)
    for layer in range(LAYERS):
        stage.device.launch(lambda layer=layer: stage.read(layer, KEYS, TARGETS))
    stage.device.step(LAYERS - 1)
    assert stage.seen == []
    stage.device.step()
    assert stage.seen == [(layer, True) for layer in range(LAYERS)]
    stage.counter.finish(index)


def test_the_last_layer_alone_waits_for_copies_before_a_takeover(stage: Stage) -> None:
    """Layer 0 is enqueued, the others are taken over: the one event asked for covers layer 0."""
    go = threading.Event()

    def stall(layer: int) -> None:
        if layer == 1:
            assert go.wait(PATIENT_S)

    stage.upload.on_send = stall
    load = stage.load((KEYS, TARGETS))
    load.start(stage.bench.workers)
    deadline = time.monotonic() + PATIENT_S
    while not stage.device.pending:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    load.wait(LAYERS - 1, 0.02)
    stage.device.launch(lambda: stage.read(0, KEYS, TARGETS))
    assert stage.seen == []
    stage.device.step()
    assert stage.seen == [(0, True)]
    assert load.takeovers == 2
    go.set()
    stage.loader_done()
    stage.device.step(LAYERS)
    load.finish()


def test_staging_bounds_how_far_the_loader_runs_ahead(bench: LoadBench) -> None:
    """Two slots of two half pages: the loader, and nobody else, waits for the device."""
    stage = Stage(bench, staging_slots=2)
    index = stage.start((KEYS, TARGETS))
    launcher, ended = in_thread(lambda: stage.forward(index, KEYS, TARGETS))
    most = 0
    while not ended.wait(0.002):
        most = max(most, stage.device.pending)
        stage.device.step()
    launcher.join()
    while stage.device.pending:
        stage.device.step()
    assert 0 < most <= 4
    assert stage.seen == [(layer, True) for layer in range(LAYERS)]
    assert stage.device.waiters
    assert launcher.ident not in stage.device.waiters
    stage.counter.finish(index)
    assert stage.counter.takeovers == 0


def test_the_plain_pages_do_the_same(bench: LoadBench) -> None:
    """Without a hook, on the device that is a CPU: `open_upload`'s default."""
    pages = KvPages(bench.pool, bench.pages.layout)
    load = LayerLoad(pages, bench.memory, [bench.part(KEYS, TARGETS)])
    load.start(bench.workers)
    load.finish()
    assert all(bench.landed(layer, KEYS, TARGETS) for layer in range(LAYERS))
