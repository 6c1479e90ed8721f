"""Host rows -> pages of the KV pool, through a queue of the device."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from sgl_krul.engine.device_queue import Device, DeviceEvent, DeviceQueue
from sgl_krul.engine.pool import KvPages, Rows, Runs

__all__ = ["PinnedRing", "Upload", "open_upload"]

# A slot is large enough for the link to run at its full rate, three of them for the host to fill one while
# one is on its way. Each thread that uploads has its own ring: 12 MiB.
_SLOTS = 3
_SLOT_BYTES = 4 << 20


class PinnedRing:
    """A ring of host buffers that copies to the device go through. One thread at a time.

    A GPU copies beside other work from pinned host memory only, and the memory tier is not pinned (pinning
    gigabytes takes seconds at start, and they can't be given back). Pinned rows would not do either: they
    hold K and V of a page side by side, and the pool holds them apart. So the host copies into a pinned slot
    what the device then takes in one piece. Bounded: the thread that sends waits for the slot that was filled
    longest ago, and the forward takes a layer as enqueued once its last bytes are in the ring.
    """

    def __init__(self, queue: DeviceQueue, slots: int, slot_bytes: int, pinned: bool) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"slots {slots}, slot_bytes {slot_bytes}: expected both at least 1")
        self._queue = queue
        self._slot_bytes = slot_bytes
        self._ring = torch.empty((slots, slot_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._left: list[DeviceEvent | None] = [None] * slots
        self._slot = 0
        self._used = 0

    def send(self, target: Any, source: Rows) -> None:
        """Enqueue `target[:] = source`; `source` may change once this returns.

        `target` are device pages, uint8 [n, width], a tensor or a NumPy view; `source` are host rows of the
        same shape, not necessarily contiguous.

        Raises:
            ValueError: a row is longer than a slot.
        """
        count, width = source.shape
        if width > self._slot_bytes:
            raise ValueError(f"rows of {width} bytes: expected at most a slot, {self._slot_bytes} bytes")
        first = 0
        while first < count:
            rows = min(count - first, (self._slot_bytes - self._used) // width)
            if rows == 0:
                self._next_slot()
                continue
            block = self._ring[self._slot, self._used : self._used + rows * width].view(rows, width)
            np.copyto(block.numpy(), source[first : first + rows])
            self._queue.enqueue(partial(_copy, target[first : first + rows], block))
            self._used += rows * width
            first += rows

    def _next_slot(self) -> None:
        """Go on to the slot that was left longest ago, once the device has taken all of it."""
        self._left[self._slot] = self._queue.record()
        self._slot = (self._slot + 1) % len(self._left)
        left = self._left[self._slot]
        if left is not None:
            left.synchronize()
        self._used = 0


class Upload:
    """One line of copies from host rows to pages. One thread sends at a time.

    Without staging a copy is `KvPages.to_device` in the queue: the rows must stay until it has run.
    """

    def __init__(self, pages: KvPages, device: Device, *, staging_slots: int, slot_bytes: int) -> None:
        self.device = device
        self.queue = device.queue()
        self._pages = pages
        self._staging: PinnedRing | None = None
        if staging_slots:
            pinned = pages.device.type == "cuda"
            self._staging = PinnedRing(self.queue, staging_slots, slot_bytes, pinned)

    def send(self, layer: int, rows: Rows, runs: Runs) -> None:
        """Enqueue the copy of host rows (uint8 [rows, page_segment_bytes]) to device pages for one layer.

        `rows` must stay as they are until an event recorded later has been passed.
        """
        if self._staging is None:
            self.queue.enqueue(partial(self._pages.to_device, layer, rows, runs))
            return
        for target, source in self._pages.parts(layer, rows, runs):
            self._staging.send(target, source)


def open_upload(pages: KvPages, device: Device) -> Upload:
    """An Upload to the pool: through pinned staging on a GPU, straight on a CPU."""
    page_bytes = max(pages.layout.k_page_bytes, pages.layout.v_page_bytes)
    slots = _SLOTS if pages.device.type == "cuda" else 0
    return Upload(pages, device, staging_slots=slots, slot_bytes=max(_SLOT_BYTES, page_bytes))


def _copy(target: Any, block: torch.Tensor) -> None:
    """What the device runs: pinned memory to pages, without a thread that waits for it."""
    torch.as_tensor(target).copy_(block, non_blocking=True)
