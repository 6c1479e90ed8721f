"""The ring that copies to a GPU go through: nothing in it is overwritten before the device has taken it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from sgl_krul.engine.device_queue import CudaDevice, HostDevice, open_device
from sgl_krul.engine.upload import PinnedRing, Upload, open_upload
from tests.devices import FakeDevice
from tests.pools import PAGE, fill_rows, make_pool, page_bytes, pages_of


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("slots", "slot_bytes"), [(1, 9), (2, 16), (3, 70), (4, 1000)])
def test_bytes_arrive_whatever_the_ring_and_the_device(slots: int, slot_bytes: int, seed: int) -> None:
    """Ragged blocks, sources changed at once after `send`, a device that copies at odd moments."""
    rng = np.random.default_rng(seed)
    device = FakeDevice()
    staging = PinnedRing(device.queue(), slots, slot_bytes, pinned=False)
    ended = threading.Event()
    wanted: list[np.ndarray[Any, Any]] = []
    targets: list[np.ndarray[Any, Any]] = []

    def send() -> None:
        for _ in range(30):
            rows, width = int(rng.integers(0, 7)), int(rng.integers(1, 10))
            wide = rng.integers(0, 256, (rows, width + 3), dtype=np.uint8)
            wanted.append(wide[:, :width].copy())
            targets.append(np.zeros((rows, width), np.uint8))
            staging.send(targets[-1], wide[:, :width])
            wide[:] = 0
        ended.set()

    thread = threading.Thread(target=send)
    thread.start()
    steps = np.random.default_rng(seed + 100)
    while not ended.wait(0.0005):
        device.step(int(steps.integers(1, 3)))
    thread.join()
    device.step(1 << 20)
    for target, source in zip(targets, wanted, strict=True):
        assert np.array_equal(target, source)


def test_a_full_ring_makes_the_sender_wait() -> None:
    device = FakeDevice()
    staging = PinnedRing(device.queue(), 2, 8, pinned=False)
    target, source = np.zeros((3, 8), np.uint8), np.arange(24, dtype=np.uint8).reshape(3, 8)
    staging.send(target[:2], source[:2])  # two slots: no need to wait
    assert device.waiters == []
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (staging.send(target[2:], source[2:]), ended.set()))
    thread.start()
    assert not ended.wait(0.05)
    device.step()
    assert ended.wait(20)
    thread.join()
    device.step(9)
    assert np.array_equal(target, source)


def test_small_blocks_share_a_slot() -> None:
    """Fragmented pages: the sender does not wait for a slot a page."""
    device = FakeDevice()
    staging = PinnedRing(device.queue(), 2, 100, pinned=False)
    target, source = np.zeros((40, 5), np.uint8), np.ones((40, 5), np.uint8)
    for row in range(40):
        staging.send(target[row : row + 1], source[row : row + 1])
    assert device.waiters == []
    device.step(100)
    assert target.all()


def test_a_ring_says_what_it_cannot_hold() -> None:
    queue = FakeDevice().queue()
    with pytest.raises(ValueError, match="rows of 9 bytes: expected at most a slot, 8 bytes"):
        PinnedRing(queue, 2, 8, pinned=False).send(np.zeros((1, 9), np.uint8), np.zeros((1, 9), np.uint8))
    for slots, slot_bytes in ((0, 8), (1, 0)):
        with pytest.raises(ValueError, match="expected both at least 1"):
            PinnedRing(queue, slots, slot_bytes, pinned=False)


@pytest.mark.parametrize("v_head_dim", [8, 4, 16])
def test_pages_through_the_ring_are_those_without(v_head_dim: int) -> None:
    """K and V apart, in fragmented runs, of unequal sizes."""
    pools = [make_pool(torch.bfloat16, v_head_dim) for _ in range(2)]
    moves = [(2, 7, 1), (3, 3, 3), (0, 0, 1)]
    for pool, slots in zip(pools, (0, 3), strict=True):
        pages, layout = pages_of(pool)
        device = FakeDevice()
        page_bytes_most = max(layout.k_page_bytes, layout.v_page_bytes)
        upload = Upload(pages, device, staging_slots=slots, slot_bytes=4 * page_bytes_most)
        for layer, rows in enumerate(fill_rows(layout, 8)):
            upload.send(layer, rows, moves)
            device.step(100)
    for layer in range(3):
        for page in range(12):
            assert page_bytes(pools[0], layer, page) == page_bytes(pools[1], layer, page)


def test_a_cpu_copies_when_it_is_asked_to() -> None:
    pool = make_pool()
    pages, layout = pages_of(pool)
    device = open_device(pages.device)
    assert isinstance(device, HostDevice)
    upload = open_upload(pages, device)
    rows = fill_rows(layout, 2)[0]
    upload.queue.follow(device.launched())
    upload.send(0, rows, [(0, 5, 2)])
    event = upload.queue.record()
    device.wait(event)
    event.synchronize()
    assert [rows[row].tobytes() for row in (0, 1)] == [page_bytes(pool, 0, page) for page in (5, 6)]
    assert pool.k_buffer[0].shape[0] % PAGE == 0


def test_a_gpu_has_a_device_of_its_own() -> None:
    assert isinstance(open_device(torch.device("cuda:1")), CudaDevice)
