"""Where a restore job's loaders put KV: pages of the pool that the scheduler has reserved for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, local

import numpy as np
from numpy.typing import NDArray

from sgl_krul.engine.device_queue import Device, open_device
from sgl_krul.engine.pool import KvPages, Rows
from sgl_krul.engine.upload import Upload, open_upload
from sgl_krul.store.memory import runs

__all__ = ["DeviceSlots"]


class DeviceSlots:
    """The loader's Target over the pool. Any thread may write.

    `device_pages` (int64 [n], on the host) are the pool's pages for the session's pages [first_page,
    first_page + n): those before lie on the device already, in pages of others, and are never written. Made
    by the scheduler's thread when it has reserved the pages: no write runs before what that thread had
    launched until then, which may still read what lay in them.
    """

    def __init__(
        self,
        pages: KvPages,
        device_pages: NDArray[np.int64],
        first_page: int,
        device: Device | None = None,
    ) -> None:
        if device_pages.ndim != 1 or device_pages.dtype != np.int64:
            raise ValueError(
                f"device_pages {device_pages.dtype} {device_pages.shape}: expected int64 [pages]"
            )
        self._pages = pages
        self._device_pages = device_pages
        self._first_page = first_page
        self._device = open_device(pages.device) if device is None else device
        self._reserved = self._device.launched()
        self._thread = local()
        self._changed = Condition()
        self._writes = 0
        self._revoked = False

    @property
    def revoked(self) -> bool:
        """Whether `revoke` was called: what was written since is not there."""
        return self._revoked

    def write(self, layer: int, first_page: int, rows: Rows) -> None:
        """Put the session's pages [first_page, first_page + k) of one layer in place.

        `rows` is uint8 [k, page_segment_bytes]. Returns when the bytes have landed. Pages before the first
        reserved one are left out. After `revoke` it does nothing: whoever revokes has given the job up.

        Raises:
            ValueError: no such layer, pages past the reserved ones, or rows of another shape.
        """
        self._require(layer, first_page, rows)
        skipped = max(0, self._first_page - first_page)
        if skipped >= len(rows):
            return
        start = first_page + skipped - self._first_page
        targets = self._device_pages[start : start + len(rows) - skipped]
        moves = runs(np.arange(skipped, len(rows)), targets)
        with self._write_under_way() as allowed:
            if not allowed:
                return
            upload = self._upload()
            try:
                upload.send(layer, rows, moves)
            finally:
                # After a failure too: what was enqueued before it is still on its way, out of `rows` and
                # into pages that a revoke may give back.
                upload.queue.record().synchronize()

    def revoke(self) -> None:
        """From now on nothing here touches the pool. Waits for the writes under way: memory copies."""
        with self._changed:
            self._revoked = True
            self._changed.wait_for(lambda: self._writes == 0)

    def check(self) -> list[str]:
        """Problems found at rest; empty when sound."""
        with self._changed:
            return [f"{self._writes} writes under way"] if self._writes else []

    def _require(self, layer: int, first_page: int, rows: Rows) -> None:
        layout = self._pages.layout
        if not 0 <= layer < layout.layers:
            raise ValueError(f"layer {layer}: expected 0 to {layout.layers - 1}")
        if rows.ndim != 2 or rows.shape[1] != layout.page_segment_bytes or rows.dtype != np.uint8:
            raise ValueError(
                f"rows {rows.dtype} {rows.shape}: expected uint8 [pages, {layout.page_segment_bytes}]"
            )
        end = self._first_page + len(self._device_pages)
        if first_page < 0 or first_page + len(rows) > end:
            raise ValueError(f"pages {first_page} to {first_page + len(rows)}: expected to lie in 0 to {end}")

    def _upload(self) -> Upload:
        """The calling thread's own."""
        upload: Upload | None = getattr(self._thread, "upload", None)
        if upload is None:
            upload = open_upload(self._pages, self._device)
            upload.queue.follow(self._reserved)
            self._thread.upload = upload
        return upload

    @contextmanager
    def _write_under_way(self) -> Iterator[bool]:
        """Whether the pool may be written; `revoke` waits until the block ends."""
        with self._changed:
            allowed = not self._revoked
            self._writes += allowed
        try:
            yield allowed
        finally:
            if allowed:
                with self._changed:
                    self._writes -= 1
                    self._changed.notify_all()
