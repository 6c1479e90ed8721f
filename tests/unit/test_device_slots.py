"""Reserved pages of the pool as a loader's target: right pages, landed when said, and none after a revoke."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from sgl_krul.engine.device_slots import DeviceSlots
from tests.devices import FakeDevice
from tests.pools import PAGES, KvPages, fill_rows, make_pool, page_bytes, pages_of

FIRST = 2  # the session's pages 0 and 1 lie on the device already
DEVICE_PAGES = [7, 8, 9, 3, 1, 0, 5]  # of its pages 2 to 8
SESSION_PAGES = FIRST + len(DEVICE_PAGES)
PATIENT_S = 20.0


class Watched(KvPages):
    """Pages that call `on_copy(layer, runs)` before each copy to the device."""

    on_copy: Callable[[int, list[Any]], None] = staticmethod(lambda layer, runs: None)

    def to_device(self, layer: int, rows: Any, runs: Sequence[tuple[int, int, int]]) -> None:
        """See KvPages."""
        self.on_copy(layer, list(runs))
        super().to_device(layer, rows, runs)


class Bench:
    """A pool, seven reserved pages of it, and the rows of a session of nine pages."""

    def __init__(
        self, device: FakeDevice | None = None, dtype: torch.dtype = torch.float32, v: int = 8
    ) -> None:
        self.pool = make_pool(dtype, v)
        _, layout = pages_of(self.pool)
        self.pages = Watched(self.pool, layout)
        self.rows = fill_rows(layout, SESSION_PAGES)
        self.before = self.snapshot()
        self.slots = DeviceSlots(self.pages, np.array(DEVICE_PAGES, np.int64), FIRST, device)

    def snapshot(self) -> list[list[bytes]]:
        """All bytes of the pool, by layer and page."""
        return [[page_bytes(self.pool, layer, page) for page in range(PAGES)] for layer in range(3)]

    def write(self, layer: int, first: int, pages: int) -> None:
        """Write the session's pages [first, first + pages) of a layer."""
        self.slots.write(layer, first, self.rows[layer][first : first + pages])

    def wanted(self, cells: Sequence[tuple[int, int]]) -> list[list[bytes]]:
        """The pool as it is to be when these (layer, session page) were written, and nothing else."""
        wanted = [list(layer) for layer in self.before]
        for layer, page in cells:
            if page >= FIRST:
                wanted[layer][DEVICE_PAGES[page - FIRST]] = self.rows[layer][page].tobytes()
        return wanted


@pytest.mark.parametrize(("dtype", "v"), [(torch.float32, 8), (torch.bfloat16, 4), (torch.float16, 16)])
def test_every_range_of_pages_lands_where_it_belongs(dtype: torch.dtype, v: int) -> None:
    for first in range(SESSION_PAGES):
        for pages in range(1, SESSION_PAGES - first + 1):
            bench = Bench(None, dtype, v)
            bench.write(1, first, pages)
            assert bench.snapshot() == bench.wanted([(1, first + i) for i in range(pages)])


def test_neighbours_are_one_copy() -> None:
    bench = Bench()
    copies: list[Any] = []
    bench.pages.on_copy = lambda layer, runs: copies.append(runs)
    bench.write(0, 1, 6)  # page 1 is not ours; 2, 3, 4 are neighbours in the pool, 5 and 6 are not
    assert copies == [[(1, 7, 3), (4, 3, 1), (5, 1, 1)]]
    bench.write(0, 0, 2)  # nothing of it is ours
    bench.write(0, 3, 0)
    assert len(copies) == 1


@pytest.mark.parametrize(
    ("layer", "first", "shape", "said"),
    [
        (3, 2, (1, None), "layer 3: expected 0 to 2"),
        (-1, 2, (1, None), "layer -1"),
        (0, 8, (2, None), "pages 8 to 10: expected to lie in 0 to 9"),
        (0, -1, (1, None), "pages -1 to 0"),
        (0, 2, (1, 7), "expected uint8"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    layer: int, first: int, shape: tuple[int, int | None], said: str
) -> None:
    bench = Bench()
    width = bench.pages.layout.page_segment_bytes if shape[1] is None else shape[1]
    with pytest.raises(ValueError, match=said):
        bench.slots.write(layer, first, np.zeros((shape[0], width), np.uint8))
    with pytest.raises(ValueError, match="expected uint8"):
        bench.slots.write(0, 2, np.zeros((1, bench.pages.layout.page_segment_bytes), np.int8))
    assert bench.snapshot() == bench.before


@pytest.mark.parametrize("pages", [np.zeros(3, np.int32), np.zeros((3, 1), np.int64)])
def test_pages_of_another_type_are_refused(pages: Any) -> None:
    with pytest.raises(ValueError, match=r"expected int64 \[pages\]"):
        DeviceSlots(pages_of(make_pool())[0], pages, 0)


def test_many_threads_write_a_session() -> None:
    bench = Bench()
    cells = [(layer, page) for layer in range(3) for page in range(SESSION_PAGES)]
    order = np.random.default_rng(3).permutation(len(cells))
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda index: bench.write(*cells[index], 1), order))
    assert bench.snapshot() == bench.wanted(cells)
    assert bench.slots.check() == []


def test_revoke_waits_for_a_write_and_lets_no_other_through() -> None:
    bench = Bench()
    entered, go, ended = threading.Event(), threading.Event(), threading.Event()

    def stall(layer: int, runs: list[Any]) -> None:
        entered.set()
        assert go.wait(PATIENT_S)

    bench.pages.on_copy = stall
    writer = threading.Thread(target=lambda: bench.write(0, 2, 3))
    writer.start()
    assert entered.wait(PATIENT_S)
    assert bench.slots.check() == ["1 writes under way"]
    revoker = threading.Thread(target=lambda: (bench.slots.revoke(), ended.set()))
    revoker.start()
    assert not ended.wait(0.05)
    assert bench.slots.revoked
    bench.write(1, 2, 3)  # at once, and nothing of it
    go.set()
    assert ended.wait(PATIENT_S)
    writer.join()
    revoker.join()
    bench.write(2, 2, 3)
    bench.slots.revoke()
    assert bench.snapshot() == bench.wanted([(0, 2), (0, 3), (0, 4)])
    assert bench.slots.check() == []


def test_a_revoke_in_a_storm_of_writes_is_the_end_of_them() -> None:
    for seed in range(5):
        bench = Bench()
        stop = threading.Event()

        def storm(layer: int, bench: Bench = bench, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                bench.write(layer, 0, SESSION_PAGES)

        threads = [threading.Thread(target=storm, args=(index % 3,)) for index in range(4)]
        for thread in threads:
            thread.start()
        threading.Event().wait(0.002 * seed)
        bench.slots.revoke()
        for buffer in (*bench.pool.k_buffer, *bench.pool.v_buffer):
            buffer.fill_(7)  # the pages belong to somebody else now
        given_back = bench.snapshot()
        threading.Event().wait(0.005)
        stop.set()
        for thread in threads:
            thread.join()
        assert bench.snapshot() == given_back


# -- on a device that copies beside its threads --


def writing(bench: Bench, layer: int, first: int, pages: int) -> tuple[threading.Thread, threading.Event]:
    """A write in a thread; the event says that it has returned."""
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (bench.write(layer, first, pages), ended.set()))
    thread.start()
    return thread, ended


def test_a_write_returns_when_its_bytes_have_landed() -> None:
    device = FakeDevice()
    bench = Bench(device)
    thread, ended = writing(bench, 0, 2, 4)
    assert not ended.wait(0.05)
    assert bench.snapshot() == bench.before
    device.step()
    assert ended.wait(PATIENT_S)
    thread.join()
    assert bench.snapshot() == bench.wanted([(0, page) for page in range(2, 6)])


def test_threads_do_not_wait_for_each_others_copies() -> None:
    device = FakeDevice()
    bench = Bench(device)
    one, one_ended = writing(bench, 0, 2, 2)
    assert not one_ended.wait(0.05)
    two, two_ended = writing(bench, 1, 4, 2)
    assert not two_ended.wait(0.05)
    device.step(queue=1)
    assert two_ended.wait(PATIENT_S)
    assert not one_ended.is_set()
    device.step(queue=0)
    assert one_ended.wait(PATIENT_S)
    one.join()
    two.join()
    assert bench.snapshot() == bench.wanted([(0, 2), (0, 3), (1, 4), (1, 5)])


def test_what_was_launched_before_the_reservation_comes_first() -> None:
    """A forward that still reads the pages of the former owner reads them."""
    device = FakeDevice()
    device.hold_compute(True)
    read: list[bytes] = []
    device.launch(lambda: read.append(page_bytes(bench.pool, 0, DEVICE_PAGES[0])))
    bench = Bench(device)
    device.launch(lambda: None)  # launched later: not waited for
    thread, ended = writing(bench, 0, 2, 1)
    assert not ended.wait(0.05)
    assert device.step(9) == 0
    device.hold_compute(False)
    assert device.step(9) == 1
    assert ended.wait(PATIENT_S)
    thread.join()
    assert read == [bench.before[0][DEVICE_PAGES[0]]]


def test_a_revoke_waits_for_the_device_too() -> None:
    device = FakeDevice()
    bench = Bench(device)
    writer, ended = writing(bench, 2, 0, SESSION_PAGES)
    assert not ended.wait(0.05)
    revoked = threading.Event()
    revoker = threading.Thread(target=lambda: (bench.slots.revoke(), revoked.set()))
    revoker.start()
    assert not revoked.wait(0.05)
    assert device.step(9) == 1
    assert revoked.wait(PATIENT_S)
    writer.join()
    revoker.join()
    bench.write(1, 2, 1)
    assert device.pending == 0
    assert bench.snapshot() == bench.wanted([(2, page) for page in range(SESSION_PAGES)])
